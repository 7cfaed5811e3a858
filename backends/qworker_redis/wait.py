"""Waiting for work: a blocking read of the wake lists of queues, on a separate connection. It never reads messages.

A lost wake-up costs a moment: a worker that leases and leaves messages wakes the next one, and every reap repairs the
list.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import cast

from qworker.errors import BackendError, BackendUnavailable, QueueDamaged
from qworker_redis.connection import Argument, Connection, pack
from qworker_redis.error_replies import NoScript, Redirected, Reply
from qworker_redis.keys import queue_key
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot
from qworker_redis.wrong_type import damage_of

__all__ = ["PAUSED", "REDIRECTION_PAUSE", "SHORTEST_BLOCK", "ReadTimeout", "WakeListWaiter"]

# The answer of scripts, in microseconds, instead of the time until there is work. The queue's list does not show when
# it is resumed.
PAUSED = -2
# Seconds until a queue that is being moved to another server is requested again.
REDIRECTION_PAUSE = 0.05
# Seconds that one blocking read may take. If a connection is lost silently, this is noticed soon after.
SHORTEST_BLOCK = 0.001
_LONGEST_BLOCK = 5.0
# Seconds after its time in which the answer to a blocking read must arrive.
_GRACE = 1.0


class ReadTimeout(BackendUnavailable):
    """A blocking read did not finish in time. Its connection was closed."""


class WakeListWaiter:
    """Waits for the messages of one backend.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._options = store.options
        self._pool = store.pool

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Return when a queue may have a message, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            while True:
                next_due, queues = await self._next_due(queues)
                left = min(deadline - loop.time(), next_due)
                seconds = min(left, _LONGEST_BLOCK)
                if left <= 0 or await self._wait_for_any(queues, seconds) or next_due <= seconds:
                    return
        except asyncio.CancelledError:
            for queue in queues:
                self._store.start_task(self._wake_another(queue))
            raise

    async def _wake_another(self, queue: str) -> None:
        """Pass on a wake-up that a cancelled wait may have taken."""
        try:
            await self._pool.run_script("peek", queue, (1,), retry_timeout=0)
        except (BackendUnavailable, QueueDamaged):
            # Every reap does this too.
            return

    async def _next_due(self, queues: Sequence[str]) -> tuple[float, Sequence[str]]:
        """Return the seconds until a queue has a message, as far as is known, and the queues that can be used."""
        found = await self._peek(queues)
        return min([due / 1e6 for due in found.values() if due >= 0], default=math.inf), tuple(found)

    async def _peek(self, queues: Sequence[str]) -> dict[str, int]:
        """Return the answer of the script `peek` for each queue. Damaged queues are left out.

        Raises:
            QueueDamaged: No queue can be used.
        """
        calls = [self._pool.run_script("peek", queue, (0,)) for queue in queues]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        for error in errors:
            if len(errors) == len(queues) or not isinstance(error, QueueDamaged):
                raise error
        return {queue: cast("int", r) for queue, r in zip(queues, replies, strict=True) if not isinstance(r, Exception)}

    async def _wait_for_any(self, queues: Sequence[str], seconds: float) -> bool:
        """Wait for a wake-up of any of the queues. Return whether there was one."""
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
            woken, _ = await self.block(slot, queues, seconds, None)
        except ReadTimeout:
            return False
        except Redirected:
            # The queue is being moved to another server.
            await asyncio.sleep(min(seconds, REDIRECTION_PAUSE))
            return False
        return woken is not None

    async def block(
        self, slot: int, queues: Sequence[str], seconds: float, lease: Sequence[Argument] | None
    ) -> tuple[Reply, Reply | None]:
        """Read the wake lists of queues of one slot, and lease in the same trip.

        Args:
            slot: The slot of the queues. Any slot in a store without slots.
            queues: The queues.
            seconds: Seconds to block.
            lease: The part of the last key of the lease script, then its arguments. None: no lease.

        Raises:
            ReadTimeout: No answer. If there is a lease, it must be released.

        Returns:
            The two answers. The second one is None without a lease, or if the server does not know the script.
        """
        seconds = max(seconds, SHORTEST_BLOCK)
        keys = [queue_key(queue, "wake") for queue in queues]

        def commands(connection: Connection) -> list[bytes]:
            wanted = [pack(("BLPOP", *keys, seconds))]
            if lease is not None:
                wanted.append(self._pack_lease(connection, queues[0], lease))
            return wanted

        try:
            woken, *leased = await self._send_and_wait(slot, commands, seconds)
        except QueueDamaged:
            # One of the lists, or a key of the lease.
            for queue in queues:
                if wrong := await self._pool.find_wrong_keys(queue):
                    raise damage_of(queue, wrong) from None
            raise
        return woken, leased[0] if leased else None

    async def _send_and_wait(
        self, slot: int, commands: Callable[[Connection], list[bytes]], seconds: float
    ) -> list[Reply]:
        """Send commands that block for some seconds, and wait a grace time longer for their answers.

        If the clock of a server is set back, it blocks for that time too. It runs, and the call only has to be
        repeated.

        Returns:
            The answers. None for a script that the server does not know.
        """
        try:
            async with self._pool.blocking_connection(slot) as connection:
                async with asyncio.timeout(seconds + _GRACE):
                    replies = await connection.send_all(commands(connection), within=seconds)
                for number, reply in enumerate(replies):
                    if isinstance(reply, NoScript):
                        replies[number] = None
                    elif isinstance(reply, BackendError):
                        raise reply
                return replies
        except TimeoutError:
            raise ReadTimeout("a blocking read took too long") from None

    def _pack_lease(self, connection: Connection, queue: str, lease: Sequence[Argument]) -> bytes:
        void, *arguments = lease
        return pack(self._pool.script_command(connection, "lease", queue, arguments, (str(void),)))
