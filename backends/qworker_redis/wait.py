"""Waiting for work: a blocking read of the queue's wake list, on a connection of its own, and never of messages.

A wake-up that is lost costs a moment: whoever leases and leaves something wakes the next, and every reap heals the list.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import cast

from qworker.errors import BackendError, BackendUnavailable
from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import NoScript, Redirected, Reply
from qworker_redis.options import Options
from qworker_redis.scripts import queue_key
from qworker_redis.topology import queue_slot

__all__ = ["ReadTimeout", "Waiting"]

# Seconds that one blocking read may take: a connection that is gone without a word is noticed soon after.
_LONGEST_BLOCK = 5.0
_SHORTEST_BLOCK = 0.001
# Seconds after its time in which the answer to a blocking read must be here.
_GRACE = 1.0
_REDIRECTION_PAUSE = 0.05


class ReadTimeout(BackendUnavailable):
    """A blocking read did not end in time; its connection was given up."""


class Waiting:
    """The waiting half of a backend.

    Args:
        options: of the store.
        pool: its connections.
    """

    def __init__(self, options: Options, pool: ConnectionPool) -> None:
        self._options = options
        self._pool = pool

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Return when a queue may have something, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            soonest = await self._next_due(queues)
            left = min(deadline - loop.time(), soonest)
            block = min(left, _LONGEST_BLOCK)
            if left <= 0 or await self._block(queues, block) or soonest <= block:
                return

    async def _next_due(self, queues: Sequence[str]) -> float:
        """Seconds until a queue has something, as far as is known."""
        replies = await asyncio.gather(*[self._pool.run_script("peek", queue, (0,)) for queue in queues])
        known = [reply / 1e6 for reply in cast("list[int]", replies) if reply >= 0]
        return min(known, default=math.inf)

    async def _block(self, queues: Sequence[str], seconds: float) -> bool:
        """Wait for a wake-up of any of the queues; whether there was one."""
        groups: dict[int, list[str]] = {}
        for queue in queues:
            groups.setdefault(queue_slot(queue) if self._options.mode == "cluster" else 0, []).append(queue)
        if len(groups) == 1:
            return await self._block_on(*groups.popitem(), seconds)
        tasks = [asyncio.create_task(self._block_on(slot, names, seconds)) for slot, names in groups.items()]
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return any(task.result() for task in finished)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _block_on(self, slot: int, queues: Sequence[str], seconds: float) -> bool:
        try:
            woken, _ = await self.blocked(slot, queues, seconds, None)
        except ReadTimeout:
            return False
        except Redirected:
            # The queue is on its way to another server.
            await asyncio.sleep(min(seconds, _REDIRECTION_PAUSE))
            return False
        return woken is not None

    async def blocked(
        self, slot: int, queues: Sequence[str], seconds: float, lease: Sequence[Argument] | None
    ) -> tuple[Reply, Reply | None]:
        """Read the wake lists of queues of one slot; and lease in the same trip.

        Args:
            slot: where the queues are; any in a store without slots.
            queues: whose wake lists.
            seconds: for how long.
            lease: arguments of the lease script, with the part of its last key in front; None: no lease.

        Raises:
            ReadTimeout: no answer, and perhaps a lease: it must be given back.

        Returns:
            The answers; the second is None without a lease, or when the server must be taught the script first.
        """
        seconds = max(seconds, _SHORTEST_BLOCK)
        async with self._pool.blocking_connection(slot) as connection:
            answers = [
                connection.send("BLPOP", *[queue_key(queue, "wake") for queue in queues], seconds, within=seconds)
            ]
            if lease is not None:
                answers.append(self._send_lease(connection, queues[0], lease, seconds))
            await self._answered(answers, seconds)
            replies: list[Reply] = [None, None]
            for number, answer in enumerate(answers):
                try:
                    replies[number] = answer.result()
                except NoScript:
                    continue
                except BackendError as error:
                    self._pool.learn_from(error, slot, connection)
                    raise
            return replies[0], replies[1]

    async def _answered(self, answers: Sequence[asyncio.Future[Reply]], seconds: float) -> None:
        """Wait for answers, and not for longer than the block and some grace.

        A server whose clock is set back blocks for as long again; it is there, and need only be asked anew.
        """
        for answer in answers:
            answer.add_done_callback(_taken)
        _, late = await asyncio.wait(answers, timeout=seconds + _GRACE)
        if late:
            raise ReadTimeout("a blocking read took too long")

    def _send_lease(
        self, connection: Connection, queue: str, lease: Sequence[Argument], seconds: float
    ) -> asyncio.Future[Reply]:
        void, *arguments = lease
        return connection.send(
            *self._pool.script_command(connection, "lease", queue, arguments, (str(void),)), within=seconds
        )


def _taken(answer: asyncio.Future[Reply]) -> None:
    """Take the error of an answer: whether or not anybody reads it, it is no surprise."""
    if not answer.cancelled():
        answer.exception()
