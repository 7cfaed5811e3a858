"""The clock that all code of the core and the backends reads the time from."""

from __future__ import annotations

from time import monotonic as _monotonic
from time import time as _wall
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """A source of time in seconds.

    The wall clock is for times that other processes see. The monotonic clock is for the waits of this process.
    """

    def time(self) -> float:
        """Return the seconds since the Unix epoch. The value can jump when the clock is set."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease and have no fixed origin. They run at the rate of real time."""
        ...


class SystemClock:
    """The clocks of the machine."""

    __slots__ = ()

    def time(self) -> float:
        """Return the seconds since the Unix epoch."""
        return _wall()

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        return _monotonic()


SYSTEM_CLOCK: Clock = SystemClock()
