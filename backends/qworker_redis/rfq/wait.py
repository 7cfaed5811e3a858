"""Waiting for work on a list to which other programs publish too, without taking anything from it.

`BLMOVE backlog backlog RIGHT RIGHT` waits until there is an element and moves it back to its place, in one step. A
process that dies or is cancelled while it waits has nothing to lose. Every idle worker of a topic wakes up for a
message. Those that find nothing wait again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from qworker_redis.connection import Argument, pack
from qworker_redis.connections import ignore_result
from qworker_redis.error_replies import Reply
from qworker_redis.rfq.keys import rfq_key
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot
from qworker_redis.wait import PAUSED, SHORTEST_BLOCK, WakeListWaiter

__all__ = ["BacklogWaiter"]

# Seconds until a paused topic is checked again: its list says nothing about pauses.
_PAUSED_POLL = 0.25
_LONGEST_WATCH = 5.0


class BacklogWaiter(WakeListWaiter):
    """Waits for the messages of one backend.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store)
        # The paused topics at the last check.
        self._paused: frozenset[str] = frozenset()
        self._watches: dict[str, asyncio.Task[bool]] = {}

    async def _next_due(self, queues: Sequence[str]) -> tuple[float, Sequence[str]]:
        """Return the seconds until a topic has a message or a paused one is checked again, and the usable topics."""
        found = await self._peek(queues)
        self._paused = frozenset(queue for queue, due in found.items() if due == PAUSED)
        known = [due / 1e6 for due in found.values() if due >= 0]
        return min(known, default=_PAUSED_POLL if self._paused else math.inf), tuple(found)

    async def _wait_for_any(self, queues: Sequence[str], seconds: float) -> bool:
        """Wait until one of the topics has a message. Return whether one has."""
        awake = [queue for queue in queues if queue not in self._paused]
        seconds = min(seconds, _PAUSED_POLL) if len(awake) < len(queues) else seconds
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
        """Return the wait for one of several topics. Ending it with the call would cost its connection."""
        watch = self._watches.get(queue)
        if watch is None:
            watch = asyncio.create_task(self._block_on(queue_slot(queue), [queue], _LONGEST_WATCH))
            watch.add_done_callback(ignore_result)
            self._watches[queue] = watch
        return watch

    async def block(
        self, slot: int, queues: Sequence[str], seconds: float, lease: Sequence[Argument] | None
    ) -> tuple[Reply, Reply | None]:
        """Wait until the topic's list has an element, and leave it there.

        Raises:
            ReadTimeout: No answer.
        """
        del lease
        seconds = max(seconds, SHORTEST_BLOCK)
        backlog = rfq_key(queues[0], "backlog")
        command = pack(("BLMOVE", backlog, backlog, "RIGHT", "RIGHT", seconds))
        (reply,) = await self._send_and_wait(slot, lambda _: [command], seconds)
        return reply, None
