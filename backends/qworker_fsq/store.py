"""The root directory as one backend instance has it open, and what its queues share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

from qworker.clock import Clock
from qworker.errors import BackendError
from qworker.kit.directory.retention import PRUNING, prune
from qworker.kit.directory.root import most_leases, open_root, warn_of_limit
from qworker.kit.directory.watches import Inotify
from qworker.kit.files import FileSystem, GroupCommit
from qworker.kit.retention import Retention
from qworker.names import is_queue_name
from qworker_fsq.layout import QueueExists, install, install_host, is_queue, open_queue
from qworker_fsq.lease import reason_name
from qworker_fsq.open_queue import MOST_LINGERING, LocalQueue
from qworker_fsq.options import FsqOptions
from qworker_fsq.publish import Publisher

__all__ = ["ABSENT_PAUSE", "Store"]

# Seconds between two listings that nothing asked for, where inotify tells and where it does not.
_RESCAN = (30.0, 1.0)
# Seconds between two looks at whether an absent queue was made.
ABSENT_PAUSE = 1.0
# A queue that others delete and make all the time is made so many times.
_ATTEMPTS = 10
# How long a file may stand in tmp/ unfinished.
_UNFINISHED = Retention(age=36 * 3600.0)


class Store:
    """An open root.

    Args:
        directory: its path; made if it is absent.
        clock: the store's clock.
        options: what the URL says.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, directory: str, clock: Clock, options: FsqOptions) -> None:
        self.clock = clock
        self.options = options
        self.root = open_root(directory, 0o775)
        self.system = FileSystem(self.root)
        self._group = GroupCommit(self.root, self.system) if options.sync else None
        self.most_held = most_leases()
        self.publisher = Publisher(clock, options.constants, self._group)
        self.limits = options.limits
        self.settling = asyncio.Lock()
        self._inotify = Inotify()
        self._queues: dict[str, LocalQueue] = {}
        self._waiters: dict[asyncio.Event, frozenset[str]] = {}
        self._listening: set[int] = set()
        # Whether somebody waits for room.
        self._cramped = False
        # Whether the log has the limit of leases.
        self._has_warned = False

    def room(self) -> int:
        """How many more leases may hold a file open. Logs it once when none may."""
        room = max(0, self.most_held - sum(len(local.own) for local in self._queues.values()))
        if room == 0 and not self._has_warned:
            self._has_warned = True
            warn_of_limit(self.most_held)
        return room

    def is_full(self) -> bool:
        """Whether there is no room for a lease; whoever waits is woken when there is."""
        self._cramped = self.room() <= 0
        return self._cramped

    def make_room(self) -> None:
        """A lease is over: wake whoever waits for its end."""
        if self._cramped:
            self._cramped = False
            for event in self._waiters:
                event.set()

    # -- queues ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every queue, sorted; with a host, those that have a sub-queue for it."""
        host, constants = self.options.host, self.options.constants
        names = (name for name in os.listdir(self.root) if is_queue_name(name))
        return sorted(name for name in names if is_queue(self.root, name, host, constants))

    def made(self, name: str) -> LocalQueue:
        """An open queue, made if there is none.

        Raises:
            OSError: it cannot be made or opened.
            BackendError: a part of it is missing.
        """
        options = self.options
        local = self.queue(name)
        for _ in range(_ATTEMPTS):
            if local is not None:
                return local
            try:
                if not is_queue(self.root, name, None, options.constants):
                    install(self.root, name, options.constants, durable=options.sync)
                if options.host is not None:
                    install_host(self.root, name, options.constants, (options.host,))
            except QueueExists:
                # Somebody else was faster; or what is there is no queue, and then this raises.
                if not is_queue(self.root, name, options.host, options.constants):
                    raise
            local = self.queue(name)
        if local is None:
            parts = " ".join(
                (options.constants.tmp, options.constants.queue, options.constants.done, options.constants.fail)
            )
            raise BackendError(
                f"the queue {name!r} is incomplete: create its missing directory ({parts}), or delete the queue"
            )
        return local

    def queue(self, name: str) -> LocalQueue | None:
        """An open queue; None when there is none.

        Raises:
            OSError: it cannot be opened.
        """
        local = self._queues.get(name)
        if local is not None:
            if local.files.exists:
                return local
            self.drop_deleted(name)
        files = open_queue(self.root, name, self.options.constants, self.options.host)
        if files is None:
            return None
        local = self._queues[name] = LocalQueue(
            files,
            self.clock,
            self.limits,
            self._inotify,
            local_disk=self.system.is_local,
            rescan=_RESCAN,
            most_lingering=min(MOST_LINGERING, self.most_held // 4),
        )
        return local

    def drop_deleted(self, name: str) -> None:
        """Forget a queue that was deleted; its leases are found lost when they end."""
        local = self._queues.get(name)
        if local is not None and not local.files.exists:
            del self._queues[name]
            self._stop_listening(local)
            local.close()

    def known(self, name: str) -> LocalQueue | None:
        """A queue that is open already; from any thread."""
        return self._queues.get(name)

    # -- durability --------------------------------------------------------------------------------------------------

    async def commit(self, directories: Collection[int]) -> None:
        """Put changes on the disk, if this store does.

        Raises:
            OSError: the outcome is unknown.
        """
        if self._group is not None and directories:
            await self._group.directories(directories)

    async def prune(self, local: LocalQueue) -> None:
        """Remove, now and then, what is kept too long, and what was never finished.

        Raises:
            OSError: it cannot be removed.
        """
        now = self.clock.monotonic()
        if now - local.pruned_at < PRUNING:
            return
        local.pruned_at = now
        files, options, moment = local.files, self.options, self.clock.time()
        await prune(files.tmp, _UNFINISHED, moment, finished_at=_changed_at, hidden=True)
        if options.keep_done.limits:
            await prune(files.done, options.keep_done, moment, finished_at=_changed_at)
        if options.keep_failed.limits:
            await prune(files.fail, options.keep_failed, moment, finished_at=_changed_at, reason_of=reason_name)

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def notify(self, local: LocalQueue, *, trigger: bool = False) -> None:
        """A queue may have work: wake our own waiters, and whoever listens on its trigger."""
        for event, queues in self._waiters.items():
            if local.files.name in queues:
                event.set()
        if trigger:
            local.files.pull_trigger()

    def add_waiter(self, event: asyncio.Event, queues: frozenset[str]) -> None:
        """Begin to listen for a `wait`."""
        if not self._waiters and self._inotify.fd >= 0:
            asyncio.get_running_loop().add_reader(self._inotify.fd, self._heard)
        self._waiters[event] = queues

    def listen(self, local: LocalQueue) -> None:
        """Listen to a queue's trigger, if it has one, while anybody waits."""
        if local.trigger >= 0 and local.trigger not in self._listening:
            self._listening.add(local.trigger)
            asyncio.get_running_loop().add_reader(local.trigger, self._pulled, local)

    def remove_waiter(self, event: asyncio.Event) -> None:
        """The `wait` is over. With the last one, triggers are left to others."""
        del self._waiters[event]
        if not self._waiters:
            loop = asyncio.get_running_loop()
            for fd in self._listening:
                loop.remove_reader(fd)
            self._listening.clear()
            if self._inotify.fd >= 0:
                loop.remove_reader(self._inotify.fd)

    def _stop_listening(self, local: LocalQueue) -> None:
        if local.trigger in self._listening:
            self._listening.discard(local.trigger)
            asyncio.get_running_loop().remove_reader(local.trigger)
        for event, queues in self._waiters.items():
            if local.files.name in queues:
                event.set()

    def _pulled(self, local: LocalQueue) -> None:
        try:
            # As much as a FIFO holds: one wake-up does for all of it.
            os.read(local.trigger, 1 << 16)
        except BlockingIOError:
            # Another listener read it.
            return
        self.notify(local)

    def _heard(self) -> None:
        self._inotify.drain()
        for event in self._waiters:
            event.set()

    async def aclose(self) -> None:
        """Close everything, after the commits that are under way."""
        for event in self._waiters:
            event.set()
        if self._group is not None:
            await self._group.aclose()
        for local in self._queues.values():
            self._stop_listening(local)
            local.close()
        self._queues.clear()
        if self._waiters and self._inotify.fd >= 0:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
        self._inotify.close()
        os.close(self.root)


def _changed_at(status: os.stat_result) -> float:
    """When a file was changed last: it was renamed when its item finished, and its mtime is its producer's."""
    return status.st_ctime
