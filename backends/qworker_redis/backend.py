"""The backend of `redis:` URLs; docs/reference/redis.md describes the keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import ClassVar, Self, cast

from qworker.backend import Backend
from qworker.backend.unique_keys import give_ids, refuse_pending
from qworker.cell import Cell, CellOp, CellReply, CellWatch, check_cell_ops
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.failure_text import cancelled_text
from qworker.kit.doctor_check import Check
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import make_shares
from qworker.kit.wait import check_limit
from qworker.message import (
    Cancelled,
    Draft,
    Lease,
    Query,
    QueueStats,
    ReapResult,
    Selection,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue, new_ids
from qworker.url import BackendURL
from qworker_redis.admin import (
    cancel,
    count_too_large,
    delete_queue,
    discard_call,
    free_report_holds,
    make_due,
    read_rows,
    read_stats,
    remove,
    requeue,
    set_paused,
)
from qworker_redis.browse import browse_in_order, find, held_until, key_holder, parse_stored
from qworker_redis.bulk import RedisBulkStore
from qworker_redis.cell_wait import CellWaiter
from qworker_redis.cells import RedisCells
from qworker_redis.codec import decode
from qworker_redis.connections import ConnectionPool
from qworker_redis.extend import RedisLeaseExtender
from qworker_redis.history import RedisHistory
from qworker_redis.keys import NATIVE
from qworker_redis.lease import RedisLeaser, RemoteRedisLeases
from qworker_redis.options import Options
from qworker_redis.parts import browse_share
from qworker_redis.publish import RedisPublisher, encode_draft
from qworker_redis.reap import RedisQueueReaper
from qworker_redis.register import QueueRegister
from qworker_redis.samples import RedisSamples
from qworker_redis.settle import RedisSettler
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot
from qworker_redis.wait import WakeListWaiter

__all__ = ["RedisBackend"]


# No step of a cluster has keys of two slots.
CLUSTER_DEVIATIONS: Mapping[str, str] = {"unique_app": "the keys of a queue are in one hash slot"}


class RedisBackend(Backend):
    """Queues in a Redis, a Redis with sentinels, or a Redis cluster.

    Args:
        options: The parsed URL.
        clock: Measures how much time has passed. The time of day is the server's.
        remote_leases: Whether leases outlive this process.
    """

    deviations: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: Options, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._store = store = RedisStore(options, NATIVE, clock)
        self._pool = store.pool
        self.max_body = options.max_body
        is_cluster = options.mode == "cluster"
        self._scheme = "redis+cluster" if is_cluster else "redis"
        if is_cluster:
            vars(self)["deviations"] = CLUSTER_DEVIATIONS
        self._register = QueueRegister(store.pool)
        self._publisher = RedisPublisher(store, self._register)
        self._waiter = WakeListWaiter(store)
        self._settler = RedisSettler(store)
        self._leaser = RedisLeaser(store, self._waiter, self._settler.settle, remote=remote_leases)
        self._extender = RedisLeaseExtender(store)
        self._reaper = RedisQueueReaper(store)
        self.remote_leases = RemoteRedisLeases(store.pool, decode) if remote_leases else None
        self.history = RedisHistory(store.pool, options.history, clock=clock, queues=self._register.names)
        self.bulk = RedisBulkStore(store, self._register)
        self._cells = RedisCells(store, self._register)
        self._cell_waiter = CellWaiter(store, self._cells)

    @staticmethod
    def deviations_at(url: BackendURL) -> Mapping[str, str]:
        """Return the deviations of a URL."""
        return CLUSTER_DEVIATIONS if url.scheme == "redis+cluster" else {}

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `redis:`, `rediss:` (TLS), `unix:`, `redis+sentinel:` or `redis+cluster:`.

        `redis://[user:password@]host[:port][/db]` has the options `timeout`, `retry_timeout`, `min_replicas`,
        `keep_done`, `keep_failed` and `max_body`, and for TLS `tls_ca`, `tls_cert`, `tls_key` and `tls_verify`; see
        docs/reference/redis.md.
        All times are the server's. The clock only shows whether the server's clock was set.
        """
        return cls(Options.parse(url), clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Connect to the server, and refuse one that may lose queues."""
        await self._store.open()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._cell_waiter.aclose()
        await self._store.aclose()
        await self.history.aclose()
        await self._pool.aclose()
        await asyncio.to_thread(self._extender.close)

    def describe(self) -> str:
        """Return the URL with its password masked."""
        return self._store.options.shown

    @property
    def durability(self) -> str:
        """`replicated` with `?min_replicas=`, `disk` with `appendfsync always`, otherwise or if unknown `process`."""
        return self._store.durability

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages. If the outcome is unknown, the call is repeated for `?retry_timeout=` seconds."""
        check_queue(queue)
        if not drafts:
            return []
        check_bodies(drafts, self.max_body)
        identified = give_ids(drafts, self._scheme, self.deviations)
        ids = await self._publisher.publish(queue, list(map(encode_draft, new_ids(len(drafts)), identified)))
        if identified is not drafts:
            refuse_pending(identified, ids)
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages. With a timeout, one round trip waits and leases."""
        check_queue(queue)
        check_limit(limit)
        if timeout > 0:
            return await self._leaser.lease_or_wait(queue, limit, visibility, timeout)
        return await self._leaser.lease(queue, limit, visibility)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for a wake-up or a cell, or until a message becomes due."""
        for queue in queues:
            self._leaser.drop_empty(check_queue(queue))
        if cells:
            await self._cell_waiter.wait(cells, timeout, self._waiter.wait(queues, timeout) if queues else None)
        else:
            await self._waiter.wait(queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases, on connections of its own."""
        return self._extender.extend(leases, visibility)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases. If the answer was lost, the call can be repeated."""
        return await self._settler.settle(settlements)

    async def reap(self, queue: str) -> ReapResult:
        """Make expired and due messages ready, and remove finished messages whose retention has ended."""
        return await self._reaper.reap(check_queue(queue))

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Carry out operations on cells."""
        check_cell_ops(ops)
        return await self._cells.carry_out(check_queue(queue), ops)

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names in the register."""
        return await self._register.names()

    async def create(self, queue: str) -> None:
        """Create a queue, and add it to the register."""
        await self._register.create(check_queue(queue))

    async def delete(self, queue: str) -> None:
        """Delete a queue with all of its messages."""
        await delete_queue(self._pool, self._register, check_queue(queue))

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        options = self._store.options
        retention = {
            "done": options.keep_done.describe(),
            "failed": options.keep_failed.describe(),
            "history": self.history.describe_retention(),
        }
        return await read_stats(self._pool, queue, retention)

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        await set_paused(self._pool, queue, True)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        await set_paused(self._pool, queue, False)

    # -- messages ----------------------------------------------------------------------------------------------------

    def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, in its order or in a share of its ids."""
        read = browse_in_order if query.part is None else browse_share
        return read(self._pool, queue, query)

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Return shares of the ids."""
        await read_rows(self._pool, "stats", queue, ())
        return make_shares(count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        return await find(self._pool, queue, ids, parse_stored)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again, with tries 0."""
        await free_report_holds(self._pool, await self._register.names(), queue, selection)
        return await requeue(self._pool, queue, selection, self.stats)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        return await remove(self._pool, queue, selection, self.stats, discard_call)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Move messages to failed."""
        selection.require_unfinished()
        ids = selection.ids
        if ids is None:
            assert selection.state is not None
            query = Query(selection.state)
            ids = [stored.message.id async for page in self.browse(queue, query) for stored in page]
        return await cancel(self._pool, queue, ids, cancelled_text(by), selection.state, only or {})

    # -- beyond the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    def samples(self) -> RedisSamples:
        """Return the strings of samples."""
        return RedisSamples(self._pool)

    async def count_too_large(self, queue: str) -> int:
        """Return how many messages are delayed because they are larger than `max_body`."""
        return await count_too_large(self._pool, queue, self.max_body)

    async def held_until(self, queue: str, message_id: str) -> float | None:
        """Return the end of the hold of an id."""
        return await held_until(self._pool, check_queue(queue), message_id)

    async def make_due(self, queue: str, message_id: str) -> bool:
        """Make a delayed message due now."""
        return await make_due(self._pool, check_queue(queue), message_id)

    async def key_holder(self, queue: str, key: str) -> str | None:
        """Return the id of the message that has a key of the queue."""
        return await key_holder(self._pool, check_queue(queue), key)

    async def time(self, queue: str) -> float:
        """Return the time of the server that has a queue."""
        seconds, microseconds = cast("list[bytes]", await self._pool.command(queue_slot(queue), "TIME"))
        return int(seconds) + int(microseconds) / 1e6

    async def queues_with_cells(self, queues: Sequence[str], group: str) -> list[str]:
        """Return the queues that may have cells of a group, from one round trip for many."""
        return await self._cells.queues_with_cells(queues, group)

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the server."""
        from qworker_redis.doctor import check_message_sizes, check_server

        def names(pool: ConnectionPool) -> Awaitable[list[str]]:
            return QueueRegister(pool).names()

        return [*await check_server(url, NATIVE, names), *await check_message_sizes(url, NATIVE, names)]
