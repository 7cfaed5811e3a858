"""A clock that moves only when it is told to."""

from __future__ import annotations

import threading
import time

__all__ = ["FakeClock"]


class FakeClock:
    """A `Clock` for tests: both readings stand still until `advance`.

    Safe to read and advance from any thread.

    Args:
        start: The wall clock's first reading, in Unix seconds; None takes the machine's, which is what a store needs that
            also sees the times its file system gives.
    """

    def __init__(self, start: float | None = None) -> None:
        self._lock = threading.Lock()
        self._wall = time.time() if start is None else start
        self._monotonic = 1000.0

    def __repr__(self) -> str:
        return f"<FakeClock {self._wall}>"

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        with self._lock:
            return self._wall

    def monotonic(self) -> float:
        """Seconds that only ever rise."""
        with self._lock:
            return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both clocks.

        Raises:
            ValueError: `seconds` is negative; see `step`.
        """
        if seconds < 0:
            raise ValueError("time can only go forward: use step() to set the wall clock back")
        with self._lock:
            self._wall += seconds
            self._monotonic += seconds

    def step(self, seconds: float) -> None:
        """Set the wall clock forwards or back while no time passes, as an administrator or NTP does."""
        with self._lock:
            self._wall += seconds
