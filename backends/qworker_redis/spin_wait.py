"""Looking for an answer instead of sleeping until it is there.

A Redis on the same machine answers a single small command in some 50 us, while a processor that went to sleep needs as long, and on a
virtual machine twice that, to wake up and be told. So whoever makes one call after another looks for the answer in one pass of the event
loop after another, for a moment: everything else in the loop goes on, and the processor's time is what waking up would have taken.
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

# Seconds; an answer over a network mostly takes longer.
LONGEST = 0.0002
# Seconds since the last answer. Where calls are far apart, nothing is gained, and a worker on this machine could use the processor.
CLOSE = 0.0005
_MOST_SKIPPED = 1023


class SpinWait:
    """Whether that pays for one connection: each time that it did not, it is left for twice as many calls.

    Args:
        clock: seconds.
        processors: how many this process may use. With a single one, looking keeps the server from answering.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, processors: int | None = None) -> None:
        self._clock = clock
        self._possible = (len(os.sched_getaffinity(0)) if processors is None else processors) > 1
        self._answered = -math.inf
        self._pause = 0
        self._skip = 0

    async def answer(self, future: asyncio.Future[T]) -> T:
        """What `await future` gives."""
        now = self._clock()
        if self._possible and now - self._answered < CLOSE:
            if self._skip:
                self._skip -= 1
            elif await self._before(now + LONGEST, future):
                self._pause = 0
            else:
                self._pause = self._skip = min(2 * self._pause + 1, _MOST_SKIPPED)
        reply = await future
        self._answered = self._clock()
        return reply

    async def _before(self, end: float, future: asyncio.Future[T]) -> bool:
        try:
            while not future.done():
                if self._clock() > end:
                    return False
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            future.cancel()
            raise
        return True
