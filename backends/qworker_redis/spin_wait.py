"""Polling for an answer instead of sleeping until it arrives.

A Redis on the same machine answers a single small command in about 50 us. A processor that went to sleep needs as long
to wake up, and on a virtual machine twice as long. So a caller that makes one call after another checks for the answer
in every pass of the event loop, for a moment. Everything else in the loop continues, and the processor spends what
waking up would have taken.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["CLOSE", "LONGEST", "SpinWait"]

T = TypeVar("T")

# Seconds. An answer over a network mostly takes longer.
LONGEST = 0.0002
# Seconds since the last answer. If calls are further apart, polling gains nothing, and a worker on this machine could
# use the processor.
CLOSE = 0.0005
_MOST_SKIPPED = 1023


class SpinWait:
    """Decides for one connection whether to poll. Each time that polling did not help, twice as many calls sleep.

    Args:
        clock: Returns seconds.
        processors: The number that this process may use. With a single one, polling keeps the server from answering.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, processors: int | None = None) -> None:
        self._clock = clock
        self._possible = (len(os.sched_getaffinity(0)) if processors is None else processors) > 1
        self._answered = -math.inf
        self._pause = 0
        self._skip = 0

    async def answer(self, future: asyncio.Future[T]) -> T:
        """Wait for the result of a future."""
        now = self._clock()
        if self._possible and now - self._answered < CLOSE:
            if self._skip:
                self._skip -= 1
            elif await self._poll_until(now + LONGEST, future):
                self._pause = 0
            else:
                self._pause = self._skip = min(2 * self._pause + 1, _MOST_SKIPPED)
        reply = await future
        self._answered = self._clock()
        return reply

    async def _poll_until(self, end: float, future: asyncio.Future[T]) -> bool:
        try:
            while not future.done():
                if self._clock() > end:
                    return False
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            future.cancel()
            raise
        return True
