"""An opened root, and what this process knows of its queues."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qworker.clock import Clock
from qworker.errors import QueueNotFound
from qworker.kit.file_system import FileSystem
from qworker.kit.files import raise_file_limit
from qworker.kit.group_commit import GroupCommit
from qworker.kit.inotify import Watcher
from qworker.kit.linux import boot_id
from qworker.names import check_queue
from qworker_mq.claims import Claims
from qworker_mq.due import DueIndex
from qworker_mq.layout import QueueDirs, Root
from qworker_mq.life import LifeSign
from qworker_mq.record import Records
from qworker_mq.window import Window

__all__ = ["Held", "Store"]


class Held:
    """One queue of a store.

    Args:
        name: of the queue.
        dirs: its directories.
        peers: see `Window`.
    """

    def __init__(self, name: str, dirs: QueueDirs, peers: int) -> None:
        self.name = name
        self.dirs = dirs
        self.window = Window(dirs.ready, peers)
        self.due = DueIndex(dirs.due)
        # All fetches of one queue are serialised in a process, as in mq's server.
        self.fetching = asyncio.Lock()
        # Sweeps that may be under way use the descriptors: closed with the store, or when nobody fetches.
        self.watched = False


class Store:
    """An opened root.

    Args:
        path: of the root.
        clock: where delays and expiries come from.
        peers: see `Window`.
        sync: whether publishes and settlements are synced.
        plain: see `Claims`.
    """

    def __init__(self, path: Path, clock: Clock, *, peers: int, sync: bool, plain: float) -> None:
        # No lease can be taken without it: better no store than a worker that waits for ever.
        boot_id()
        raise_file_limit()
        self.clock = clock
        self.root = Root(path)
        self.records = Records(self.root.lease)
        self.claims = Claims(self.root, self.records, clock, plain=plain)
        system = FileSystem(self.root.root)
        self._commit = GroupCommit(self.root.root, system) if sync else None
        self._peers = peers
        self._held: dict[str, Held] = {}
        self._retired: list[QueueDirs] = []
        self._waiting: set[tuple[frozenset[str], asyncio.Event]] = set()
        self._watcher: Watcher | None = None
        self._sign: LifeSign | None = None
        # Leases are extended by threads, and closing waits for them.
        self.using = threading.Lock()
        self.closed = False

    # -- queues ------------------------------------------------------------------------------------------------------

    def held(self, queue: str) -> Held | None:
        """A queue; None when there is none (any more)."""
        held = self._held.get(queue)
        if held is not None:
            if not held.dirs.gone:
                return held
            self.forget(queue)
        return self._take_up(queue, create=False)

    def found(self, queue: str) -> Held:
        """A queue.

        Raises:
            QueueNotFound: there is none.
        """
        held = self.held(check_queue(queue))
        if held is None:
            raise QueueNotFound(queue)
        return held

    def made(self, queue: str) -> Held:
        """A queue, made if there is none."""
        held = self.held(check_queue(queue)) or self._take_up(queue, create=True)
        assert held is not None, "a queue that was just made"
        return held

    def _take_up(self, queue: str, *, create: bool) -> Held | None:
        dirs = self.root.queue(queue, create=create)
        if dirs is None:
            return None
        held = self._held[queue] = Held(queue, dirs, self._peers)
        return held

    def forget(self, queue: str) -> None:
        """A queue was deleted; calls that are under way still use its descriptors, so they are closed with the store."""
        held = self._held.pop(queue, None)
        if held is not None:
            self._retired.append(held.dirs)

    def is_down(self, queue: str) -> bool:
        """Whether a queue is paused."""
        try:
            os.stat(queue, dir_fd=self.root.down, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    # -- durability --------------------------------------------------------------------------------------------------

    async def sync_data(self, files: Sequence[int]) -> None:
        """Put the contents of new files on the disk; see `GroupCommit.data`."""
        if self._commit is not None and files:
            await self._commit.data(files)

    async def sync_directories(self, *directories: int) -> None:
        """Put renames on the disk; see `GroupCommit.directories`."""
        if self._commit is not None and directories:
            await self._commit.directories(frozenset(directories))

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def wake(self, queue: str) -> None:
        """Something became ready in a queue."""
        for queues, event in tuple(self._waiting):
            if queue in queues:
                event.set()

    def _wake_all(self) -> None:
        for _, event in tuple(self._waiting):
            event.set()

    @contextmanager
    def listening(self, queues: Sequence[str]) -> Generator[asyncio.Event]:
        """An event that `wake` and changes in the directories set."""
        row = (frozenset(queues), asyncio.Event())
        self._waiting.add(row)
        try:
            yield row[1]
        finally:
            self._waiting.discard(row)

    def watch(self, queues: Sequence[str]) -> None:
        """Have changes in the directories of `queues` set the events of `pause`, as far as the kernel allows."""
        if self._watcher is None:
            self._watcher = Watcher(self._wake_all)
            for directory in (self.root.new, self.root.queues):
                self._watcher.add(directory)
        for queue in queues:
            held = self.held(queue)
            if held is not None and not held.watched:
                held.watched = True
                self._watcher.add(held.dirs.ready)
                self._watcher.add(held.dirs.due)

    # -- life --------------------------------------------------------------------------------------------------------

    def holder(self) -> str:
        """The name of this process's life sign, put up at the first call."""
        if self._sign is None:
            self._sign = LifeSign(self.root.workers, self.root.tmp)
        return self._sign.holder

    async def aclose(self) -> None:
        """Close everything."""
        if self._commit is not None:
            await self._commit.aclose()
        if self._watcher is not None:
            self._watcher.close()
        if self._sign is not None:
            self._sign.close()
        with self.using:
            self.closed = True
            for held in self._held.values():
                held.dirs.close()
            for dirs in self._retired:
                dirs.close()
            self.root.close()
