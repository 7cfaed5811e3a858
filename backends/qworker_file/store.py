"""The root directory as one backend instance has it open, and what its queues share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence

from qworker.clock import Clock
from qworker.kit.directory.retention import PRUNING, prune
from qworker.kit.directory.root import most_leases, open_root, warn_of_limit
from qworker.kit.directory.watches import Inotify, Waiter
from qworker.kit.files import FileSystem, GroupCommit, boot_id
from qworker.message import SettleAction, Settlement
from qworker.names import is_queue_name
from qworker_file.holder import Holder
from qworker_file.layout import create_queue, is_queue, open_queue
from qworker_file.lease import FileLease
from qworker_file.names import reason_name
from qworker_file.open_queue import LocalQueue
from qworker_file.options import FileOptions
from qworker_file.publish import Publisher
from qworker_file.wait import Trigger

__all__ = ["Store"]

# Seconds between two rescans where inotify tells: then they cost most where they find least, in a directory that was once deep.
_RESCAN = 30.0


class Store:
    """An open root.

    Args:
        directory: its path; made if it is absent.
        clock: the store's clock.
        options: what the URL says.
        detached: leases end by time alone.

    Raises:
        OSError: it cannot be opened.
    """

    # Seconds between two looks at whether an absent queue was made.
    absent_pause = 1.0

    def __init__(self, directory: str, clock: Clock, options: FileOptions, *, detached: bool) -> None:
        # No lease can be taken without it: better no store than a worker that waits for ever.
        boot_id()
        self.clock = clock
        self.options = options
        self.root = open_root(directory, options.dir_mode)
        self._system = FileSystem(self.root)
        self._group = GroupCommit(self.root, self._system) if options.sync else None
        self.most_held = most_leases()
        self.publisher = Publisher(clock, local=options.local_time, commit=self._group)
        self.holder = Holder(detached=detached)
        self._inotify = Inotify()
        self._rescan = _RESCAN if options.poll_interval is None else options.poll_interval
        self._queues: dict[str, LocalQueue] = {}
        # Deleted queues of which leases are held: their descriptors stay, so that an end finds nothing.
        self._deleted: list[LocalQueue] = []
        self._waiters: set[Waiter] = set()
        # Those that this store listens to, by queue.
        self._triggers: dict[str, Trigger] = {}
        # Whether the loop listens to inotify.
        self._hearing = False
        self._pruned_at: dict[str, float] = {}
        self.settling = asyncio.Lock()
        # Whether somebody waits for room.
        self._cramped = False
        # Whether the log has the limit of leases.
        self._has_warned = False

    async def settled(self) -> None:
        """Wait until the settlements that were asked for are made, though perhaps not yet on the disk."""
        if self.settling.locked():
            async with self.settling:
                pass

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

    # -- queues ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every queue, sorted."""
        return sorted(name for name in os.listdir(self.root) if is_queue_name(name) and is_queue(self.root, name))

    def known(self, name: str) -> LocalQueue | None:
        """A queue that is open, or was until somebody deleted it."""
        return self._queues.get(name)

    def made(self, name: str) -> LocalQueue:
        """An open queue, made if there is none.

        Raises:
            OSError: it cannot be made or opened.
        """
        local = self.queue(name)
        while local is None:
            create_queue(self.root, name, self.options.dir_mode, durable=self.options.sync)
            local = self.queue(name)
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
        files = open_queue(self.root, name)
        if files is None:
            return None
        local = self._queues[name] = LocalQueue(
            files,
            self.clock,
            self.holder,
            self._inotify,
            local_disk=self._system.is_local,
            local_time=self.options.local_time,
            rescan=self._rescan,
        )
        return local

    def drop_deleted(self, name: str) -> None:
        """Forget a queue that was deleted; its leases are found lost when they end."""
        local = self._queues.get(name)
        if local is not None and not local.files.exists:
            del self._queues[name]
            # Its descriptors are about to be closed.
            self._release(name)
            self._wake(name)
            local.close_deleted()
            self._deleted.append(local)

    # -- durability --------------------------------------------------------------------------------------------------

    async def commit(self, directories: Collection[int], files: Sequence[int] = ()) -> None:
        """Put changes on the disk, if this store does.

        Raises:
            OSError: the outcome is unknown.
        """
        if self._group is not None and (directories or files):
            await self._group.both(files, directories)

    async def prune(self, local: LocalQueue) -> None:
        """Remove what is kept too long, now and then.

        Raises:
            OSError: it cannot be removed.
        """
        name = local.files.name
        now = self.clock.monotonic()
        if now - self._pruned_at.get(name, float("-inf")) < PRUNING:
            return
        self._pruned_at[name] = now
        files, options, moment = local.files, self.options, self.clock.time()
        if options.keep_done.limits:
            await prune(files.done, options.keep_done, moment, finished_at=_finished_at)
        if options.keep_failed.limits:
            await prune(files.fail, options.keep_failed, moment, finished_at=_finished_at, reason_of=reason_name)

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def ended(self, settlement: Settlement) -> None:
        """A lease is over: what became ready again is known, and told."""
        lease = settlement.lease
        assert isinstance(lease, FileLease)
        local = self._queues.get(lease.message.queue)
        if local is None or local.files is not lease.files:
            return
        if local.own.get(lease.item) is lease:
            del local.own[lease.item]
            if self._cramped:
                self._make_room()
        if lease.ended is settlement and settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}:
            left = [] if lease.left is None else [lease.left]
            local.added(left if lease.left_ready else [], [] if lease.left_ready else left, returned=True)
            self.notify(local)

    def _make_room(self) -> None:
        self._cramped = False
        for waiter in self._waiters:
            waiter.wake()

    def notify(self, local: LocalQueue) -> None:
        """A queue may have work: wake our own waiters, or else one idle worker."""
        self._wake(local.files.name)
        local.files.pull_trigger()

    def _wake(self, name: str) -> bool:
        """End the waits for a queue; whether there were any."""
        found = [waiter for waiter in self._waiters if name in waiter.queues]
        for waiter in found:
            waiter.wake()
        return bool(found)

    def add_waiter(self, waiter: Waiter) -> None:
        """Begin to listen for a `wait`."""
        if not self._hearing and self._inotify.fd >= 0:
            asyncio.get_running_loop().add_reader(self._inotify.fd, self._heard)
            self._hearing = True
        self._waiters.add(waiter)

    def listen(self, local: LocalQueue) -> None:
        """Listen to a queue's trigger, unless another idle worker does. Goes on after the wait, for most follow one another."""
        name = local.files.name
        if name not in self._triggers:
            trigger = Trigger.acquire(local.files, self._pulled)
            if trigger is not None:
                self._triggers[name] = trigger

    def be_busy(self) -> None:
        """This worker leases without waiting: the triggers are for one that is idle."""
        for name in tuple(self._triggers):
            self._release(name)

    def _release(self, name: str) -> None:
        trigger = self._triggers.pop(name, None)
        if trigger is not None:
            trigger.release()

    def _pulled(self, trigger: Trigger) -> None:
        if self._wake(trigger.queue):
            trigger.drain()
        else:
            # Nobody waits here: what was written is for whoever listens next.
            self._release(trigger.queue)

    def remove_waiter(self, waiter: Waiter) -> None:
        """The `wait` is over."""
        waiter.close()
        self._waiters.discard(waiter)

    def _stop_hearing(self) -> None:
        if self._hearing:
            self._hearing = False
            asyncio.get_running_loop().remove_reader(self._inotify.fd)

    def _heard(self) -> None:
        if not self._waiters:
            # Most waits follow one another: the reader is kept between them, and taken away when something comes while nobody
            # waits. What it would have told is read by the next lease.
            self._stop_hearing()
            return
        self._inotify.drain()
        for waiter in self._waiters:
            # The listener of the trigger goes first, the others look a little later.
            if waiter.queues.isdisjoint(self._triggers):
                waiter.wake_later()
            else:
                waiter.wake()

    async def aclose(self) -> None:
        """Close everything, after the commits that are under way."""
        for waiter in tuple(self._waiters):
            waiter.wake()
            self.remove_waiter(waiter)
        self.be_busy()
        self._stop_hearing()
        if self._group is not None:
            await self._group.aclose()
        for local in (*self._queues.values(), *self._deleted):
            local.close()
        self._inotify.close()
        os.close(self.root)


def _finished_at(status: os.stat_result) -> float:
    return status.st_mtime
