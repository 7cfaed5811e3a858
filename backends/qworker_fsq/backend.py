"""`fsq:` queues, shared live with any other implementation of the standard; docs/protocols/fsq.md describes them."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.history.directory import directory_history
from qworker.kit.browse import at_most
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.directory.unchanged import unchanged
from qworker.kit.doctor_check import Check
from qworker.kit.files import check_writable, durability_at, link_file, store_errors
from qworker.kit.find import find_each, stamp
from qworker.kit.parts import shares
from qworker.kit.wait import wait_for_ready
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
from qworker_fsq.browse import Entry, Look, directory_of
from qworker_fsq.layout import place
from qworker_fsq.lease import reason_name
from qworker_fsq.lease_end import FsqLease
from qworker_fsq.names import Malformed, parse, with_tries
from qworker_fsq.open_queue import LocalQueue
from qworker_fsq.options import FsqOptions, root_of
from qworker_fsq.publish import ids
from qworker_fsq.settle import settle_all
from qworker_fsq.store import ABSENT_PAUSE, Store

if TYPE_CHECKING:
    from qworker.backend.scan_source import ScanOptions, Source

__all__ = ["FsqBackend"]


class FsqBackend(Backend):
    """Queues of fsq(7); see the module.

    Args:
        url: as given.
        options: what it says.
        clock: gives the times in names.
        remote_holders: the holders of leases are elsewhere: leases end by time too, although this process keeps the locks.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "items are taken in the order of their names",
        "unique_key": "the standard has no keys",
        "given_ids": "an id is the time, the process and the host of its making",
        "fields": "an item has a name and its contents",
        "retry_errors": "an item has a name and its contents: the history keeps the error",
        "expiry": "a lease is a lock on the item, which the kernel frees when its holder lets go or dies: visibility has no meaning",
    }

    def __init__(
        self, url: BackendURL, options: FsqOptions, *, clock: Clock = SYSTEM_CLOCK, remote_holders: bool = False
    ) -> None:
        self._url = url
        self._options = options
        self.directory = root_of(url, options.constants)
        self._directory = str(self.directory)
        self._clock = clock
        self._remote_holders = remote_holders
        self._store: Store | None = None
        self.history = directory_history(url, self._directory, default=False, clock=clock)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`fsq:///root[?host=NAME&max_tries=N&ttl=DURATION&keep_done=all|none|AGE|N-messages&sync=full|off]`, and so on.

        `fsq:` is FSQ_ROOT.
        """
        return cls(url, FsqOptions.from_url(url), clock=clock, remote_holders=remote_leases)

    def describe(self) -> str:
        """The URL."""
        return self._url.at(self._directory)

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
                self._store = Store(self._directory, self._clock, self._options)
        return self._store

    async def aclose(self) -> None:
        """Close every descriptor, which frees every lock."""
        store, self._store = self._store, None
        if store is not None:
            await store.aclose()
        await self.history.aclose()

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        check_queue(queue)
        refuse_unsupported("fsq", self.deviations, drafts)
        if not drafts:
            return []
        store = self._opened()
        with store_errors(f"publish to {queue!r}"):
            local = store.made(queue)
            try:
                names = await store.publisher.publish(local.files, drafts)
            except FileNotFoundError:
                # The queue was deleted under us: it is made anew. What was stored in the old one is gone with it.
                store.drop_deleted(queue)
                local = store.made(queue)
                names = await store.publisher.publish(local.files, drafts)
            local.added(names)
            store.notify(local, trigger=True)
        return ids(names, self._options.constants)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lock the oldest items that nobody works on."""
        await wait_for_ready(self, queue, limit, timeout)
        store = self._opened()
        with store_errors(f"lease from {queue!r}"):
            local = store.queue(check_queue(queue))
            return [] if local is None else list(await local.lease(min(limit, store.room()), visibility))

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for an enqueue, a pulled trigger, a due time, the end of a pause, or an item that is locked no more."""
        store = self._opened()
        event = asyncio.Event()
        store.add_waiter(event, frozenset(check_queue(name) for name in queues))
        try:
            with store_errors("wait for messages"):
                await self._wait(store, queues, event, asyncio.get_running_loop().time() + timeout)
        finally:
            store.remove_waiter(event)

    async def _wait(self, store: Store, queues: Sequence[str], event: asyncio.Event, ends: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, look = await self._next_events(store, queues)
            rest = ends - loop.time()
            pause = min(due, look, rest)
            if due <= 0 or rest <= 0:
                return
            try:
                async with asyncio.timeout(pause):
                    await event.wait()
            except TimeoutError:
                if pause == due:
                    return
            else:
                return

    async def _next_events(self, store: Store, queues: Sequence[str]) -> tuple[float, float]:
        """Seconds until a queue has work, as far as is known, and until the next look at them; work now is 0."""
        if store.is_full():
            # The end of a lease wakes the waiter.
            return float("inf"), float("inf")
        due, look = float("inf"), ABSENT_PAUSE
        for name in queues:
            local = store.queue(name)
            if local is None:
                continue
            store.listen(local)
            if await local.has_work():
                return 0.0, 0.0
            due = min(due, local.until_due())
            look = min(look, local.until_look())
        return due, look

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Look whether the items still are ours: a lock needs no extension, and a person may have moved a file."""
        lost: list[Lease] = []
        for lease in leases:
            assert isinstance(lease, FsqLease)
            try:
                held = lease.ended is None and lease.claimed.fd >= 0 and lease.claimed.is_ours
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise BackendUnavailable(f"cannot read leases: {error.strerror}") from error
                # Closed by another thread meanwhile.
                held = False
            if held:
                lease.expires_at = self._clock.time() + visibility
            else:
                lost.append(lease)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        store = self._opened()
        with store_errors("settle"):
            return await settle_all(store, settlements)

    async def reap(self, queue: str) -> int:
        """Return what is due; and, where the holders are elsewhere, what they have kept for too long."""
        store = self._opened()
        with store_errors(f"reap {queue!r}"):
            local = store.queue(check_queue(queue))
            if local is None:
                return 0
            count = local.take_due()
            if self._remote_holders:
                count += local.expire()
            await store.prune(local)
        if count:
            store.notify(local)
        return count

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The queues."""
        with store_errors(f"list {self._directory}"):
            store = self._present()
            return [] if store is None else store.names()

    async def create(self, queue: str) -> None:
        """Install a queue."""
        with store_errors(f"create {queue!r}"):
            local = self._opened().made(check_queue(queue))
        with store_errors(f"work on {queue!r}"):
            check_writable(local.files.queue)

    async def delete(self, queue: str) -> None:
        """Delete a queue; with a host, its sub-queue."""
        where = place(queue, self._options.host, self._options.constants)
        parent, _, last = where.rpartition("/")
        hidden = os.path.join(parent, f".{last}{secrets.token_hex(4)}")
        with store_errors(f"delete {queue!r}"):
            if self._queue(queue) is None:
                return
            store = self._opened()
            try:
                os.rename(where, hidden, src_dir_fd=store.root, dst_dir_fd=store.root)
            except FileNotFoundError:
                # Another delete was faster.
                return
            await asyncio.to_thread(_remove_tree, hidden, store.root)
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

    def _look(self, local: LocalQueue) -> Look:
        return Look(local.files, local.own, self._clock.time(), self._opened().system.kind)

    async def stats(self, queue: str) -> QueueStats:
        """Count."""
        with store_errors(f"count {queue!r}"):
            kept = {
                "done": self._options.keep_done.describe(),
                "failed": self._options.keep_failed.describe(),
                "unfinished": "removed after 36 hours",
            }
            retention = {**kept, **self.history.retention}
            return await self._look(self._found(queue)).count(retention)

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages."""
        with store_errors(f"browse {queue!r}"):
            look = self._look(self._found(queue))
            found = (
                look.browse(query) if query.part is None else at_most(query.limit, look.share(query.state, query.part))
            )
            async for page in found:
                yield page

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        with store_errors(f"read {queue!r}"):
            local = self._found(queue)
            look, files = self._look(local), local.files

            async def once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
                for entry in await look.matching(wanted, *State):
                    if (stored := look.read(entry)) is not None:
                        yield stored

            return await find_each(ids, once, lambda: stamp((files.queue, files.fail, files.done)))

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Shares of the names."""
        with store_errors(f"browse {queue!r}"):
            self._found(queue)
        return shares(count)

    async def _selected(self, local: LocalQueue, selection: Selection, *states: State) -> Iterable[Entry]:
        """What is selected; by ids, in some states only."""
        if selection.unchanged is not None:
            directories = {state: directory_of(local.files, state) for state in (State.DONE, State.FAILED)}
            found = unchanged(selection.unchanged, directories, lambda status: status.st_ctime)
            return (Entry(state, name) for state, name, _ in found)
        look = self._look(local)
        if selection.ids is not None:
            return await look.matching(frozenset(selection.ids), *states)
        assert selection.state is not None
        return await look.entries(selection.state)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with store_errors(f"requeue in {queue!r}"):
            local, store = self._found(queue), self._opened()
            entries = await self._selected(local, selection, State.FAILED)
            local.let_go()
            moved = [name for entry in entries if (name := self._requeue(local, entry.name)) is not None]
            await store.commit({local.files.fail, local.files.queue} if moved else set())
        local.added(moved, returned=True)
        if moved:
            store.notify(local, trigger=True)
        return len(moved)

    def _requeue(self, local: LocalQueue, name: str) -> str | None:
        files, constants = local.files, self._options.constants
        target = name
        try:
            parse(name, constants)
            target = with_tries(name, 0, constants)
        except Malformed:
            # It fails again, with its reason, unless somebody renames it.
            pass
        try:
            # Never over another: the link tells.
            link_file(name, target, files.fail, files.queue)
            os.unlink(name, dir_fd=files.fail)
            os.unlink(reason_name(name), dir_fd=files.fail)
        except FileNotFoundError:
            # Another requeue was faster; or it had no reason.
            return target if _is_there(target, files.queue) else None
        except (FileExistsError, PermissionError):
            # Queued again already; or a directory, which is none's message.
            return None
        return target

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with store_errors(f"remove from {queue!r}"):
            local = self._found(queue)
            return await self._delete(local, await self._selected(local, selection, *State))

    async def _delete(self, local: LocalQueue, entries: Iterable[Entry]) -> int:
        files = local.files
        gone: set[int] = set()
        count = 0
        for number, entry in enumerate(entries):
            directory = directory_of(files, entry.state)
            if not _deleted(entry.name, directory):
                continue
            local.lose(entry.name)
            if entry.state is State.FAILED:
                _deleted(reason_name(entry.name), directory)
            count += 1
            gone.add(directory)
            if number % 100 == 99:
                await asyncio.sleep(0)
        await self._opened().commit(gone)
        return count

    async def pause(self, queue: str) -> None:
        """Pause."""
        with store_errors(f"pause {queue!r}"):
            local = self._found(queue)
            local.files.down()
            await self._opened().commit({local.files.base})

    async def resume(self, queue: str) -> None:
        """Resume."""
        with store_errors(f"resume {queue!r}"):
            local, store = self._found(queue), self._opened()
            local.files.up()
            await store.commit({local.files.base})
            store.notify(local, trigger=True)

    # -- besides the contract (qworker/backend/offers.py) ----------------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Try the directory, or FSQ_ROOT: enqueueing is a link."""
        from qworker.kit.directory.doctor import examine_directory, try_link

        root = root_of(url, FsqOptions.from_url(url).constants)
        return await examine_directory(root, [("link", try_link)])

    @classmethod
    def open_scan(cls, url: BackendURL, queue: str, options: ScanOptions) -> Source:
        """Do what fsq's scan does, item by item, in place."""
        from qworker_fsq.scan import open_scan

        return open_scan(url, queue, options)


def _is_there(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _deleted(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        # A stranger's directory; no link in it is followed.
        shutil.rmtree(name, dir_fd=directory)
    return True


def _remove_tree(name: str, parent: int, attempts: int = 10) -> None:
    for left in reversed(range(attempts)):
        try:
            shutil.rmtree(name, dir_fd=parent)
        except OSError as error:
            # A publisher that has it open wrote once more meanwhile.
            if error.errno != errno.ENOTEMPTY or not left:
                raise
        else:
            return
