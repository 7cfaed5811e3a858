"""Waiting for work on a list that others publish to as well, without taking anything from it.

`BLMOVE backlog backlog RIGHT RIGHT` waits until there is an element and puts it where it was, in one step: whoever dies or is cancelled
while it waits has nothing to lose. Every idle worker of a topic wakes for a message; the others find nothing and wait again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import cast

from qworker.errors import BackendError
from qworker_redis.connection import Argument
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.options import Options
from qworker_redis.rfq.keys import rfq_key
from qworker_redis.topology import queue_slot
from qworker_redis.wait import Waiting

__all__ = ["PAUSED", "RfqWaiting"]

# What scripts answer, in microseconds, instead of the time until there is work.
PAUSED = -2
# Seconds between looks at a paused topic: its list says nothing of pauses.
_PAUSED_LOOK = 0.25
_SHORTEST_BLOCK = 0.001
_LONGEST_WATCH = 5.0


class RfqWaiting(Waiting):
    """The waiting half of the backend."""

    def __init__(self, options: Options, pool: ConnectionPool) -> None:
        super().__init__(options, pool)
        # As of the last look.
        self._paused: frozenset[str] = frozenset()
        self._watches: dict[str, asyncio.Task[bool]] = {}

    async def _next_due(self, queues: Sequence[str]) -> float:
        """Seconds until a topic has something, or until the next look at a paused one."""
        replies = cast(
            "list[int]", await asyncio.gather(*[self._pool.run_script("peek", queue, (0,)) for queue in queues])
        )
        self._paused = frozenset(q for q, reply in zip(queues, replies, strict=True) if reply == PAUSED)
        known = [reply / 1e6 for reply in replies if reply >= 0]
        return min(known, default=_PAUSED_LOOK if self._paused else math.inf)

    async def _block(self, queues: Sequence[str], seconds: float) -> bool:
        """Wait until one of the topics has something; whether one has."""
        awake = [queue for queue in queues if queue not in self._paused]
        seconds = min(seconds, _PAUSED_LOOK) if len(awake) < len(queues) else seconds
        if not awake:
            await asyncio.sleep(seconds)
            return False
        if len(awake) == 1:
            return await self._block_on(queue_slot(awake[0]), awake, seconds)
        watches = [self._watch(queue) for queue in awake]
        await asyncio.wait(watches, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ended = [queue for queue in awake if self._watches[queue].done()]
        woken = [self._watches.pop(queue).result() for queue in ended]
        return any(woken)

    def _watch(self, queue: str) -> asyncio.Task[bool]:
        """A wait on one of several topics; it goes on when another's has ended, for ending it would cost its connection."""
        watch = self._watches.get(queue)
        if watch is None:
            watch = asyncio.create_task(self._block_on(queue_slot(queue), [queue], _LONGEST_WATCH))
            watch.add_done_callback(_taken)
            self._watches[queue] = watch
        return watch

    async def blocked(
        self, slot: int, queues: Sequence[str], seconds: float, lease: Sequence[Argument] | None
    ) -> tuple[Reply, Reply | None]:
        """Wait until the topic's list has an element, and leave it there.

        Raises:
            ReadTimeout: no answer.
        """
        del lease
        seconds = max(seconds, _SHORTEST_BLOCK)
        backlog = rfq_key(queues[0], "backlog")
        async with self._pool.blocking_connection(slot) as connection:
            answer = connection.send("BLMOVE", backlog, backlog, "RIGHT", "RIGHT", seconds, within=seconds)
            await self._answered([answer], seconds)
            try:
                return answer.result(), None
            except BackendError as error:
                self._pool.learn_from(error, slot, connection)
                raise


def _taken(watch: asyncio.Task[bool]) -> None:
    """Take the error of a watch: whether or not anybody waits for it any more, it is no surprise."""
    if not watch.cancelled():
        watch.exception()
