"""The backend of `rfq:` URLs; docs/reference/protocols/rfq.md describes the keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.kit.doctor_check import Check
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import WHOLE
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
from qworker.names import check_existing_queue, check_queue, is_queue_name
from qworker.url import BackendURL
from qworker_redis.admin import count_too_large, read_rows, remove, requeue, set_paused
from qworker_redis.browse import find
from qworker_redis.connections import ConnectionPool
from qworker_redis.extend import RedisLeaseExtender
from qworker_redis.history import RedisHistory
from qworker_redis.lease import RemoteRedisLeases
from qworker_redis.options import Options
from qworker_redis.publish import RedisPublisher
from qworker_redis.reap import RedisQueueReaper
from qworker_redis.rfq.admin import delete_topic, list_topics, read_topic_stats, remove_call
from qworker_redis.rfq.browse import browse_topic, parse_stored
from qworker_redis.rfq.codec import decode
from qworker_redis.rfq.commands import RfqCommands
from qworker_redis.rfq.ids import is_id
from qworker_redis.rfq.keys import RFQ
from qworker_redis.rfq.lease import TopicLeaser, parse_leases
from qworker_redis.rfq.publish import DraftEncoder
from qworker_redis.rfq.wait import BacklogWaiter
from qworker_redis.settle import RedisSettler
from qworker_redis.store import RedisStore

__all__ = ["RfqBackend"]

# The keys that show that there is a topic.
_TOPIC_KEYS = ("backlog", "nextlog", "meta")


class RfqBackend(Backend):
    """Topics of the rfq protocol, shared with any other implementation of it.

    Args:
        options: The parsed URL.
        clock: The time of new ids, and the measure of elapsed time. All other times are the server's.
        remote_leases: Whether leases outlive this process.

    Attributes:
        commands: The commands of the rfq package.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "a list has one order; rfq's own publish --front puts a message first",
        "unique_key": "rfq has no keys",
        "cells": "rfq has messages only",
        "cancel": "a consumer of another program expects what it holds in its list",
        "hold": "rfq keeps no ids of messages that are gone",
        "given_ids": "an rfq id is a UUID of 32 hex digits; only such ids can be given",
        "keep_done": "an ack is rfq's commit, which deletes the message",
        "argv": "a message is a map",
        "deaths": "rfq counts no tries, and qworker's own note for a message counts tries only",
        "after_removed": (
            "a removed message leaves no trace in the list: it counts as leased, and the whole line follows"
        ),
    }
    # It is found by its name: the ids that can be given although given ids are a deviation.
    takes_id = staticmethod(is_id)

    def __init__(self, options: Options, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._store = store = RedisStore(options, RFQ, clock)
        self._pool = store.pool
        self.max_body = options.max_body
        self._drafts = DraftEncoder(clock)
        self._publisher = RedisPublisher(store, None)
        self._waiter = BacklogWaiter(store)
        self._settler = RedisSettler(store)
        self._leaser = TopicLeaser(store, self._waiter, self._settler.settle, parse_leases, remote=remote_leases)
        self._extender = RedisLeaseExtender(store)
        self._reaper = RedisQueueReaper(store)
        self.remote_leases = RemoteRedisLeases(store.pool, decode) if remote_leases else None
        self.history = RedisHistory(store.pool, options.history, clock=clock, queues=self.queues)
        self.commands = RfqCommands(store.pool, clock)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `rfq://[user:password@][host[:port]][/db]`.

        Without a host, `RFQ_REDIS_HOST` and `RFQ_REDIS_PORT` name the server. Options: `timeout`, `retry_timeout`,
        `min_replicas`, `keep_failed`, `max_body`; see docs/reference/redis.md.
        """
        return cls(Options.parse(url), clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Connect to the server, and refuse one that may lose queues."""
        await self._store.open()

    async def aclose(self) -> None:
        """Close all connections."""
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
        await self._check_creatable(queue)
        refuse_unsupported("rfq", self.deviations, drafts, takes_id=is_id)
        check_bodies(drafts, self.max_body)
        if not drafts:
            return []
        return await self._publisher.publish(queue, self._drafts.encode(drafts))

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages, as rfq's consumers do."""
        check_existing_queue(queue)
        check_limit(limit)
        if timeout > 0:
            return await self._leaser.lease_or_wait(queue, limit, visibility, timeout)
        return await self._leaser.lease(queue, limit, visibility)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait until one of the lists has an element, or until a message becomes due."""
        refuse_watches("rfq", self.deviations, cells)
        for queue in queues:
            self._leaser.drop_empty(check_existing_queue(queue))
        await self._waiter.wait(queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases, on connections of its own."""
        return self._extender.extend(leases, visibility)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases. If the answer was lost, the call can be repeated."""
        return await self._settler.settle(settlements)

    async def reap(self, queue: str) -> ReapResult:
        """Harvest the expired messages of qworker's own consumers, make due messages ready, and prune failed ones."""
        return await self._reaper.reap(check_existing_queue(queue))

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: rfq has messages only."""
        raise no_cells("rfq", self.deviations)

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of all topics: those with a list of rfq, and those that qworker created."""
        return await list_topics(self._pool, _TOPIC_KEYS)

    async def create(self, queue: str) -> None:
        """Create a topic."""
        await self._check_creatable(queue)
        await self._pool.run_script("create", queue, ("create",))

    async def _check_creatable(self, queue: str) -> None:
        """Check that a topic exists, or that it can be created.

        Raises:
            InvalidName: It does not exist, and only other programs create topics with such a name.
        """
        if not is_queue_name(check_existing_queue(queue)) and queue not in await self.queues():
            check_queue(queue)

    async def delete(self, queue: str) -> None:
        """Delete a topic with all of its messages, including those that other consumers hold."""
        await delete_topic(self._pool, check_existing_queue(queue), self.history.enabled)

    async def stats(self, queue: str) -> QueueStats:
        """Count a topic. The messages of other consumers count as leased."""
        return await read_topic_stats(self._pool, queue, {"failed": self._store.options.keep_failed.describe()})

    async def pause(self, queue: str) -> None:
        """Pause a topic for the consumers of qworker."""
        await set_paused(self._pool, queue, True)

    async def resume(self, queue: str) -> None:
        """Resume a topic."""
        await set_paused(self._pool, queue, False)

    # -- messages ----------------------------------------------------------------------------------------------------

    def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state in its order."""
        return browse_topic(self._pool, queue, query)

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Return one part: a topic cannot be divided."""
        await read_rows(self._pool, "stats", queue, ())
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        return await find(self._pool, queue, ids, parse_stored)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again, with tries 0."""
        return await requeue(self._pool, queue, selection, self.stats)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        return await remove(self._pool, queue, selection, self.stats, remove_call)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: a consumer of another program expects what it holds in its list."""
        refuse_cancel("rfq", self.deviations)

    # -- beyond the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    async def count_too_large(self, queue: str) -> int:
        """Return how many messages are delayed because they are larger than `max_body`."""
        return await count_too_large(self._pool, queue, self.max_body)

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the server."""
        from qworker_redis.doctor import check_message_sizes, check_server

        def names(pool: ConnectionPool) -> Awaitable[list[str]]:
            return list_topics(pool, _TOPIC_KEYS)

        return [*await check_server(url, RFQ, names), *await check_message_sizes(url, RFQ, names)]
