"""Time, behind one seam: everything in the core and in the backends that reads a clock takes a `Clock`."""

from __future__ import annotations

from time import monotonic as _monotonic
from time import time as _wall
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """Two readings in seconds: the wall clock for what others see, the monotonic one for what this process waits."""

    def time(self) -> float:
        """Seconds since the Unix epoch; may step."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever rise, at the rate of real time; the origin has no meaning."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        return _wall()

    def monotonic(self) -> float:
        """Seconds that only ever rise."""
        return _monotonic()


SYSTEM_CLOCK: Clock = SystemClock()
