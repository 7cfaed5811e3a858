"""`fsq:` queues, shared with other implementations of the standard (docs/reference/protocols/fsq.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.directory import directory_history
from qworker.kit.directory.opener import StoreOpener
from qworker.kit.directory.wait import wait_for_work
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import FileSystem, durability_at
from qworker.kit.files import check_writable
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import make_shares
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import (
    Cancelled,
    Draft,
    FinishedMessage,
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
from qworker_fsq import admin
from qworker_fsq.browse import FsqBrowser
from qworker_fsq.lease import extend
from qworker_fsq.open_queue import OpenQueue
from qworker_fsq.options import FsqOptions, parse_root
from qworker_fsq.publish import publish
from qworker_fsq.reap import reap
from qworker_fsq.settle import settle_all
from qworker_fsq.store import Store

if TYPE_CHECKING:
    from qworker.backend.scan_source import ScanOptions, ScanSource

__all__ = ["FsqBackend"]


class FsqBackend(Backend):
    """Queues of fsq(7).

    Args:
        url: The URL.
        options: Its options.
        clock: The source of the times in names.
        remote_leases: Whether the holders of leases are outside this process. Leases then end by time too, although
            this process keeps the locks.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "items are taken in the order of their names",
        "unique_key": "the standard has no keys",
        "cells": "the standard has messages only",
        "cancel": "an item that another process holds is locked by it, and its holder may be any program",
        "lost_leases": "a holder checks its items when it extends or ends their leases",
        "hold": "the standard keeps no ids of messages that are gone",
        "given_ids": "an id contains the time, the process and the host of its creation",
        "fields": "an item has a name and its contents",
        "deaths": "the name of an item counts its tries only",
        "retry_errors": "an item has a name and its contents: the history keeps the error",
        "expiry": "a lease is a lock on the item, which the kernel frees when its holder releases it or dies: "
        "visibility has no meaning",
    }

    def __init__(
        self, url: BackendURL, options: FsqOptions, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False
    ) -> None:
        self._url = url
        self._options = options
        self.max_body = options.max_body
        self.directory = parse_root(url, options.constants)
        self._directory = str(self.directory)
        self._clock = clock
        self._has_remote_holders = remote_leases
        self._stores: StoreOpener[Store, OpenQueue] = StoreOpener(
            self.directory, lambda: Store(self._directory, clock, options)
        )
        self.history = directory_history(url, self._directory, default=False, clock=clock)

    # -- the store -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `fsq:///root[?host=NAME&max_tries=N&ttl=DURATION&sync=full|off&max_body=SIZE]`.

        The other options are those of `FsqOptions`, such as `keep_done=all|none|AGE|N-messages`. `fsq:` means FSQ_ROOT.
        """
        return cls(url, FsqOptions.from_url(url), clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Open the root directory, or create it."""
        self._stores.open()

    async def aclose(self) -> None:
        """Close every descriptor, which frees every lock."""
        await self._stores.aclose()
        await self.history.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(self._directory)

    @property
    def durability(self) -> str:
        """`disk` with sync=full on a file system with a journal and barriers, else `process`."""
        return durability_at(self._directory, sync=self._options.sync)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        check_existing_queue(queue)
        refuse_unsupported("fsq", self.deviations, drafts)
        check_bodies(drafts, self.max_body)
        if not drafts:
            return []
        with store_errors(f"publish to {queue!r}"):
            return await self._stores.call(lambda store: publish(store, queue, drafts))

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lock the oldest items that are not locked."""
        await wait_for_ready(self, queue, limit, timeout)
        store = self._stores.open()
        with store_errors(f"lease from {queue!r}"):
            opened = None if store.has_nothing_to_lease(check_existing_queue(queue)) else store.get(queue)
            if opened is None:
                return []
            with opened.files:
                return list(await opened.lease(min(limit, store.room()), visibility))

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for an enqueue, a pulled trigger, a due time, the end of a pause, or the end of a lock."""
        refuse_watches("fsq", self.deviations, cells)
        await wait_for_work(self._stores.open(), queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Check that the items still belong to this process.

        A lock needs no extension, but a person may have moved a file.
        """
        return extend(leases, visibility, self._clock)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        store = self._stores.open()
        with store_errors("settle"):
            return await settle_all(store, settlements)

    async def reap(self, queue: str) -> ReapResult:
        """Make due items ready. If the holders are outside this process, also end the leases that have expired."""
        store = self._stores.open()
        with store_errors(f"reap {queue!r}"):
            store.close_unused()
            opened = None if store.has_nothing_to_reap(check_existing_queue(queue)) else store.get(queue)
            count = 0 if opened is None else await reap(store, opened, expire=self._has_remote_holders)
            return ReapResult(count, now=self._clock.time())

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: the standard has messages only."""
        raise no_cells("fsq", self.deviations)

    # -- queues --------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of all queues."""
        with store_errors(f"list {self._directory}"):
            return self._stores.names()

    async def create(self, queue: str) -> None:
        """Install a queue."""
        with store_errors(f"create {queue!r}"):
            opened = self._stores.open().get_or_create(check_existing_queue(queue))
        with store_errors(f"work on {queue!r}"):
            check_writable(opened.files.queue)

    async def delete(self, queue: str) -> None:
        """Delete a queue. With a host, delete its sub-queue."""
        with store_errors(f"delete {queue!r}"):
            if self._stores.get_queue(queue) is not None:
                await admin.delete_queue(self._stores.open(), queue)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        with store_errors(f"count {queue!r}"), (browser := self._browser(queue)).files:
            return await browser.count({**self._options.retention, **self.history.retention})

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        with store_errors(f"pause {queue!r}"):
            opened = self._stores.require_queue(queue)
            with opened.files:
                await admin.pause(self._stores.open(), opened)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with store_errors(f"resume {queue!r}"):
            opened = self._stores.require_queue(queue)
            with opened.files:
                await admin.resume(self._stores.open(), opened)

    # -- messages ------------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield messages."""
        with store_errors(f"browse {queue!r}"), (browser := self._browser(queue)).files:
            async for page in browser.browse(query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Return shares of the names."""
        with store_errors(f"browse {queue!r}"):
            self._stores.require_queue(queue)
        return make_shares(count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Find messages by their ids."""
        with store_errors(f"read {queue!r}"), (browser := self._browser(queue)).files:
            return await browser.find(ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with store_errors(f"requeue in {queue!r}"), (browser := self._browser(queue)).files:
            return await admin.requeue(self._stores.open(), browser, selection)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Remove messages."""
        with store_errors(f"remove from {queue!r}"), (browser := self._browser(queue)).files:
            return await admin.remove(self._stores.open(), browser, selection)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: a message that another holds cannot be moved."""
        refuse_cancel("fsq", self.deviations)

    def _browser(self, queue: str) -> FsqBrowser:
        opened = self._stores.require_queue(queue)
        return FsqBrowser(opened, self._clock, self._stores.open().system.kind)

    # -- beyond the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    async def heads(self, queue: str, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Yield finished messages without opening their files."""
        with store_errors(f"browse {queue!r}"), (browser := self._browser(queue)).files:
            async for page in browser.heads(state, part):
                yield page

    async def heads_version(self, queue: str, state: State) -> str | None:
        """Return a text that changes with the answer of `heads`."""
        with store_errors(f"browse {queue!r}"):
            # The clocks of other hosts do not show whether a change is old enough.
            return self._browser(queue).heads_version(state) if self._stores.open().is_local else None

    async def read_finished(self, queue: str, found: Sequence[FinishedMessage]) -> AsyncIterator[list[StoredMessage]]:
        """Yield those messages that are unchanged."""
        with store_errors(f"read {queue!r}"), (browser := self._browser(queue)).files:
            async for page in browser.read_unchanged(found):
                yield page

    def describe_file_system(self) -> str:
        """Return the type and source of the file system, and its class: local or shared."""
        with store_errors(f"open {self._directory}"):
            return FileSystem.of(self._directory).describe(self._options.shared)

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory, or FSQ_ROOT."""
        from qworker_fsq.doctor import check_directory

        return await check_directory(url)

    @classmethod
    def open_scan(cls, url: BackendURL, queue: str, options: ScanOptions) -> ScanSource:
        """Open a scan, which works like fsq's scan, item by item, in place."""
        from qworker_fsq.scan import open_scan

        return open_scan(url, queue, options)
