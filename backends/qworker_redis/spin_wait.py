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
from collections.abc import Awaitable, Callable

__all__ = ["CLOSE", "LONGEST", "SpinWait"]

# Seconds. An answer over a network mostly takes longer.
LONGEST = 0.0002
# Seconds since the last answer. If calls are further apart, polling gains nothing, and a worker on this machine could
# use the processor.
CLOSE = 0.0005
_MOST_SKIPPED = 1023


class SpinWait:
    """Decides for the calls to one server whether to poll. Each time that it did not help, twice as many calls sleep.

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

    def is_worth_it(self) -> bool:
        """Return whether the next call should poll."""
        if not self._possible or self._clock() - self._answered >= CLOSE:
            return False
        if self._skip:
            self._skip -= 1
            return False
        return True

    async def poll(self, can_read: Callable[[], Awaitable[bool]]) -> None:
        """Return when a connection has an answer, or when sleeping until it arrives costs less."""
        end = self._clock() + LONGEST
        while not await can_read():
            if self._clock() > end:
                self._pause = self._skip = min(2 * self._pause + 1, _MOST_SKIPPED)
                return
            await asyncio.sleep(0)
        self._pause = 0

    def answered(self) -> None:
        """Record that a call has its answer now."""
        self._answered = self._clock()
