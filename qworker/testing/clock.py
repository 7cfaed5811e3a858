"""A clock for tests, which the test moves."""

from __future__ import annotations

import threading
import time

__all__ = ["FakeClock"]


class FakeClock:
    """A `Clock` for tests. Its times change only with `advance` and `step`.

    Any thread can read and advance it.

    Args:
        start: The first time of the wall clock, in Unix seconds. None: the time of the machine. A store that uses the
            times of its file system too needs None.
    """

    def __init__(self, start: float | None = None) -> None:
        self._lock = threading.Lock()
        self._wall = time.time() if start is None else start
        self._monotonic = 1000.0

    def __repr__(self) -> str:
        return f"<FakeClock {self._wall}>"

    def time(self) -> float:
        """Return the seconds since the Unix epoch."""
        with self._lock:
            return self._wall

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        with self._lock:
            return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both clocks.

        Raises:
            ValueError: `seconds` is negative. See `step`.
        """
        if seconds < 0:
            raise ValueError("time can only go forward: use step() to set the wall clock back")
        with self._lock:
            self._wall += seconds
            self._monotonic += seconds

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back by `seconds`, as an administrator or NTP does. No time passes."""
        with self._lock:
            self._wall += seconds
