"""The time of the store, as a worker knows it between two answers."""

from __future__ import annotations

from qworker.clock import Clock

__all__ = ["StoreClock"]


class StoreClock:
    """The store's time.

    Before the first answer of the store, it is the time of this process.

    Args:
        clock: The clock of this process.
    """

    __slots__ = ("_clock", "_taken", "_taken_at")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken: float | None = None
        self._taken_at = 0.0

    def take(self, now: float) -> None:
        """Take the store's time from an answer that has just arrived."""
        self._taken, self._taken_at = now, self._clock.monotonic()

    def time(self) -> float:
        """Return the store's time in Unix seconds."""
        if self._taken is None:
            return self._clock.time()
        return self._taken + (self._clock.monotonic() - self._taken_at)

    def monotonic(self) -> float:
        """Return the monotonic seconds that pass between two answers."""
        return self._clock.monotonic()
