"""The time of the store, as a worker knows it between two answers."""

from __future__ import annotations

from qworker.clock import Clock

__all__ = ["StoreClock"]


class StoreClock:
    """The store's time.

    Until the store has told it, it is the time of this process.

    Args:
        clock: The clock of this process.
    """

    __slots__ = ("_clock", "_told", "_told_at")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: float | None = None
        self._told_at = 0.0

    def tell(self, now: float) -> None:
        """Take the store's time from an answer that has just arrived."""
        self._told, self._told_at = now, self._clock.monotonic()

    def time(self) -> float:
        """Return the store's time in Unix seconds."""
        if self._told is None:
            return self._clock.time()
        return self._told + (self._clock.monotonic() - self._told_at)

    def monotonic(self) -> float:
        """Return the monotonic seconds that pass between two answers."""
        return self._clock.monotonic()
