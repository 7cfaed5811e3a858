"""The root directory that one backend instance has open, and the data that its queues share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar

from qworker.clock import Clock
from qworker.kit.directory.retention import prune
from qworker.kit.directory.store import DirectoryStore
from qworker.kit.directory.waiter import Waiter
from qworker.kit.files import check_exchange, files_at_once
from qworker.kit.linux import boot_id
from qworker.message import Lease, ReapResult, SettleAction, Settlement
from qworker.names import check_existing_queue, check_queue
from qworker_file.cell_hub import CellHub
from qworker_file.cell_listing import CellListing
from qworker_file.holder import Holder
from qworker_file.layout import QueueDir, create_queue, has_queue, open_queue
from qworker_file.lease import ExpiryClock, FileLease
from qworker_file.loads import LOAD
from qworker_file.names import reason_name
from qworker_file.open_queue import OpenQueue
from qworker_file.options import FileOptions
from qworker_file.publish_plan import Planner
from qworker_file.reap import ObservedLease
from qworker_file.wait import Trigger

__all__ = ["Store"]

# Seconds between two listings if inotify reports changes. In a directory that was once deep, a listing costs most and
# finds least.
_RESCAN = 30.0


class Store(DirectoryStore[OpenQueue]):
    """An open root.

    Args:
        directory: Its path. It is created if it does not exist.
        clock: The store's clock.
        options: The options of the URL.
        detached: Whether leases end by time alone.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, directory: str, clock: Clock, options: FileOptions, *, detached: bool) -> None:
        # Without the boot id no lease can be taken: no store is better than a worker that waits for ever.
        boot_id()
        super().__init__(directory, clock, mode=options.dir_mode, sync=options.sync, shared=options.shared)
        self.options = options
        self.planner = Planner(clock, local_time=options.local_time)
        self.files_at_once = files_at_once()
        self.holder = Holder(detached=detached)
        self.expiries = ExpiryClock()
        self.cell_hub = CellHub()
        # The name of the file of one cell of a group, by queue and group: where a close looks first.
        self.live_cells: dict[tuple[str, str], str] = {}
        # What is left of the listings of cells, by queue and group.
        self.cell_listings: dict[tuple[str, str], CellListing] = {}
        # Whether two files of the root can exchange their names; False until that was checked.
        self._can_exchange = False
        # The triggers to which this store listens, by queue.
        self._triggers: dict[str, Trigger] = {}
        # The leases of other processes that were observed in queues which are not open now.
        self._observed: dict[str, dict[str, ObservedLease]] = {}

    # -- queues ------------------------------------------------------------------------------------------------------

    descriptors: ClassVar[int] = 11

    @property
    def parts_of_ready(self) -> Mapping[str, str]:
        """`queue`, `delay` and the sealed loads."""
        return {"queue": "", "delay": "", ".": LOAD}

    @property
    def parts_to_reap(self) -> Mapping[str, str]:
        """`lease`, and the sealed loads that must be moved. What is due in `delay` is leased from there."""
        return {"lease": "", ".": LOAD} if self.options.fsq else {"lease": ""}

    def _has_queue(self, name: str) -> bool:
        return has_queue(self.root, name)

    def _open_queue(self, name: str) -> OpenQueue | None:
        files = open_queue(self.root, name)
        if files is None:
            return None
        files.max_body = self.options.max_body
        files.root = lambda: self.root
        poll_interval = self.options.poll_interval
        queue = OpenQueue(
            files,
            self.clock,
            self.holder,
            self._inotify,
            local_disk=self.is_local,
            local_time=self.options.local_time,
            rescan=_RESCAN if poll_interval is None else poll_interval,
        )
        queue.observed = self._observed.pop(name, {})
        return queue

    def _put_away(self, queue: OpenQueue) -> None:
        if queue.observed:
            # A lease expires when it has been observed for its whole length.
            self._observed[queue.files.name] = queue.observed
        super()._put_away(queue)

    def get_or_create(self, name: str) -> OpenQueue:
        """Return an open queue, which is created if it does not exist.

        Raises:
            OSError: It cannot be created or opened.
        """
        queue = self.get(name)
        while queue is None:
            create_queue(self.root, check_queue(name), self.options.dir_mode, durable=self.options.sync)
            queue = self.get(name)
        return queue

    def open_files(self, name: str) -> QueueDir | None:
        """Return the directories of a queue, or None if it does not exist.

        Raises:
            OSError: It cannot be opened.
        """
        queue = self.get(name)
        return None if queue is None else queue.files

    def check_exchange(self, files: QueueDir) -> None:
        """Check once that two files can exchange their names.

        Raises:
            OSError: The file system does not support it.
        """
        if not self._can_exchange:
            check_exchange(files.tmp)
            self._can_exchange = True

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, name: str, limit: int, visibility: float, *, notified: bool) -> list[Lease]:
        """Claim messages of a queue.

        Args:
            name: The queue's name.
            limit: The largest number of messages.
            visibility: Seconds.
            notified: Whether a wait for this queue has just finished because of a change. Then it is not checked again
                that the queue exists and is not paused.

        Raises:
            OSError: The store failed, and nothing is held.
        """
        queue = self._queues.get(name) if notified else None
        if queue is None:
            if self.has_nothing_to_lease(check_existing_queue(name)):
                return []
            notified, queue = False, self.get(name)
        if queue is None:
            return []
        with queue.files:
            # This waits for earlier settlements, whose commit may still run: after a crash none of them is repeated
            # with new leases.
            await self.wait_for_settlements()
            leases: Sequence[Lease] = await queue.lease(
                min(limit, self.room()), visibility, self.expiries, notified=notified
            )
        if len(leases) >= limit:
            self.release_triggers()
        return list(leases)

    def mark_clocks(self, leases: Sequence[Lease]) -> None:
        """Show the hosts of a shared file system this host's clock, after an extension. From any thread.

        Raises:
            OSError: The store failed.
        """
        if not self.is_local:
            for name in {lease.message.queue for lease in leases}:
                queue = self._queues.get(name)
                if queue is not None:
                    queue.mark_clock()

    async def wait_for_settlements(self) -> None:
        """Wait until the earlier settlements are made, though perhaps not yet on the disk."""
        if self.settling.locked():
            async with self.settling:
                pass

    def on_lease_end(self, settlement: Settlement) -> None:
        """Offer messages that became ready again."""
        lease = settlement.lease
        assert isinstance(lease, FileLease)
        queue = self._queues.get(lease.message.queue)
        if queue is None or queue.files is not lease.files:
            return
        if queue.own.get(lease.item) is lease:
            del queue.own[lease.item]
            if self._waits_for_room:
                self.on_room()
        if lease.ended is settlement and settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}:
            released = [] if lease.released_as is None else [lease.released_as]
            queue.added(released if lease.is_in_queue else [], [] if lease.is_in_queue else released, returned=True)
            self.notify(queue)

    async def reap(self, queue: OpenQueue) -> ReapResult:
        """Make expired and due messages ready, and find the lost leases.

        Raises:
            OSError: The store failed. Messages that were moved stay moved.
        """
        # It is no use of the queue that keeps it open.
        queue.files.users += 1
        try:
            due = queue.count_due()
            returned = await queue.reap()
            if queue.is_pruning_due():
                await self._prune(queue)
        finally:
            queue.files.users -= 1
        if returned or due:
            self.notify(queue)
        return ReapResult(returned + due, queue.take_losses(), self.clock.time())

    async def _prune(self, queue: OpenQueue) -> None:
        files, options, now = queue.files, self.options, self.clock.time()
        if options.keep_done.limits:
            stuck = queue.stuck_in("done")
            await prune(files.done, options.keep_done, now, stuck=stuck, finished_at=_finished_at)
        if options.keep_failed.limits:
            stuck = queue.stuck_in("fail")
            keep = options.keep_failed
            await prune(files.fail, keep, now, stuck=stuck, finished_at=_finished_at, reason_of=reason_name)

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def notify(self, queue: OpenQueue) -> None:
        """Wake the waiters of this store, or else one idle worker."""
        self.wake_waiters(queue.files.name)
        queue.files.pull_trigger()

    def listen(self, queue: OpenQueue) -> None:
        """Listen to a queue's trigger, unless another idle worker does.

        This continues after the wait, because most waits follow one another.
        """
        name = queue.files.name
        if name not in self._triggers:
            trigger = Trigger.acquire(queue.files, self._on_trigger)
            if trigger is not None:
                self._triggers[name] = trigger

    def release_triggers(self) -> None:
        """Leave the triggers to idle workers, because this worker leases without waiting."""
        for name in tuple(self._triggers):
            self._release(name)

    def _stop_listening(self, queue: OpenQueue) -> None:
        self._release(queue.files.name)

    def _release(self, name: str) -> None:
        trigger = self._triggers.pop(name, None)
        if trigger is not None:
            trigger.release()

    async def aclose(self) -> None:
        """Close everything, after the running commits."""
        self.cell_hub.close()
        await super().aclose()

    def _on_trigger(self, trigger: Trigger) -> None:
        if self.wake_waiters(trigger.queue):
            trigger.drain()
        else:
            # There is no wait here, so the written bytes are for the worker that listens next.
            self._release(trigger.queue)

    def _wake_by_inotify(self, waiter: Waiter) -> None:
        # The listener of the trigger goes first, and the others check a little later.
        if waiter.queues.isdisjoint(self._triggers):
            waiter.wake_later()
        else:
            waiter.wake()


def _finished_at(status: os.stat_result) -> float:
    return status.st_mtime
