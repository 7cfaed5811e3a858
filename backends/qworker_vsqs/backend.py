"""`vsqs:` queues, shared live with any other implementation of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.directory import directory_history
from qworker.kit.directory.opener import Opener
from qworker.kit.directory.queue_files import is_queue, list_queue_names
from qworker.kit.directory.retention import PRUNING
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import make_shares
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
from qworker.names import check_existing_queue
from qworker.url import BackendURL
from qworker_vsqs import admin, browse
from qworker_vsqs.lease import VsqsLeases
from qworker_vsqs.options import VsqsOptions
from qworker_vsqs.publish import VsqsPublisher
from qworker_vsqs.reap import reap_expired
from qworker_vsqs.settle import settle_in_queue
from qworker_vsqs.store import VsqsStore
from qworker_vsqs.wait import wait_for_work

__all__ = ["VsqsBackend"]


class VsqsBackend(Backend):
    """Directories of messages: a message is a file, and its name is its state."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "the order is that of the ids",
        "unique_key": "the protocol has no keys",
        "cells": "the protocol has messages only",
        "cancel": "the name of a leased message belongs to its holder",
        "lost_leases": "a holder sees the end of its lease when it extends or ends it",
        "hold": "the protocol keeps no ids of messages that are gone",
        "given_ids": "an id is the time of its creation",
        "fields": "a message consists of its contents only",
        "keep_done": "the protocol cannot keep finished messages: an ack deletes the file",
        "deaths": "the name of a message counts its tries only",
        "argv": "a message consists of its contents only",
    }

    def __init__(self, url: BackendURL, options: VsqsOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url = url
        self._clock = clock
        self.max_body = options.max_body
        self.directory = url.directory
        self._options = options
        self._stores = Opener(url.directory, self._make_store)
        self._leases = VsqsLeases(options.unit, options.max_body)
        self.history = directory_history(url, str(self.directory), default=False, clock=clock)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `vsqs:///dir`, with the options of `VsqsOptions`."""
        return cls(url, VsqsOptions.from_url(url), clock)

    def _make_store(self) -> VsqsStore:
        store = VsqsStore(self._url.directory, self._options, self._clock)
        self._publisher = VsqsPublisher(store)
        return store

    async def open(self) -> None:
        """Open the directory, which is created if it does not exist."""
        self._stores.open()

    async def aclose(self) -> None:
        """Close the store. Leases last until they expire."""
        await self.history.aclose()
        await self._stores.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(str(self.directory))

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, and on a file system without barriers or a journal that keeps renames."""
        return durability_at(str(self.directory), sync=self._options.durable)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages. With a capacity, wait for room."""
        check_existing_queue(queue)
        refuse_unsupported("vsqs", self.deviations, drafts)
        check_bodies(drafts, self.max_body)
        if not drafts:
            return []
        with store_errors(f"publish to {queue}"):
            return await self._stores.call(lambda store: self._publish(store, queue, drafts))

    async def _publish(self, store: VsqsStore, queue: str, drafts: Sequence[Draft]) -> list[str]:
        with store.in_use.using(queue):
            return await self._publisher.publish(queue, drafts)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease the oldest ready messages."""
        await wait_for_ready(self, queue, limit, timeout)
        store = self._stores.open()
        if store.in_use.is_full(queue, store.queues):
            # The leases of this instance keep too many queues open.
            return []
        with store.in_use.using(queue), store_errors(f"lease from {queue}"):
            return await self._claim(store, queue, limit, visibility)

    async def _claim(self, store: VsqsStore, queue: str, limit: int, visibility: float) -> list[Lease]:
        directory = store.get(queue)
        if directory is None or directory.is_paused():
            return []
        await reap_expired(store, directory)
        leases = await self._leases.lease(directory, limit, visibility, self._clock.time())
        directory.leases.update(leases)
        return leases

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for a message, for the end of a lease, or for a delay to be over."""
        refuse_watches("vsqs", self.deviations, cells)
        await wait_for_work(self._stores.open(), queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        now = self._clock.time()
        store = self._stores.store
        lost: list[Lease] = []
        for lease in leases:
            directory = None if store is None else store.queues.get(lease.message.queue)
            with store_errors(f"extend leases of {lease.message.queue}"):
                if directory is None or not self._leases.extend(directory, lease, now, visibility):
                    lost.append(lease)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases and return the refused settlements."""
        store = self._stores.open()

        async def settle_in(queue: str, some: Sequence[Settlement]) -> list[Settlement]:
            with store.in_use.using(queue):
                with store_errors(f"open the queue {queue}"):
                    directory = store.get(queue)
                return list(some) if directory is None else await settle_in_queue(store, directory, some)

        return await settle_by_queue(settlements, settle_in)

    async def reap(self, queue: str) -> ReapResult:
        """Make expired messages ready with tries + 1, and due messages with the same tries."""
        store = self._stores.open()
        with store.in_use.using(queue), store_errors(f"reap {queue}"):
            directory = store.get(queue)
            if directory is None:
                return ReapResult(now=self._clock.time())
            count = await reap_expired(store, directory)
            await directory.records.clean_up(directory.directories, every=PRUNING)
        if count:
            store.wake_all()
        return ReapResult(count, now=self._clock.time())

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: the protocol has messages only."""
        raise no_cells("vsqs", self.deviations)

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the directories that can be queues."""
        store = self._stores.open_existing()
        return [] if store is None else admin.list_queues(store)

    async def create(self, queue: str) -> None:
        """Create the directory of a queue."""
        with store_errors(f"create {queue}"):
            self._stores.open().get_or_create(queue)

    async def delete(self, queue: str) -> None:
        """Delete the directory of a queue."""
        store = self._stores.open_existing()
        if store is not None:
            with store.in_use.using(queue):
                await admin.delete(store, check_existing_queue(queue))

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue by listing it."""
        with self._using(queue) as store:
            return await admin.count_messages(store, queue, self.history.retention)

    async def pause(self, queue: str) -> None:
        """Pause a queue for qworker's workers. The protocol has no pause that other programs would obey."""
        with self._using(queue) as store:
            await admin.pause(store, queue)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with self._using(queue) as store:
            await admin.resume(store, queue)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page by page."""
        with self._using(queue) as store:
            async for page in browse.browse(store, queue, query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the messages by their ids."""
        self._stores.require(queue).require(queue)
        return make_shares(count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        with self._using(queue) as store:
            return await browse.find(store, queue, ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again."""
        with self._using(queue) as store:
            return await admin.requeue(store, queue, selection)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with self._using(queue) as store:
            return await admin.remove(store, queue, selection)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: a message that another holds cannot be moved."""
        refuse_cancel("vsqs", self.deviations)

    @contextmanager
    def _using(self, queue: str) -> Generator[VsqsStore]:
        """Yield the open store to read or change a queue, which stays open until the end of the block."""
        store = self._stores.require(queue)
        with store.in_use.using(queue):
            yield store

    # -- what the contract does not have (qworker/backend/offers.py) ---------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory."""
        from qworker.kit.directory.body_sizes import examine_bodies
        from qworker.kit.directory.doctor import examine_directory, find_blocked

        def bases(root: int) -> list[tuple[str, str]]:
            names = list_queue_names(root, lambda name: is_queue(root, name, ".qworker"))
            return [(name, f"{name}/.qworker") for name in names]

        checks = await examine_directory(url.directory) + await find_blocked(url.directory, bases)
        return checks + await examine_bodies(url.directory, ("*",), VsqsOptions.from_url(url).max_body)
