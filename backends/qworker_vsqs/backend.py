"""`vsqs:` queues, shared live with any other implementation of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BadName, BadURL, NotSupported, QueueNotFound
from qworker.files import FileSystem, GroupCommit, list_names, store_errors
from qworker.history.directory import directory_history
from qworker.history.store import HISTORY_OPTIONS
from qworker.message import Draft, Finished, Lease, QueueStats, Settle, Settlement, State, StoredMessage
from qworker.names import check_queue, is_queue_name
from qworker.parts import Share, pages, shares
from qworker.url import BackendURL
from qworker_vsqs import administer
from qworker_vsqs.administer import Row
from qworker_vsqs.consume import Consumer, VsqsLease
from qworker_vsqs.events import Events
from qworker_vsqs.folder import Folder
from qworker_vsqs.names import Unit, parse
from qworker_vsqs.publisher import Publisher

__all__ = ["VsqsBackend"]

_UNITS = {"us": Unit(1_000_000, 1000), "ms": Unit(1000, 16)}
# Seconds between looks while no event comes: a network file system tells nothing of other hosts.
_LOOK = 0.05


class VsqsBackend(Backend):
    """Directories of messages; see the module."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "the order is that of the ids",
        "key": "the protocol has no keys",
        "given_ids": "an id is the time of its making",
        "fields": "a message is its contents alone",
        "arguments": "a message is its contents alone",
    }

    def __init__(
        self,
        url: BackendURL,
        *,
        unit: str = "us",
        capacity: int | None = None,
        timeout: float | None = None,
        durable: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._url = url
        self._path = str(url.directory)
        self._unit = _UNITS[unit]
        self._capacity = capacity
        self._timeout = timeout
        self._durable = durable
        self._clock = clock
        self.history = directory_history(url, self._path, default=False, clock=clock)
        self._root = -1
        self._folders: dict[str, Folder] = {}
        self._watches: dict[int, Folder] = {}
        self._system: FileSystem
        self._commit: GroupCommit | None = None
        self._events: Events | None = None
        self._publisher: Publisher | None = None
        self._consumer = Consumer(self._unit)
        self._waiters: set[asyncio.Future[None]] = set()

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK) -> Self:
        """`vsqs:///dir[?unit=us|ms&capacity=N&timeout=SECONDS&sync=full|off]`."""
        url.only({"unit", "capacity", "timeout", "sync", *HISTORY_OPTIONS})
        timeout = url.options.get("timeout")
        try:
            seconds = None if timeout is None else float(timeout)
        except ValueError:
            seconds = -1.0
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise BadURL(f"{url.masked}: timeout is a number of seconds, not {timeout!r}")
        return cls(
            url,
            unit=url.choice("unit", "us", _UNITS),
            capacity=url.integer("capacity", 0, minimum=1) or None,
            timeout=seconds,
            durable=url.choice("sync", "full", ("full", "off")) == "full",
            clock=clock,
        )

    async def open(self) -> None:
        """Make the directory where it is absent, and open it."""
        if self._root >= 0:
            return
        with store_errors(f"open {self._path}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            self._root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._system = FileSystem(self._root)
            if self._durable:
                self._commit = GroupCommit(self._root, self._system)
        self._events = Events(on_name=self._came, on_overflow=self._believe_nothing, on_change=self._wake)
        self._publisher = Publisher(
            clock=self._clock,
            unit=self._unit,
            capacity=self._capacity,
            timeout=self._timeout,
            commit=self._commit,
            changed=self._changed,
        )

    async def aclose(self) -> None:
        """Let go of everything; leases last until they expire."""
        await self.history.aclose()
        if self._root < 0:
            return
        if self._commit is not None:
            await self._commit.aclose()
            self._commit = None
        if self._events is not None:
            self._events.close()
            self._events = None
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()
        self._watches.clear()
        os.close(self._root)
        self._root = -1
        self._wake()

    def describe(self) -> str:
        """The URL."""
        return self._url.masked

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, or where the file system has no journal that keeps renames."""
        if self._root >= 0:
            return "disk" if self._durable and self._system.keeps_renames else "process"
        if not self._durable:
            return "process"
        with store_errors(f"look at {self._path}"):
            return "disk" if FileSystem.of(self._path).keeps_renames else "process"

    # -- queues ------------------------------------------------------------------------------------------------------

    def _is_queue(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    async def _found(self, queue: str, *, make: bool = False) -> Folder | None:
        check_queue(queue)
        folder = self._folders.get(queue)
        if folder is not None:
            if folder.alive():
                return folder
            del self._folders[queue]
            folder.close()
        await self.open()
        with store_errors(f"open the queue {queue}"):
            if not self._is_queue(queue):
                if not make:
                    return None
                with contextlib.suppress(FileExistsError):
                    os.mkdir(queue, 0o700, dir_fd=self._root)
                    if self._durable:
                        os.fsync(self._root)
            folder = self._folders[queue] = Folder(self._root, queue)
        watch = None if self._events is None else self._events.add(folder.fd)
        if watch is not None:
            self._watches[watch] = folder
            folder.window.watched = self._system.is_local
        return folder

    async def _existing(self, queue: str) -> Folder:
        try:
            folder = await self._found(queue)
        except BadName:
            folder = None
        if folder is None:
            raise QueueNotFound(queue)
        return folder

    def _came(self, watch: int, name: str) -> None:
        folder = self._watches.get(watch)
        if folder is not None:
            folder.window.came(name)

    def _believe_nothing(self) -> None:
        for folder in self._folders.values():
            folder.window.stale()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self, timeout: float) -> None:
        """Return at the next change in any open queue, or after some time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(min(timeout, _LOOK)):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)

    def _paused(self, folder: Folder) -> bool:
        try:
            os.stat("down", dir_fd=folder.side, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    async def _sync(self, folder: Folder, files: list[int], *, noted: bool = True) -> None:
        try:
            # Without a journal a synced rename or unlink may be torn all the same: the sync would cost much and promise nothing.
            if self._commit is not None and self._system.keeps_renames:
                await self._commit.both(files, folder.touched(noted=noted))
        finally:
            for fd in files:
                os.close(fd)
            files.clear()

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages; with a capacity, wait for room."""
        check_queue(queue)
        for draft in drafts:
            _check(draft)
        if not drafts:
            return []
        folder = await self._found(queue, make=True)
        assert folder is not None
        assert self._publisher is not None
        with store_errors(f"publish to {queue}"):
            ids = await self._publisher.publish(folder, drafts)
        self._wake()
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def _refresh(self, folder: Folder) -> None:
        """See to it that the window may be believed, and that nothing in it has expired."""
        if self._events is not None:
            self._events.drain()
        async with folder.refreshing:
            if not folder.window.fresh:
                began = time.monotonic()
                folder.window.fill(await list_names(folder.fd), began)
                if self._events is not None:
                    self._events.drain()
            await self._requeue_expired(folder)

    async def _requeue_expired(self, folder: Folder) -> int:
        expired = folder.window.expired(self._unit.ticks(self._clock.time()))
        if not expired:
            return 0
        count = 0
        async with folder.locked():
            for number, expiry in expired:
                if folder.requeue_expired(number, expiry):
                    folder.window.came(str(number))
                    count += 1
        return count

    async def lease(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        """Claim the oldest ready messages."""
        folder = await self._found(queue)
        if folder is None or limit < 1 or self._paused(folder):
            return []
        leases: list[Lease] = []
        with store_errors(f"lease from {queue}"):
            await self._refresh(folder)
            now = self._clock.time()
            while len(leases) < limit and (number := folder.window.take()) is not None:
                lease = self._consumer.claim(folder, number, now, visibility)
                if lease is not None:
                    leases.append(lease)
        return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a message, for the end of a lease, or for a delay to be over."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        while True:
            soonest = min([await self._until_work(queue) for queue in queues], default=float("inf"))
            give_up = min(give_up, loop.time() + soonest)
            left = give_up - loop.time()
            if left <= 0:
                return
            await self._changed(left)

    async def _until_work(self, queue: str) -> float:
        """Seconds until a queue has something, as far as is known now."""
        folder = await self._found(queue)
        if folder is None or self._paused(folder):
            return float("inf")
        with store_errors(f"look at {queue}"):
            await self._refresh(folder)
        if folder.window.some_ready:
            return 0.0
        expiry = folder.window.next_expiry()
        return float("inf") if expiry is None else max(0.001, self._unit.seconds(expiry) - self._clock.time())

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Renew leases; from any thread."""
        now = self._clock.time()
        lost: list[Lease] = []
        for lease in leases:
            folder = self._folders.get(lease.message.queue)
            with store_errors(f"extend leases of {lease.message.queue}"):
                if (
                    folder is None
                    or not isinstance(lease, VsqsLease)
                    or not self._consumer.extend(folder, lease, now, visibility)
                ):
                    lost.append(lease)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        by_queue: dict[str, list[Settlement]] = {}
        for settlement in settlements:
            by_queue.setdefault(settlement.lease.message.queue, []).append(settlement)
        refused: list[Settlement] = []
        for queue, some in by_queue.items():
            folder = await self._found(queue)
            refused += some if folder is None else await self._settle(folder, some)
        return refused

    async def _settle(self, folder: Folder, settlements: list[Settlement]) -> list[Settlement]:
        files: list[int] = []
        done: list[VsqsLease] = []
        try:
            with store_errors(f"settle messages of {folder.name}"):
                try:
                    refused = await self._consumer.settle(folder, settlements, self._clock.time(), files, done)
                finally:
                    if done:
                        await self._sync(folder, files, noted=bool(files))
        except BaseException:
            # Ended, but perhaps not for good: a repetition is told so, and makes it durable.
            for lease in done:
                lease.unsure = True
            raise
        if any(settlement.how is not Settle.ACK for settlement in settlements):
            self._wake()
        return refused

    async def reap(self, queue: str) -> int:
        """Return expired leases with tries + 1, and what is due."""
        folder = await self._found(queue)
        if folder is None:
            return 0
        with store_errors(f"reap {queue}"):
            if self._events is not None:
                self._events.drain()
            async with folder.refreshing:
                if not folder.window.fresh:
                    began = time.monotonic()
                    folder.window.fill(await list_names(folder.fd), began)
                count = await self._requeue_expired(folder)
        if count:
            self._wake()
        return count

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The directories that can be queues."""
        await self.open()
        with store_errors(f"list {self._path}"):
            return sorted(name for name in os.listdir(self._root) if is_queue_name(name) and self._is_queue(name))

    async def create(self, queue: str) -> None:
        """Make a directory."""
        await self._found(queue, make=True)

    async def delete(self, queue: str) -> None:
        """Remove a directory with all that is in it."""
        await self.open()
        check_queue(queue)
        folder = self._folders.pop(queue, None)
        if folder is not None:
            folder.close()
        if not self._is_queue(queue):
            return
        gone = f".{secrets.token_hex(8)}.gone"
        with store_errors(f"delete the queue {queue}"):
            os.rename(queue, gone, src_dir_fd=self._root, dst_dir_fd=self._root)
            os.fsync(self._root)
            await asyncio.to_thread(shutil.rmtree, f"{self._path}/{gone}")

    async def _look(self, folder: Folder) -> dict[State, list[Row]]:
        return await administer.look(folder, self._unit.ticks(self._clock.time()))

    async def _unlink(self, folder: Folder, rows: list[tuple[State, Row]]) -> int:
        count = administer.unlink(folder, rows)
        if count:
            await self._sync(folder, [])
        return count

    async def stats(self, queue: str) -> QueueStats:
        """Count by listing."""
        folder = await self._existing(queue)
        with store_errors(f"count {queue}"):
            found = await self._look(folder)
        ready = found[State.READY]
        oldest = min((note.enqueued_at or Unit.enqueued_at(number) for number, _, note in ready), default=None)
        return QueueStats(
            queue=queue,
            ready=len(ready),
            leased=len(found[State.LEASED]),
            delayed=len(found[State.DELAYED]),
            fail=len(found[State.FAIL]),
            oldest_age=None if oldest is None else max(0.0, self._clock.time() - oldest),
            down=self._paused(folder),
            retention=self.history.retention,
        )

    async def browse(self, queue: str, state: State, limit: int = 100, offset: int = 0) -> list[StoredMessage]:
        """Look at messages."""
        folder = await self._existing(queue)
        with store_errors(f"browse {queue}"):
            rows = (await self._look(folder))[state]
            seen = (administer.stored(folder, self._unit, state, row) for row in rows[offset : offset + limit])
            return [one for one in seen if one is not None]

    async def find(self, queue: str, message_id: str) -> StoredMessage | None:
        """Look at one message."""
        folder = await self._existing(queue)
        parsed = parse(message_id)
        if parsed is None or parsed[1] is not None:
            return None
        with store_errors(f"look into {queue}"):
            for state, rows in (await self._look(folder)).items():
                for row in rows:
                    if row[0] == parsed[0]:
                        return administer.stored(folder, self._unit, state, row)
        return None

    async def browse_parts(self, queue: str, state: State, wanted: int) -> list[str]:
        """Shares of the ids."""
        await self._existing(queue)
        return shares(wanted)

    async def browse_part(self, queue: str, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Look at one share."""
        folder = await self._existing(queue)
        share = Share.parse(part)
        with store_errors(f"browse {queue}"):
            rows = [row for row in (await self._look(folder))[state] if share.has(str(row[0]))]
            async for page in pages(administer.stored(folder, self._unit, state, row) for row in rows):
                yield page

    async def discard(self, queue: str, found: Sequence[Finished]) -> int:
        """Delete failed messages that are as they were found."""
        folder = await self._existing(queue)
        with store_errors(f"remove from {queue}"):
            return await self._unlink(folder, administer.as_found(folder, found))

    async def requeue(self, queue: str, ids: Iterable[str] | None = None) -> int:
        """Make failed messages ready."""
        folder = await self._existing(queue)
        wanted = None if ids is None else set(ids)
        with store_errors(f"requeue in {queue}"):
            failed = [row[0] for row in (await self._look(folder))[State.FAIL]]
            chosen = [number for number in failed if wanted is None or str(number) in wanted]
            async with folder.locked():
                files = administer.requeue(folder, chosen)
            if chosen:
                await self._sync(folder, files)
        self._wake()
        return len(chosen)

    async def remove(self, queue: str, ids: Iterable[str]) -> int:
        """Delete messages, whoever holds them."""
        folder = await self._existing(queue)
        wanted = set(ids)
        with store_errors(f"remove from {queue}"):
            found = await self._look(folder)
            return await self._unlink(
                folder, [(state, row) for state, rows in found.items() for row in rows if str(row[0]) in wanted]
            )

    async def purge(self, queue: str, state: State | None = None) -> int:
        """Delete messages by state."""
        states = {State.READY, State.DELAYED, State.FAIL} if state is None else {state}
        folder = await self._existing(queue)
        with store_errors(f"purge {queue}"):
            found = await self._look(folder)
            return await self._unlink(folder, [(state, row) for state in states for row in found[state]])

    async def down(self, queue: str) -> None:
        """Pause a queue for qworker's consumers; the protocol has nothing that others would heed."""
        folder = await self._existing(queue)
        with store_errors(f"pause {queue}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open("down", flags, 0o600, dir_fd=folder.side))
            await self._sync(folder, [])

    async def up(self, queue: str) -> None:
        """Resume a queue."""
        folder = await self._existing(queue)
        with store_errors(f"resume {queue}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink("down", dir_fd=folder.side)
            await self._sync(folder, [])
        self._wake()


def _check(draft: Draft) -> None:
    if draft.priority:
        raise NotSupported(
            "vsqs: has no priorities: the order is that of the ids; use another queue for what is urgent"
        )
    if draft.key is not None:
        raise NotSupported("vsqs: has no keys")
    if draft.id is not None:
        raise NotSupported("vsqs: an id is the time of its making: publish without one")
    if draft.fields or draft.arguments:
        raise NotSupported("vsqs: has no place for fields and arguments: put them into the body")
