"""A root directory that one backend instance has open: its queues, commits, wake-ups, and the limit of leases."""

from __future__ import annotations

import abc
import asyncio
import os
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from qworker.clock import Clock
from qworker.kit.directory.closing import CLOSE_AFTER, log_replaced
from qworker.kit.directory.empty_directories import EmptyDirectories
from qworker.kit.directory.followed_queue import FollowedQueue
from qworker.kit.directory.in_use import LEAST_OPEN, most_open
from qworker.kit.directory.place import Place
from qworker.kit.directory.queue_files import list_queue_names
from qworker.kit.directory.root import most_leases, open_root, warn_of_limit
from qworker.kit.directory.waiter import Waiter
from qworker.kit.file_system import FileSystem
from qworker.kit.group_commit import GroupCommit
from qworker.kit.inotify import Inotify

__all__ = ["DirectoryStore"]

# Seconds between two checks whether a queue was removed or replaced.
_CHECK_EVERY = 1.0
# Seconds after its last use until a queue is closed, and between two checks.
_UNUSED, _TIDY_EVERY = 60.0, 5.0
# Seconds between two complete reapings of a queue that is not open.
_REAP_ASLEEP = 600.0

Queue = TypeVar("Queue", bound=FollowedQueue[Any, Any])


class DirectoryStore(abc.ABC, Generic[Queue]):
    """An open root.

    Args:
        directory: Its path. It is created if it does not exist.
        clock: The store's clock.
        mode: The mode of a root that is created.
        sync: Whether changes are written to the disk.
        shared: Whether other hosts use the directory; None: as the type of its file system says.

    Raises:
        OSError: It cannot be opened.
    """

    # The descriptors that an open queue takes.
    descriptors: ClassVar[int]

    def __init__(self, directory: str, clock: Clock, *, mode: int, sync: bool, shared: bool | None = None) -> None:
        self.clock = clock
        self.directory = directory
        self.root = open_root(directory, mode)
        self.place = Place(directory, self.root)
        self.system = FileSystem(self.root)
        # True if no other host uses the directory.
        self.is_local = self.system.is_local if shared is None else not shared
        # None: what is stored survives the process, but not a power failure.
        self.group_commit = GroupCommit(self.root, self.system) if sync else None
        self.most_held = most_leases()
        self.settling = asyncio.Lock()
        self._inotify = Inotify()
        # Whether the loop reads inotify.
        self._is_reading = False
        self._queues: dict[str, Queue] = {}
        # Queues that were closed because nobody used them.
        self._away: set[str] = set()
        self._most_open = most_open(self.descriptors)
        self._empty = EmptyDirectories(self.root)
        # Monotonic seconds of the last complete reaping of each queue that is not open, and of the last tidying.
        self._reaped: dict[str, float] = {}
        self._tidied_at = time.monotonic()
        # Deleted queues. Their descriptors stay open for a while, because calls that run now use them, and longer if
        # this instance has leases of them, so that ending a lease finds nothing.
        self._deleted: list[Queue] = []
        # The names of the queues that this instance deletes now.
        self.being_deleted: set[str] = set()
        self._waiters: set[Waiter] = set()
        # True while a wait waits for the end of a lease.
        self._waits_for_room = False
        # True once the limit of leases was logged.
        self._has_warned = False

    # -- the limit of leases -----------------------------------------------------------------------------------------

    def room(self) -> int:
        """Return how many more leases may hold a file open. If there is no room, log that once."""
        held = [len(queue.own) for queue in self._queues.values() if queue.own]
        # A queue with leases stays open. The first ones are part of what is kept for other uses.
        pinned = max(0, len(held) - LEAST_OPEN) * self.descriptors
        room = max(0, self.most_held - sum(held) - pinned)
        if room == 0 and not self._has_warned:
            self._has_warned = True
            warn_of_limit(self.most_held)
        return room

    def is_full(self) -> bool:
        """Return whether there is no room for a lease. If there is none, the end of a lease wakes the waiters."""
        self._waits_for_room = self.room() <= 0
        return self._waits_for_room

    def on_room(self) -> None:
        """Wake the waiters that wait for the end of a lease."""
        if self._waits_for_room:
            self._waits_for_room = False
            for waiter in self._waiters:
                waiter.wake()

    # -- directories that people remove or replace -------------------------------------------------------------------

    @property
    def has_leases(self) -> bool:
        """Whether this instance has leases."""
        return any(queue.own for queue in (*self._queues.values(), *self._deleted))

    def wake_all(self) -> None:
        """End all waits."""
        for waiter in self._waiters:
            waiter.wake()

    # -- queues ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all queues, sorted."""
        return list_queue_names(self.root, self._has_queue)

    @abc.abstractmethod
    def _has_queue(self, name: str) -> bool:
        """Return whether a queue exists."""

    @abc.abstractmethod
    def _open_queue(self, name: str) -> Queue | None:
        """Open a queue, or return None if it does not exist."""

    @abc.abstractmethod
    def get_or_create(self, name: str) -> Queue:
        """Return an open queue, which is created if it does not exist.

        Raises:
            OSError: It cannot be created or opened.
        """

    def get_open(self, name: str) -> Queue | None:
        """Return a queue if it is open. Another process may have deleted it within the last second."""
        queue = self._queues.get(name)
        if queue is not None and time.monotonic() - queue.checked_at >= _CHECK_EVERY:
            return self.get(name)
        return queue

    def get(self, name: str) -> Queue | None:
        """Return an open queue, or None if it does not exist.

        Raises:
            OSError: It cannot be opened.
        """
        queue = self._queues.get(name)
        if queue is not None:
            if self._is_in_place(queue):
                return queue
            self.drop_deleted(name)
        if len(self._queues) >= self._most_open:
            self._close_oldest()
        queue = self._open_queue(name)
        if queue is not None:
            self._queues[name] = queue
            self._away.discard(name)
        return queue

    # -- queues that nobody uses -------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def parts_of_ready(self) -> Mapping[str, str]:
        """The directories of a queue that contain ready and delayed messages, each with how their names begin."""

    @property
    @abc.abstractmethod
    def parts_to_reap(self) -> Mapping[str, str]:
        """The directories of a queue with what another process may have left to reap, and how its names begin."""

    def _is_asleep(self, name: str) -> bool:
        """Return whether a queue is not open, and should not be opened without a reason."""
        if name in self._queues or not self.is_local:
            return False
        return name in self._away or len(self._queues) >= self._most_open // 2

    def has_nothing_to_lease(self, name: str) -> bool:
        """Return whether a queue need not be opened for a lease, because it has neither ready nor delayed messages."""
        return self._is_asleep(name) and self._empty.are_empty(name, self.parts_of_ready)

    def has_nothing_to_reap(self, name: str) -> bool:
        """Return whether a queue need not be opened to be reaped. From time to time it is, to prune it."""
        if not self._is_asleep(name) or not self._empty.are_empty(name, self.parts_to_reap):
            return False
        now = time.monotonic()
        # Not all at once.
        if now - self._reaped.setdefault(name, now - random.random() * _REAP_ASLEEP) < _REAP_ASLEEP:
            return True
        self._reaped[name] = now
        return False

    def close_unused(self) -> None:
        """Close the queues that no call has used for some time. It is checked periodically."""
        now = time.monotonic()
        if now - self._tidied_at >= _TIDY_EVERY:
            self._tidied_at = now
            for queue in self._closable():
                if now - queue.files.used_at >= _UNUSED:
                    self._put_away(queue)

    def _close_oldest(self) -> None:
        """Make room for other queues. Those that are in use stay open."""
        oldest = sorted(self._closable(), key=lambda queue: queue.files.used_at)
        for queue in oldest[: len(self._queues) - self._most_open + 1 + self._most_open // 8]:
            self._put_away(queue)

    def _closable(self) -> list[Queue]:
        # A wait for more queues than can be open checks them in turns.
        few = [waiter.queues for waiter in self._waiters if len(waiter.queues) <= self._most_open // 2]
        waited: frozenset[str] = frozenset[str]().union(*few)
        return [
            queue
            for name, queue in self._queues.items()
            if not queue.files.users and not queue.is_needed and name not in waited
        ]

    def _put_away(self, queue: Queue) -> None:
        name = queue.files.name
        self._stop_listening(queue)
        del self._queues[name]
        self._away.add(name)
        queue.close()

    # -- queues that are open ----------------------------------------------------------------------------------------

    def _is_in_place(self, queue: Queue) -> bool:
        now = time.monotonic()
        if now - queue.checked_at < _CHECK_EVERY:
            return bool(queue.files.exists)
        queue.checked_at = now
        return bool(queue.files.is_in_place(self.root))

    def drop_deleted(self, name: str) -> None:
        """Close a queue that was deleted, or whose directories were removed or replaced.

        Leases in a directory that is gone are found lost when they end.
        """
        queue = self._queues.get(name)
        if queue is not None and not queue.files.is_in_place(self.root):
            if queue.files.exists and name not in self.being_deleted:
                log_replaced(os.path.join(self.directory, name))
            del self._queues[name]
            # Its descriptors are about to be closed.
            self._stop_listening(queue)
            self.wake_waiters(name)
            queue.close_deleted()
            self._deleted.append(queue)
            asyncio.get_running_loop().call_later(CLOSE_AFTER, self._close_deleted, queue)

    def _close_deleted(self, queue: Queue) -> None:
        if queue in self._deleted and not queue.own:
            self._deleted.remove(queue)
            queue.close()

    # -- durability --------------------------------------------------------------------------------------------------

    async def commit(self, directories: Collection[int], files: Sequence[int] = ()) -> None:
        """Write changes to the disk, if this store does so.

        Raises:
            OSError: The outcome is unknown.
        """
        if self.group_commit is not None and (directories or files):
            await self.group_commit.both(files, directories)

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def listen(self, queue: Queue) -> None:
        """Listen to a queue's trigger."""

    @abc.abstractmethod
    def _stop_listening(self, queue: Queue) -> None:
        """Stop listening to a queue's trigger."""

    @abc.abstractmethod
    def notify(self, queue: Queue) -> None:
        """Wake the waiters of a queue that may have work, or other workers."""

    def wake_waiters(self, name: str) -> bool:
        """End the waits for a queue and return whether there were any."""
        waiters = [waiter for waiter in self._waiters if name in waiter.queues]
        for waiter in waiters:
            waiter.wake()
        return bool(waiters)

    def add_waiter(self, waiter: Waiter) -> None:
        """Begin to listen for a wait."""
        if not self._is_reading and self._inotify.fd >= 0:
            asyncio.get_running_loop().add_reader(self._inotify.fd, self._on_inotify)
            self._is_reading = True
        self._waiters.add(waiter)

    def remove_waiter(self, waiter: Waiter) -> None:
        """Stop listening for a wait. Idempotent."""
        waiter.close()
        self._waiters.discard(waiter)

    def _on_inotify(self) -> None:
        if not self._waiters:
            # Most waits follow one another, so the reader is kept between them. It is removed when something arrives
            # while there is no wait. The next lease reads what it would have reported.
            self._stop_reading()
            return
        self._inotify.drain()
        for waiter in self._waiters:
            self._wake_by_inotify(waiter)

    def _wake_by_inotify(self, waiter: Waiter) -> None:
        waiter.wake()

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._inotify.fd)

    async def aclose(self) -> None:
        """Close everything, after the running commits."""
        for waiter in tuple(self._waiters):
            waiter.wake()
            self.remove_waiter(waiter)
        for queue in self._queues.values():
            self._stop_listening(queue)
        self._stop_reading()
        if self.group_commit is not None:
            await self.group_commit.aclose()
        for queue in (*self._queues.values(), *self._deleted):
            queue.close()
        self._inotify.close()
        os.close(self.root)
