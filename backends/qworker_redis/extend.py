"""Extending leases from any thread, while the worker's event loop may be blocked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

from anyio.from_thread import BlockingPortal, start_blocking_portal

from qworker.errors import BackendUnavailable, QueueDamaged
from qworker.message import Lease
from qworker_redis.connection import Argument
from qworker_redis.connections import ConnectionPool
from qworker_redis.lease import group_by
from qworker_redis.own_leases import RedisLease
from qworker_redis.store import RedisStore

__all__ = ["RedisLeaseExtender"]

_BATCH = 500


class RedisLeaseExtender:
    """Extends the leases of one backend, on connections and an event loop of its own. Any thread can use it.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        self._timeout = store.options.timeout
        self._host_clock = store.host_clock
        self._pool = ConnectionPool(store.options, store.topology, store.scripts, is_logged=False)
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._exit = ExitStack()

    def close(self) -> None:
        """Close the connections, and end the thread of the event loop."""
        with self._lock:
            if self._portal is not None:
                self._portal.call(self._pool.aclose)
                self._portal = None
            self._exit.close()

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones.

        Raises:
            BackendUnavailable: No answer. It is unknown which leases are lost.
        """
        with self._lock:
            if self._portal is None:
                self._portal = self._exit.enter_context(start_blocking_portal())
            return self._portal.call(self._extend_all, leases, visibility)

    async def _extend_all(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        lost: list[Lease] = []
        for queue, ours in group_by(leases, lambda lease: lease.message.queue).items():
            for first in range(0, len(ours), _BATCH):
                batch = cast("Sequence[RedisLease]", ours[first : first + _BATCH])
                lost += await self._extend(queue, batch, visibility)
        return lost

    async def _extend(self, queue: str, leases: Sequence[RedisLease], visibility: float) -> list[Lease]:
        arguments: list[Argument] = [int(visibility * 1e6), self._host_clock.reading()]
        for lease in leases:
            arguments += [lease.message.id, lease.claim]
        try:
            # Extending twice is harmless. While the server does not answer, leases expire, and their holder must be
            # informed in time.
            reply = await self._pool.run_script("extend", queue, arguments, retry_timeout=self._timeout)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"leases of {queue} cannot be extended now: {error}") from error
        except QueueDamaged:
            # What showed that they are held is gone. The leases of other queues must still be extended.
            return [*leases]
        expiry, *numbers = cast("list[int]", reply)
        gone = set(numbers)
        for number, lease in enumerate(leases, start=1):
            if number not in gone:
                lease.expires_at = expiry / 1e6
        return [lease for number, lease in enumerate(leases, start=1) if number in gone]
