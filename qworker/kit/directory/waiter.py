"""One wait for messages, and the events that end it early."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

__all__ = ["Waiter"]


class Waiter:
    """One `wait`.

    Args:
        queues: The names of the queues that it waits for.
    """

    __slots__ = ("_loop", "_timer", "_woken", "queues")

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = frozenset(queues)
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[bool] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, notified: bool = True) -> None:
        """End the wait.

        Args:
            notified: True if something happened. False: the time is over.
        """
        if not self._woken.done():
            self._woken.set_result(notified)

    def wake_later(self) -> None:
        """End the wait slightly later than the waiter that has the trigger."""
        self._timer = self._timer or self._loop.call_later(random.uniform(0.002, 0.02), self.wake)

    async def sleep(self, seconds: float) -> bool:
        """Wait for up to `seconds` and return whether something happened."""
        ends = self._loop.call_later(seconds, self.wake, False)
        try:
            notified = await self._woken
        finally:
            ends.cancel()
        if not notified:
            self._woken = self._loop.create_future()
        return notified

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
