"""An open directory and its queues, which are opened when they are first needed, and again after they were replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from pathlib import Path

from qworker.clock import Clock
from qworker.errors import InvalidName
from qworker.kit.directory.closing import LateCloser, log_replaced
from qworker.kit.directory.in_use import QueuesInUse
from qworker.kit.directory.missing import queue_not_found
from qworker.kit.directory.place import Place
from qworker.kit.directory.root import open_root
from qworker.kit.file_system import FileSystem
from qworker.kit.files import files_at_once, raise_file_limit
from qworker.kit.group_commit import GroupCommit
from qworker.kit.inotify import Watcher, ignore
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue, check_queue
from qworker_vsqs.options import VsqsOptions
from qworker_vsqs.queue_dir import QueueDirectory

__all__ = ["VsqsStore"]

# Seconds between two checks without an event: a network file system reports no changes by other hosts.
_POLL_INTERVAL = 0.05
# The descriptors of an open queue.
_DESCRIPTORS = 5


class VsqsStore:
    """The open directory of one backend instance, its open queues, and the calls that wait for a change in them.

    Args:
        directory: Its path. It is created if it does not exist.
        options: The options of the URL.
        clock: The store's clock.

    Attributes:
        queues: The queues that were opened, by name. Another process may have deleted one.
        group_commit: Syncs what was written. None: nothing is synced.
        in_use: The queues that calls use now.
        batch: How many messages one publish may have open at once.

    Raises:
        OSError: It cannot be opened.
    """

    # Whether leases end by the descriptors: they end by the names of their files.
    has_leases = False

    def __init__(self, directory: Path, options: VsqsOptions, clock: Clock) -> None:
        self.directory = directory
        self.path = str(directory)
        self.options = options
        self.clock = clock
        self.root = open_root(self.path, 0o700)
        self.place = Place(self.path, self.root)
        self.queues: dict[str, QueueDirectory] = {}
        self.in_use = QueuesInUse(_DESCRIPTORS)
        self._system = FileSystem(self.root)
        self.group_commit = GroupCommit(self.root, self._system) if options.durable else None
        raise_file_limit()
        self.batch = files_at_once()
        self._watcher = Watcher(self.wake_all)
        self._waiters: set[asyncio.Future[None]] = set()
        self._replaced = LateCloser()

    async def aclose(self) -> None:
        """Close everything. Leases last until they expire."""
        if self.group_commit is not None:
            await self.group_commit.aclose()
        self._watcher.close()
        await self._replaced.aclose()
        for queue in self.queues.values():
            queue.close()
        self.queues.clear()
        os.close(self.root)
        self.wake_all()

    # -- queues ------------------------------------------------------------------------------------------------------

    def is_queue(self, name: str) -> bool:
        """Return whether a directory has this name."""
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self.root, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def get(self, name: str, *, create: bool = False) -> QueueDirectory | None:
        """Return a queue; None if it does not exist and must not be created."""
        check_existing_queue(name)
        queue = self.queues.get(name)
        if queue is not None:
            if queue.is_alive():
                return queue
            if queue.exists:
                log_replaced(os.path.join(self.path, name))
            self.drop(name)
        if not self.is_queue(name):
            if not create:
                return None
            self._create(check_queue(name))
        self._close_oldest()
        queue = self.queues[name] = QueueDirectory(self.root, name, self.clock)
        self._watch(queue)
        return queue

    def drop(self, name: str) -> None:
        """Drop a queue that is deleted, or whose directories were removed or replaced."""
        queue = self.queues.pop(name, None)
        if queue is not None:
            self._replaced.add(queue.aclose)

    def _close_oldest(self) -> None:
        """Make room for another queue. No call uses those that are closed."""
        for name in self.in_use.to_close(self.queues, lambda name: self.queues[name].is_needed):
            self.queues.pop(name).close()

    def get_or_create(self, name: str) -> QueueDirectory:
        """Return a queue, which is created if it does not exist."""
        queue = self.get(name, create=True)
        assert queue is not None
        return queue

    def require(self, name: str) -> QueueDirectory:
        """Return a queue.

        Raises:
            QueueNotFound: It does not exist.
        """
        try:
            with store_errors(f"open the queue {name}"):
                queue = self.get(name)
        except InvalidName:
            queue = None
        if queue is None:
            raise queue_not_found(name, self.directory)
        return queue

    def _create(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.root)
            if self.options.durable:
                os.fsync(self.root)

    def _watch(self, queue: QueueDirectory) -> None:
        if self._watcher.watch(queue.fd, queue.window.on_arrival, ignore) >= 0:
            queue.window.is_watched = self._system.is_local

    # -- changes -----------------------------------------------------------------------------------------------------

    def read_events(self) -> None:
        """Apply the changes that have happened in the directories so far."""
        self._watcher.drain()

    def wake_all(self) -> None:
        """End every call of `wait_for_change`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_change(self, timeout: float) -> None:
        """Return at the next change in any open queue, or after a short time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(min(timeout, _POLL_INTERVAL)):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)

    async def sync(self, queue: QueueDirectory, files: list[int], *, has_info: bool = True) -> None:
        """Make files and the entries of a queue durable, and close the files."""
        try:
            # Without a journal a synced rename or unlink may still be torn: the sync would cost much and promise
            # nothing.
            if self.group_commit is not None and self._system.keeps_renames:
                await self.group_commit.both(files, queue.touched(has_info=has_info))
        finally:
            for fd in files:
                os.close(fd)
            files.clear()
