"""Queues of a directory: opened when they are first needed, and again when somebody has deleted them; and what wakes those who wait there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from typing import Self

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import InvalidName
from qworker.history.directory import directory_history
from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.files import FileSystem, GroupCommit, durability_at, raise_file_limit, store_errors
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_vsqs.lease import Consumer
from qworker_vsqs.names import Unit
from qworker_vsqs.publish import Publisher
from qworker_vsqs.queue_dir import Folder
from qworker_vsqs.watcher import Events

__all__ = ["VsqsFolders"]

_UNITS = {"us": Unit(1_000_000, 1000), "ms": Unit(1000, 16)}
# Seconds between looks while no event comes: a network file system tells nothing of other hosts.
_LOOK = 0.05


class VsqsFolders(Backend):
    """The part of the backend that opens, finds and closes."""

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
        self.directory = url.directory
        self._path = str(self.directory)
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
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`vsqs:///dir[?time_unit=us|ms&max_messages=N&publish_timeout=DURATION&sync=full|off]`."""
        url.only({"time_unit", "max_messages", "publish_timeout", "sync", *HISTORY_OPTIONS})
        return cls(
            url,
            unit=url.choice("time_unit", "us", _UNITS),
            capacity=url.integer("max_messages", 0, minimum=1) or None,
            timeout=url.duration("publish_timeout", 0.0) if "publish_timeout" in url.options else None,
            durable=url.choice("sync", "full", ("full", "off")) == "full",
            clock=clock,
        )

    async def open(self) -> None:
        """Make the directory where it is absent, and open it."""
        self._open(make=True)

    def _open(self, *, make: bool) -> bool:
        """Open the directory, which may be made; False where it is not there."""
        if self._root >= 0:
            return True
        if not make and is_missing(self.directory):
            return False
        with store_errors(f"open {self._path}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            self._root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._system = FileSystem(self._root)
            if self._durable:
                self._commit = GroupCommit(self._root, self._system)
        raise_file_limit()
        self._events = Events(on_name=self._came, on_overflow=self._believe_nothing, on_change=self._wake)
        self._publisher = Publisher(
            clock=self._clock,
            unit=self._unit,
            capacity=self._capacity,
            timeout=self._timeout,
            commit=self._commit,
            changed=self._changed,
        )
        return True

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
        return self._url.at(str(self._path))

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, or where the file system has no journal that keeps renames, or no barriers."""
        return durability_at(self._path, sync=self._durable)

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
        if not self._open(make=make):
            return None
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
        except InvalidName:
            folder = None
        if folder is None:
            raise queue_not_found(queue, self.directory)
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
