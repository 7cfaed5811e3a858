"""`file:///abs/dir` and `file://./rel`: queues in directories that fsq programs share; docs/file-format.md describes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.history.directory import DirectoryHistory
from qworker.kit.browse import at_most
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.directory.watches import Waiter
from qworker.kit.doctor_check import Check
from qworker.kit.files import check_writable, durability_at, store_errors
from qworker.kit.parts import Share, shares
from qworker.kit.wait import check_limit
from qworker.message import (
    Draft,
    Lease,
    Query,
    QueueStats,
    Selection,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_file import admin, browse, parts
from qworker_file.bulk import FileBulkStore
from qworker_file.deviations import DEVIATIONS
from qworker_file.lease import Expiries, FileLease, extend
from qworker_file.open_queue import LocalQueue
from qworker_file.options import FileOptions
from qworker_file.remote_leases import RemoteFileLeases
from qworker_file.settle import settle_all
from qworker_file.store import Store

__all__ = ["FileBackend"]


class FileBackend(Backend):
    """Queues in directories; see the module.

    Args:
        directory: the root, which is made if it is absent.
        clock: gives the times in names.
        options: what the URL says.
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
        self._directory = directory
        self.directory = Path(directory)
        self._clock = clock
        self._options = FileOptions() if options is None else options
        self._expiries = Expiries()
        self.remote_leases = RemoteFileLeases(self._opened, clock) if remote_leases else None
        self.bulk = FileBulkStore(self._opened, self._queue)
        self._store: Store | None = None
        shared = bool(self._options.dir_mode & 0o020)
        self.history = DirectoryHistory(directory, self._options.history, clock=clock, shared=shared)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`?sync=full|off`, `?keep_done=`, `?keep_failed=`, `?timezone=utc|local`, `?poll_interval=DURATION`, `?dir_mode=0700|0750|0770|02770`.

        And of the history `?history=0|1`, `?keep_history=7d,512M`.
        """
        return cls(str(url.directory), clock=clock, options=FileOptions.from_url(url), remote_leases=remote_leases)

    def describe(self) -> str:
        """The URL."""
        return f"file://{self._directory}{self._options.words}"

    @property
    def durability(self) -> str:
        """`disk` with sync=full on a file system with a journal and barriers, else `process`."""
        return durability_at(self._directory, sync=self._options.sync)

    async def open(self) -> None:
        """Open the root directory, or make it."""
        self._opened()

    def _present(self) -> Store | None:
        """The open store; None where its directory was not made yet."""
        return self._opened() if self._store is not None or not is_missing(self.directory) else None

    def _opened(self) -> Store:
        if self._store is None:
            with store_errors(f"open {self._directory}"):
                self._store = Store(
                    self._directory, self._clock, self._options, detached=self.remote_leases is not None
                )
        return self._store

    async def aclose(self) -> None:
        """Close every descriptor, and end the thread that syncs."""
        store, self._store = self._store, None
        if store is not None:
            await store.aclose()
        await self.history.aclose()

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        check_queue(queue)
        refuse_unsupported("file", DEVIATIONS, drafts)
        store = self._opened()
        with store_errors(f"publish to {queue!r}"):
            # One that was deleted is found out by the first step.
            local = store.known(queue) or store.made(queue)
            try:
                stored = await store.publisher.publish(local.files, drafts)
            except FileNotFoundError:
                # The queue was deleted under us: it is made anew. What was stored in the old one is gone with it.
                store.drop_deleted(queue)
                local = store.made(queue)
                stored = await store.publisher.publish(local.files, drafts)
        local.added(stored.ready, stored.delayed)
        if stored.ready or stored.delayed:
            store.notify(local)
        return stored.ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """After a wait, what was reported is claimed without checking again that the queue exists and is not paused."""
        check_limit(limit)
        store = self._opened()
        told = timeout > 0 and await self._await(store, [queue], timeout)
        with store_errors(f"lease from {queue!r}"):
            local = store.known(queue) if told else None
            if local is None:
                told, local = False, store.queue(check_queue(queue))
            if local is None:
                return []
            return await self._claim(store, local, limit, visibility, told=told)

    async def _claim(
        self, store: Store, local: LocalQueue, limit: int, visibility: float, *, told: bool
    ) -> list[Lease]:
        # After the ends that were asked for before it, whose commit may go on: a crash repeats none of them beside new ones.
        await store.settled()
        leases = await local.lease(min(limit, store.room()), visibility, self._expiries, told=told)
        if len(leases) >= limit:
            store.be_busy()
        return list(leases)

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a publish, a return to ready, a due time, the end of a pause, or a rescan that finds something."""
        await self._await(self._opened(), queues, timeout)

    async def _await(self, store: Store, queues: Sequence[str], timeout: float) -> bool:
        """Whether something was told."""
        waiter = Waiter(queues)
        store.add_waiter(waiter)
        try:
            with store_errors("wait for messages"):
                return await self._rest(store, waiter, asyncio.get_running_loop().time() + timeout)
        finally:
            store.remove_waiter(waiter)

    async def _rest(self, store: Store, waiter: Waiter, ends: float) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            due, look = await self._next_events(store, waiter)
            rest = ends - loop.time()
            if due <= 0 or rest <= 0:
                return False
            pause = min(due, look, rest)
            # Whatever was told, the lease that follows looks for itself: a look here would only come before it.
            if await waiter.rest(pause):
                return True
            if pause == due:
                return False

    async def _next_events(self, store: Store, waiter: Waiter) -> tuple[float, float]:
        """Seconds until a queue has work, as far as is known, and until the next look at them; work now is 0."""
        if store.is_full():
            # The end of a lease wakes the waiter.
            return float("inf"), float("inf")
        due, look = float("inf"), store.absent_pause
        for name in waiter.queues:
            local = store.queue(check_queue(name))
            if local is None:
                continue
            store.listen(local)
            if await local.has_work():
                return 0.0, 0.0
            due = min(due, local.until_due())
            look = min(look, local.until_look())
        return due, look

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases, in the caller's thread."""
        store = self._store
        lost: list[Lease] = []
        for lease in leases:
            assert isinstance(lease, FileLease)
            try:
                if store is None or not extend(lease, visibility, self._expiries, self._clock):
                    lease.lost = True
                    lost.append(lease)
            except OSError as error:
                raise BackendUnavailable(f"cannot extend leases: {error.strerror}") from error
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        store = self._opened()
        with store_errors("settle"):
            return await settle_all(store, settlements)

    async def reap(self, queue: str) -> int:
        """Return what is over."""
        store = self._opened()
        with store_errors(f"reap {queue!r}"):
            local = store.queue(check_queue(queue))
            if local is None:
                return 0
            due = local.count_due()
            returned = await local.reap()
            await store.prune(local)
        if returned or due:
            store.notify(local)
        return returned + due

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The queues."""
        with store_errors(f"list {self._directory}"):
            store = self._present()
            return [] if store is None else store.names()

    async def create(self, queue: str) -> None:
        """Make a queue."""
        with store_errors(f"create {queue!r}"):
            local = self._opened().made(check_queue(queue))
        with store_errors(f"work on {queue!r}"):
            check_writable(local.files.queue)

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        with store_errors(f"delete {queue!r}"):
            local = self._queue(queue)
            if local is not None:
                store = self._opened()
                await admin.delete_queue(store.root, queue, local.files)
                await store.commit({store.root})
                store.drop_deleted(queue)

    def _queue(self, queue: str) -> LocalQueue | None:
        """A queue that is there; no directory is made for it."""
        name, store = check_queue(queue), self._present()
        return None if store is None else store.queue(name)

    def _found(self, queue: str) -> LocalQueue:
        local = self._queue(queue)
        if local is None:
            raise queue_not_found(queue, self.directory)
        return local

    async def stats(self, queue: str) -> QueueStats:
        """Count."""
        with store_errors(f"count {queue!r}"):
            local = self._found(queue)
            return await browse.count(
                local.files, self._clock.time(), local=self._options.local_time, retention=self._options.retention
            )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages."""
        with store_errors(f"browse {queue!r}"):
            files, now, local = self._found(queue).files, self._clock.time(), self._options.local_time
            if query.part is None:
                found = browse.browse(files, query, now, local=local)
            else:
                share = parts.read_share(files, query.state, Share.parse(query.part), now, local=local)
                found = at_most(query.limit, share)
            async for page in found:
                yield page

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        with store_errors(f"read {queue!r}"):
            local = self._found(queue)
            return await browse.find(local.files, ids, self._clock.time, local=self._options.local_time)

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Shares of the names."""
        with store_errors(f"browse {queue!r}"):
            self._found(queue)
        return shares(count)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with store_errors(f"requeue in {queue!r}"):
            local, store = self._found(queue), self._opened()
            moved = await admin.requeue(local.files, selection, self._clock.time())
            await store.commit({local.files.fail, local.files.queue} if moved else set())
        local.added(moved, [], returned=True)
        if moved:
            store.notify(local)
        return len(moved)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with store_errors(f"remove from {queue!r}"):
            local, store = self._found(queue), self._opened()
            gone = await admin.remove(local.files, selection, self._clock.time)
            local.lose([entry.item for entry in gone if entry.state is State.LEASED])
            await store.commit({entry.directory for entry in gone})
        return len(gone)

    async def pause(self, queue: str) -> None:
        """Pause."""
        with store_errors(f"pause {queue!r}"):
            local = self._found(queue)
            admin.pause(local.files)
            await self._opened().commit({local.files.base})

    async def resume(self, queue: str) -> None:
        """Resume."""
        with store_errors(f"resume {queue!r}"):
            local, store = self._found(queue), self._opened()
            admin.resume_queue(local.files)
            await store.commit({local.files.base})
        store.notify(local)

    # -- besides the contract (qworker/backend/offers.py) ----------------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Try the directory: a given id is a second link, and a pipe wakes idle workers."""
        from qworker.kit.directory.doctor import examine_directory, try_fifo, try_link

        return await examine_directory(url.directory, [("link", try_link), ("fifo", try_fifo)])
