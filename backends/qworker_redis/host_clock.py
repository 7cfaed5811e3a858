"""A clock of this host that is never set, so that scripts notice when the clock of the server was set."""

from __future__ import annotations

import time

from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.kit.linux import boot_id

__all__ = ["HostClock"]


class HostClock:
    """Microseconds since this host has started. Its processes can compare them, and a suspended host counts them.

    Args:
        clock: The clock of the backend. One that is not the machine's is its own measure.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = None if clock is SYSTEM_CLOCK and hasattr(time, "CLOCK_BOOTTIME") else clock
        try:
            self._boot = boot_id()
        except OSError:
            # Not Linux, or no /proc: each process only knows what it has seen itself.
            self._boot = ""

    def microseconds(self) -> int:
        """Return the microseconds."""
        if self._clock is None:
            return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        return int(self._clock.monotonic() * 1e6)

    def reading(self) -> str:
        """Return the id of this start of the host, and the microseconds. Empty: the id is not known."""
        return f"{self._boot} {self.microseconds()}" if self._boot else ""
