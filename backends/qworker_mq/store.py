"""An opened root, and the state of its queues in this process."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qworker.clock import Clock
from qworker.errors import QueueNotFound
from qworker.kit.directory.blocked import BlockedFiles, BlockedRecords
from qworker.kit.directory.closing import LateCloser, log_replaced
from qworker.kit.directory.in_use import QueuesInUse
from qworker.kit.directory.liveness import LivenessFile
from qworker.kit.directory.place import Place
from qworker.kit.directory.retention import PRUNING
from qworker.kit.file_system import FileSystem
from qworker.kit.files import has_entry, raise_file_limit
from qworker.kit.group_commit import GroupCommit
from qworker.kit.inotify import Watcher
from qworker.kit.linux import boot_id
from qworker.names import check_queue
from qworker_mq.due import DueIndex
from qworker_mq.layout import QueueDirs, Root
from qworker_mq.lease_state import LeaseState, LeaseStates
from qworker_mq.message_lock import lock_message
from qworker_mq.options import MqOptions
from qworker_mq.window import Window

__all__ = ["OpenQueue", "Store"]


class OpenQueue:
    """One queue of a store.

    Args:
        name: Name of the queue.
        dirs: Its directories.
        peers: See `Window`.
        clock: The store's clock.
    """

    def __init__(self, name: str, dirs: QueueDirs, peers: int, clock: Clock) -> None:
        self.name = name
        self.dirs = dirs
        self.window = Window(dirs.ready, peers)
        self.due = DueIndex(dirs.due)
        # Programs ignore hidden names there.
        self.records = BlockedRecords(dirs.fail)
        self.blocked = BlockedFiles(name, ".", clock, self.records)
        # All leases of one queue are serialised in a process, as in mq's server.
        self.fetching = asyncio.Lock()
        self.is_watched = False

    @property
    def is_needed(self) -> bool:
        """Whether the queue must stay open although no call uses it."""
        return bool(self.blocked)

    def retry_blocked(self) -> None:
        """Let files be tried again that have rested long enough."""
        for name in self.blocked.take_due():
            # Other names are those of files in other directories, which the reaper finds.
            if "/" not in name:
                self.window.add(name)


class Store:
    """An opened root.

    Args:
        path: Path of the root.
        clock: The source of delays and expiries.
        options: The options of the URL.
        in_use: The queues that calls use now.
        has_remote_holders: Whether the holders of leases are outside this process.
    """

    def __init__(
        self, path: Path, clock: Clock, options: MqOptions, in_use: QueuesInUse, *, has_remote_holders: bool
    ) -> None:
        # Without the boot id no lease can be taken. An error here is better than a worker that waits for ever.
        boot_id()
        raise_file_limit()
        self.clock = clock
        self.options = options
        self.root = Root(path)
        self.place = Place(str(path), self.root.root, self.root.parts)
        self.lease_states = LeaseStates(self.root.lease, options.delay)
        system = FileSystem(self.root.root)
        # True if no other host uses the root.
        self.is_local = system.is_local
        self.group_commit = GroupCommit(self.root.root, system) if options.sync else None
        self._has_remote_holders = has_remote_holders
        self._queues: dict[str, OpenQueue] = {}
        self.in_use = in_use
        self._replaced = LateCloser()
        self._waiting: set[tuple[frozenset[str], asyncio.Event]] = set()
        self._watcher: Watcher | None = None
        self._liveness_file: LivenessFile | None = None
        # Other threads extend leases, and closing waits for them.
        self.extend_lock = threading.Lock()
        self.closed = False

    # -- queues ------------------------------------------------------------------------------------------------------

    def get(self, queue: str) -> OpenQueue | None:
        """Return a queue. None: it does not exist, or was deleted."""
        open_queue = self._queues.get(queue)
        if open_queue is not None:
            if open_queue.dirs.is_alive():
                return open_queue
            if open_queue.dirs.exists:
                log_replaced(os.path.join(self.root.path, "queues", queue))
            self.drop(queue)
        return self._open_queue(queue, create=False)

    def require(self, queue: str) -> OpenQueue:
        """Return a queue.

        Raises:
            QueueNotFound: It does not exist.
        """
        open_queue = self.get(check_queue(queue))
        if open_queue is None:
            raise QueueNotFound(queue)
        return open_queue

    def get_or_create(self, queue: str) -> OpenQueue:
        """Return a queue, and create it if it does not exist."""
        open_queue = self.get(check_queue(queue)) or self._open_queue(queue, create=True)
        assert open_queue is not None, "a queue that was just created"
        return open_queue

    def _open_queue(self, queue: str, *, create: bool) -> OpenQueue | None:
        for name in self.in_use.to_close(self._queues, lambda name: self._queues[name].is_needed):
            self._queues.pop(name).dirs.close()
        dirs = self.root.queue(queue, create=create)
        if dirs is None:
            return None
        open_queue = self._queues[queue] = OpenQueue(queue, dirs, self.options.peers, self.clock)
        return open_queue

    def can_skip(self, queue: str) -> bool:
        """Return whether a wait need not look at a queue now."""
        return self.in_use.can_skip(queue, self._queues)

    def drop(self, queue: str) -> None:
        """Drop a queue that is deleted, or whose directories were removed or replaced."""
        open_queue = self._queues.pop(queue, None)
        if open_queue is not None:
            self._replaced.add(open_queue.dirs.aclose)

    def waiting(self, queue: OpenQueue) -> dict[str, int]:
        """Return the directories of a queue's messages, by their names in the records of blocked files."""
        return {".": queue.dirs.ready, "due": queue.dirs.due, "new": self.root.new, "delay": self.root.delay}

    async def clean_up_records(self, queue: str) -> None:
        """Remove the records of blocked files that are gone, at most once a minute."""
        open_queue = self.get(queue)
        if open_queue is not None:
            await open_queue.records.clean_up(self.waiting(open_queue), every=PRUNING)

    def is_paused(self, queue: str) -> bool:
        """Return whether a queue is paused."""
        return has_entry(queue, self.root.paused)

    def is_stored(self, queue: OpenQueue, message_id: str) -> bool:
        """Return whether a message is stored, in any state."""
        root, dirs = self.root, queue.dirs
        name = f"{queue.name}:{message_id}"
        # In the direction in which messages move, twice: one that moves on in the meantime is found in the second pass.
        places = [(message_id, dirs.ready), (name, root.delay), (name, root.new), (message_id, dirs.fail)] * 2
        return (
            queue.due.get(message_id) is not None
            or any(has_entry(*place) for place in places)
            or queue.due.get(message_id) is not None
        )

    @contextmanager
    def lock_lease(self, queue: str, message_id: str, token: int) -> Generator[tuple[int, LeaseState] | None]:
        """Lock a leased message. The block's value is a descriptor of its file and its state, or None for a lost lease.

        Raises:
            MessageLocked: Another process is moving the message.
            NotARegularFile: It is a link, a socket or something else.
        """
        name = f"{queue}:{message_id}"
        fd = lock_message(name, self.root.delay)
        if fd < 0:
            yield None
            return
        try:
            state = self.lease_states.read_valid(name, fd, token)
            yield None if state is None else (fd, state)
        finally:
            os.close(fd)

    def keeps_all_states(self, visibility: float) -> bool:
        """Return whether a lease of this length needs a stored state, also if it belongs to no process.

        It does unless it is equal to the fetch of an mq server, and this process is the one that ends and repeats it:
        otherwise the other processes would not count the try.
        """
        options = self.options
        return visibility != options.delay or not options.daemons or options.peers > 0

    # -- durability --------------------------------------------------------------------------------------------------

    async def sync_directories(self, *directories: int) -> None:
        """Sync renames. See `GroupCommit.directories`."""
        if self.group_commit is not None and directories:
            await self.group_commit.directories(frozenset(directories))

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def wake(self, queue: str) -> None:
        """Wake the calls that wait for a queue, because a message became ready in it."""
        for queues, event in tuple(self._waiting):
            if queue in queues:
                event.set()

    def wake_all(self) -> None:
        """Wake all calls that wait."""
        for _, event in tuple(self._waiting):
            event.set()

    @contextmanager
    def listen(self, queues: Sequence[str]) -> Generator[asyncio.Event]:
        """Yield an event that `wake` and changes in the directories set."""
        row = (frozenset(queues), asyncio.Event())
        self._waiting.add(row)
        try:
            yield row[1]
        finally:
            self._waiting.discard(row)

    def watch(self, queues: Sequence[str]) -> None:
        """Let changes in the directories of `queues` set the events of `listen`, as far as the kernel allows."""
        if self._watcher is None:
            self._watcher = Watcher(self.wake_all)
            for directory in (self.root.new, self.root.queues):
                self._watcher.add(directory)
        for queue in queues:
            open_queue = self.get(queue)
            if open_queue is not None and not open_queue.is_watched:
                open_queue.is_watched = True
                self._watcher.add(open_queue.dirs.ready)
                self._watcher.add(open_queue.dirs.due)

    # -- holder ------------------------------------------------------------------------------------------------------

    def holder(self) -> str:
        """Return the name of this process in its leases. Its liveness file is created at the first call.

        Leases of remote holders have no name: they end by time alone.
        """
        if self._has_remote_holders:
            return ""
        if self._liveness_file is None:
            holder = f"{os.getpid()}-{secrets.token_hex(6)}"
            self._liveness_file = LivenessFile(self.root.tmp, self.root.workers, holder)
        return self._liveness_file.holder

    async def aclose(self) -> None:
        """Close everything."""
        if self.group_commit is not None:
            await self.group_commit.aclose()
        if self._watcher is not None:
            self._watcher.close()
        if self._liveness_file is not None:
            self._liveness_file.close()
        await self._replaced.aclose()
        with self.extend_lock:
            self.closed = True
            for open_queue in self._queues.values():
                open_queue.dirs.close()
            self.root.close()
