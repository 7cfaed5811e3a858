"""`sq:` queues: a queue is a topic, and this backend is one of its channels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self

import msgspec

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.backend.offers import Follower
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.directory import directory_history
from qworker.kit.directory.opener import Opener
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.max_body import check_bodies
from qworker.kit.settle import settle_by_queue
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
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
from qworker.names import check_existing_queue, to_message_id
from qworker.url import BackendURL
from qworker_sq import admin, browse
from qworker_sq.follow import SqFollower
from qworker_sq.lease import claim, extend_leases
from qworker_sq.options import SqOptions
from qworker_sq.parts import divide
from qworker_sq.reap import reap_channel
from qworker_sq.settle import settle_in_channel
from qworker_sq.store import SqStore
from qworker_sq.wait import wait_for_work

__all__ = ["SqBackend"]


class SqBackend(Backend):
    """Segment logs in a directory: a message is a record, and each channel is a separate queue."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "a log has one order",
        "unique_key": "a log keeps no index of keys",
        "cells": "a log has records only",
        "cancel": "only the reader that holds a record may end it in the journal",
        "lost_leases": "a reader sees the end of its lease when it extends or ends it",
        "hold": "a log keeps no index of ids that are gone",
        "empty_bodies": "a record of length 0 is the end of the log",
        "fields": "a record consists of its bytes only",
        "keep_done": "a segment is deleted when every channel has read it",
        "deaths": "the journal of a channel counts tries only",
        "argv": "a record consists of its bytes only",
        "max_body_stored": "the size of a segment limits that of a record; a reader of the log reads whole records",
    }

    def __init__(self, url: BackendURL, options: SqOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url = url
        self.max_body = options.max_body
        self.directory = url.directory
        self._options = options
        self._stores = Opener(self.directory, lambda: SqStore(url.directory, options, clock))
        self.history = directory_history(url, str(self.directory), default=False, clock=clock)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `sq:///dir`, with the options of `SqOptions`."""
        return cls(url, SqOptions.from_url(url), clock)

    async def open(self) -> None:
        """Open the directory, which is created if it does not exist."""
        self._stores.open()

    async def aclose(self) -> None:
        """Finish the writes in progress, and close. Other processes may lease from now on."""
        await self.history.aclose()
        await self._stores.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(str(self.directory))

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, and on a file system without a journal or barriers."""
        return durability_at(str(self.directory), sync=self._options.durable)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Append messages to the topic, for every channel."""
        check_existing_queue(queue)
        refuse_unsupported("sq", self.deviations, drafts)
        check_bodies(drafts, self.max_body)
        if not drafts:
            return []
        named = list(map(_with_message_id, drafts))
        with store_errors(f"publish to {queue}"):
            return await self._stores.call(lambda store: _publish(store, queue, named))

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages, if this process owns the channel or can own it."""
        await wait_for_ready(self, queue, limit, timeout)
        store = self._stores.open()
        if store.in_use.is_full(queue, store.topics):
            # The leases of this instance keep too many queues open.
            return []
        with store.in_use.using(queue):
            return await _claim(store, queue, limit, visibility)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for a publish, a release, the death of the owner, or the moment at which a message becomes due."""
        refuse_watches("sq", self.deviations, cells)
        await wait_for_work(self._stores.open(), queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        by_queue: dict[str, list[Lease]] = {}
        for lease in leases:
            by_queue.setdefault(lease.message.queue, []).append(lease)
        store = self._stores.store
        lost: list[Lease] = []
        for queue, some in by_queue.items():
            channel = None if store is None else store.get_open_channel(queue)
            lost += some if channel is None else extend_leases(channel, some, visibility)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases and return the refused settlements."""
        store = self._stores.open()

        async def settle_in(queue: str, some: Sequence[Settlement]) -> list[Settlement]:
            with store.in_use.using(queue):
                channel = await store.get_channel(queue)
                return list(some) if channel is None else await settle_in_channel(channel, some)

        return await settle_by_queue(settlements, settle_in)

    async def reap(self, queue: str) -> ReapResult:
        """Make expired and due messages ready."""
        store = self._stores.open()
        with store.in_use.using(queue):
            channel = await store.get_channel(queue)
            count = 0 if channel is None else await reap_channel(channel)
            return ReapResult(count, now=store.clock.time())

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: a log has records only."""
        raise no_cells("sq", self.deviations)

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the topics."""
        store = self._stores.open_existing()
        return [] if store is None else admin.list_queues(store)

    async def create(self, queue: str) -> None:
        """Create a topic, and our channel of it."""
        store = self._stores.open()
        with store.in_use.using(queue):
            await store.get_or_create(check_existing_queue(queue))

    async def delete(self, queue: str) -> None:
        """Delete a topic with all of its channels."""
        store = self._stores.open_existing()
        if store is not None:
            await admin.delete(store, check_existing_queue(queue))

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages. The log ahead is read once, in slices. Later counts read only new records."""
        with self._using(queue) as store:
            return await admin.count_messages(store, queue, self.history.retention)

    async def pause(self, queue: str) -> None:
        """Pause our channel."""
        with self._using(queue) as store:
            await admin.set_paused(store, queue, True)

    async def resume(self, queue: str) -> None:
        """Resume our channel."""
        with self._using(queue) as store:
            await admin.set_paused(store, queue, False)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page by page. The channel is not held between two pages."""
        with self._using(queue) as store:
            async for page in browse.browse(store, queue, query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the log into ranges. The records that were handed out are one more part."""
        with self._using(queue) as store:
            async with store.channel_section(queue) as channel:
                return divide(channel, state, count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        with self._using(queue) as store:
            return await browse.find(store, queue, ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again."""
        with self._using(queue) as store:
            return await admin.requeue(store, queue, selection)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages for our channel; other channels keep theirs."""
        with self._using(queue) as store:
            return await admin.remove(store, queue, selection)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: a message that another holds cannot be moved."""
        refuse_cancel("sq", self.deviations)

    @contextmanager
    def _using(self, queue: str) -> Generator[SqStore]:
        """Yield the open store to read or change a queue, which stays open until the end of the block."""
        store = self._stores.require(queue)
        with store.in_use.using(queue):
            yield store

    # -- what the contract does not have (qworker/backend/offers.py) ---------------------------------------------------

    async def delete_channel(self, queue: str) -> None:
        """Delete our channel of a topic, so that it holds no segments any more. Idempotent.

        Raises:
            QueueNotFound: The topic does not exist.
        """
        with self._using(queue) as store:
            await admin.delete_channel(store, queue)

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory."""
        from qworker.kit.directory.doctor import examine_directory

        return await examine_directory(url.directory)

    @classmethod
    def follower(cls, url: BackendURL, queue: str) -> Follower:
        """Follow a topic as the URL's channel."""
        return SqFollower(url, queue)


def _with_message_id(draft: Draft) -> Draft:
    return draft if draft.id is None else msgspec.structs.replace(draft, id=to_message_id(draft.id))


async def _publish(store: SqStore, queue: str, drafts: Sequence[Draft]) -> list[str]:
    with store.in_use.using(queue):
        return await store.publish(queue, drafts)


async def _claim(store: SqStore, queue: str, limit: int, visibility: float) -> list[Lease]:
    with store_errors(f"open the queue {queue}"):
        topic = await store.get(queue)
    channel = None if topic is None else topic.channel
    if topic is None or channel is None:
        return []
    with store_errors(f"lease from {queue}"):
        async with channel.section():
            leases = claim(channel, limit, visibility)
    topic.leases.update(leases)
    return leases
