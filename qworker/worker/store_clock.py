"""The time of the store, as a worker knows it between two answers."""

from __future__ import annotations

import asyncio

from qworker.clock import Clock

__all__ = ["StoreClock"]


class StoreClock:
    """The store's time.

    Before the first answer of the store, it is the time of this process.

    Args:
        clock: The clock of this process.

    Attributes:
        known: Set by the first answer.
    """

    __slots__ = ("_clock", "_taken", "_taken_at", "known")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.known = asyncio.Event()
        self._taken = 0.0
        self._taken_at = 0.0

    def take(self, now: float, took: float = 0.0) -> None:
        """Take the store's time from an answer that has just arrived.

        Args:
            now: The time in the answer, in Unix seconds.
            took: The seconds that the call took. A clock that a long call explains does not step.
        """
        if self.known.is_set():
            now = min(max(self.time(), now), now + took)
        self._taken, self._taken_at = now, self._clock.monotonic()
        self.known.set()

    def time(self) -> float:
        """Return the store's time in Unix seconds."""
        if not self.known.is_set():
            return self._clock.time()
        return self._taken + (self._clock.monotonic() - self._taken_at)

    def monotonic(self) -> float:
        """Return the monotonic seconds that pass between two answers."""
        return self._clock.monotonic()
