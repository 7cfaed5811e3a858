"""`file:///abs/dir` and `file://./rel`: queues in directories (docs/reference/file-format.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.backend.offers import QueueCount, QueueGlance
from qworker.backend.unique_keys import give_ids, refuse_pending
from qworker.cell import Cell, CellOp, CellReply, CellWatch, check_cell_ops
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.failure_text import cancelled_text
from qworker.history.directory import DirectoryHistory
from qworker.kit.directory.missing import queue_not_found
from qworker.kit.directory.opener import StoreOpener
from qworker.kit.directory.samples import DirectorySamples
from qworker.kit.directory.wait import wait_for_work
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import FileSystem, durability_at
from qworker.kit.files import check_writable
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import make_shares
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import check_limit
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
from qworker_file import admin
from qworker_file.browse import FileBrowser
from qworker_file.bulk import FileBulkStore
from qworker_file.cancel import cancel
from qworker_file.cell_wait import wait_for_either
from qworker_file.cells import carry_out, queues_with_group, reply_without_cells
from qworker_file.count import version_of
from qworker_file.deviations import DEVIATIONS
from qworker_file.holds import held_until
from qworker_file.lease import extend
from qworker_file.load_mover import move_loads
from qworker_file.open_queue import OpenQueue
from qworker_file.options import FileOptions
from qworker_file.publish import publish
from qworker_file.remote_leases import RemoteFileLeases
from qworker_file.settle import settle_all
from qworker_file.store import Store
from qworker_file.unique_keys import find_holder

__all__ = ["FileBackend"]


class FileBackend(Backend):
    """Queues in directories.

    Args:
        directory: The root. It is created if it does not exist.
        clock: The source of the times in names.
        options: The options of the URL.
        remote_leases: Whether the holders of leases are outside this process.
    """

    deviations: ClassVar[Mapping[str, str]] = DEVIATIONS

    def __init__(
        self,
        directory: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        options: FileOptions | None = None,
        remote_leases: bool = False,
    ) -> None:
        given = FileOptions() if options is None else options
        self._directory = directory
        self.directory = Path(directory)
        self._clock = clock
        self._options = given
        self.max_body = given.max_body
        self._stores: StoreOpener[Store, OpenQueue] = StoreOpener(
            self.directory, lambda: Store(directory, clock, given, detached=remote_leases)
        )
        self.remote_leases = RemoteFileLeases(self._stores, clock) if remote_leases else None
        self.bulk = FileBulkStore(self._stores)
        self.history = DirectoryHistory(directory, given.history, clock=clock, shared=bool(given.dir_mode & 0o020))

    # -- the store -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `file:///abs/dir` or `file://./rel`.

        The options are `?sync=full|off`, `?keep_done=`, `?keep_failed=`, `?timezone=utc|local`,
        `?poll_interval=DURATION`, `?fsq=0|1`, `?dir_mode=0700|0750|0770|02770`, `?shared=0|1` and
        `?max_body=SIZE|none`, and for the history `?history=0|1` and `?keep_history=7d,512M`.
        """
        return cls(str(url.directory), clock=clock, options=FileOptions.from_url(url), remote_leases=remote_leases)

    async def open(self) -> None:
        """Open the root directory, or create it."""
        self._stores.open()

    async def aclose(self) -> None:
        """Close every descriptor, and stop the thread that syncs."""
        await self._stores.aclose()
        await self.history.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return f"file://{self._directory}{self._options.query}"

    @property
    def durability(self) -> str:
        """`disk` with sync=full on a file system with a journal and barriers, else `process`."""
        return durability_at(self._directory, sync=self._options.sync)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        check_existing_queue(queue)
        refuse_unsupported("file", DEVIATIONS, drafts)
        check_bodies(drafts, self.max_body)
        identified = give_ids(drafts)
        with store_errors(f"publish to {queue!r}"):
            ids = await self._stores.call(lambda store: publish(store, queue, identified))
        if identified is not drafts:
            refuse_pending(identified, ids)
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages. After a wait, it is not checked again that the queue exists and is not paused."""
        check_limit(limit)
        store = self._stores.open()
        notified = timeout > 0 and await wait_for_work(store, [queue], timeout)
        with store_errors(f"lease from {queue!r}"):
            return await store.lease(queue, limit, visibility, notified=notified)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for a publish, a return, a due time, the end of a pause, a listing that finds something, or a cell."""
        if cells:
            await wait_for_either(self._stores.open(), queues, timeout, cells)
        else:
            await wait_for_work(self._stores.open(), queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases, in the caller's thread."""
        store = self._stores.store
        if store is None:
            return extend(leases, visibility, None, self._clock)
        lost = extend(leases, visibility, store.expiries, self._clock)
        with store_errors("extend leases"):
            store.mark_clocks(leases)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        store = self._stores.open()
        with store_errors("settle"):
            return await settle_all(store, settlements)

    async def reap(self, queue: str) -> ReapResult:
        """Make expired and due messages ready, and prune finished messages."""
        store = self._stores.open()
        with store_errors(f"reap {queue!r}"):
            store.close_unused()
            opened = None if store.has_nothing_to_reap(check_existing_queue(queue)) else store.get(queue)
            if opened is None:
                return ReapResult(now=self._clock.time())
            if self._options.fsq:
                with opened.files:
                    await move_loads(store, opened)
            return await store.reap(opened)

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Carry out operations on cells. Without a put, no directory is made."""
        check_cell_ops(ops)
        check_existing_queue(queue)
        with store_errors(f"use cells of {queue!r}"):
            if not any(op.do == "put" for op in ops) and self._stores.open_existing() is None:
                return [reply_without_cells(op) for op in ops]
            return await self._stores.call(lambda store: carry_out(store, queue, ops))

    # -- queues --------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of all queues."""
        with store_errors(f"list {self._directory}"):
            return self._stores.names()

    async def create(self, queue: str) -> None:
        """Create a queue."""
        with store_errors(f"create {queue!r}"):
            opened = self._stores.open().get_or_create(check_existing_queue(queue))
        with store_errors(f"work on {queue!r}"):
            check_writable(opened.files.queue)

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        with store_errors(f"delete {queue!r}"):
            if self._stores.get_queue(queue) is not None:
                self.samples().remove(queue)
                await admin.delete_queue(self._stores.open(), queue)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        with store_errors(f"count {queue!r}"), (browser := self._browser(queue)).files:
            return await browser.count(self._options.retention)

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
        """Move messages to fail/."""
        selection.require_unfinished()
        with store_errors(f"cancel in {queue!r}"), (browser := self._browser(queue)).files:
            return await cancel(self._stores.open(), browser, selection, cancelled_text(by), only or {})

    def _browser(self, queue: str) -> FileBrowser:
        return FileBrowser(self._stores.require_queue(queue), self._clock, local_time=self._options.local_time)

    # -- beyond the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    async def glance(self, queue: str) -> QueueGlance:
        """Glance at a queue without listing it."""
        with store_errors(f"read {queue!r}"):
            return self._browser(queue).glance(self._options.retention)

    async def count(self, queue: str, most: int | None = None) -> QueueCount | None:
        """Count the messages of a queue and their tasks."""
        with store_errors(f"count {queue!r}"), (browser := self._browser(queue)).files:
            return await browser.count_details(self._options.retention, most)

    async def count_version(self, queue: str) -> str | None:
        """Read the times of the queue's directories."""
        with store_errors(f"read {queue!r}"):
            store = self._stores.open_existing()
            if store is not None:
                with suppress(FileNotFoundError):
                    return version_of(check_existing_queue(queue), store.root)
            raise queue_not_found(queue, self.directory)

    def samples(self) -> DirectorySamples:
        """Return the files in `.samples/`."""
        return DirectorySamples(self._directory, shared=bool(self._options.dir_mode & 0o020))

    async def held_until(self, queue: str, message_id: str) -> float | None:
        """Return the end of the hold of an id."""
        with store_errors(f"read {queue!r}"), self._stores.require_queue(queue).files as files:
            return await held_until(files, message_id, self._clock.time())

    async def make_due(self, queue: str, message_id: str) -> bool:
        """Make a delayed message due now."""
        with store_errors(f"change {queue!r}"), (browser := self._browser(queue)).files:
            return await admin.make_due(self._stores.open(), browser, message_id)

    async def key_holder(self, queue: str, key: str) -> str | None:
        """Return the id of the message that has a key of the queue."""
        with store_errors(f"read {queue!r}"), self._stores.require_queue(queue).files as files:
            return await find_holder(files, key)

    async def queues_with_cells(self, queues: Sequence[str], group: str) -> list[str]:
        """Return the queues that have a directory for a group. None is opened."""
        with store_errors(f"look into {self._directory}"):
            store = self._stores.open_existing()
            return [] if store is None else await queues_with_group(store.root, queues, group)

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
        """Check the directory."""
        from qworker_file.doctor import check_directory

        return await check_directory(url)
