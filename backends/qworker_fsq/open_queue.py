"""One queue that one backend instance has open: its directories, its window, its own leases.

Nothing reports that a lock was released, so an item that another process works on is tried again after a pause of at
most a second.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import os
import time
from collections import deque

import msgspec

from qworker.clock import Clock
from qworker.kit.body_slices import ON_LOOP, OwnDescriptor, read_in_slices
from qworker.kit.directory.blocked import BlockedFiles, BlockedRecords, is_about_one_file
from qworker.kit.directory.followed_queue import FollowedQueue
from qworker.kit.directory.window import Window
from qworker.kit.files import has_entry
from qworker.kit.inotify import Inotify, ignore
from qworker_fsq.environment import ItemLimits
from qworker_fsq.layout import QueueDir
from qworker_fsq.lease import LEAST_LINGER, LINGER, ClaimedItem, FsqLease, SkipReason, claim, make_message

__all__ = ["MOST_LINGERING", "OpenQueue"]

_TURN = 0.002
# Seconds between two listings if inotify reports changes.
_RESCAN = 30.0
# Finished items that stay locked at most. Each takes a descriptor.
MOST_LINGERING = 2000


class _Tokens:
    """Numbers that rise with every delivery, whichever worker has the lock: the time, or one more than the last."""

    last = 0

    @classmethod
    def next(cls, now: float) -> int:
        cls.last = max(int(now * 1e9), cls.last + 1)
        return cls.last


class OpenQueue(FollowedQueue[QueueDir, FsqLease]):
    """An open queue. Its own leases are kept by their names in queue/.

    Args:
        files: The open directories. This object closes them.
        clock: The store's clock.
        limits: The limits after which an item has failed.
        inotify: Reports changes.
        local_disk: True if no other machine uses the directory.
        most_lingering: How many finished items may stay open for a moment.
    """

    def __init__(
        self,
        files: QueueDir,
        clock: Clock,
        limits: ItemLimits,
        inotify: Inotify,
        *,
        local_disk: bool,
        most_lingering: int,
    ) -> None:
        # Names that are delayed: (Unix seconds, name). Together with the busy ones and those of this instance's leases
        # they are also kept as a set.
        self._due: list[tuple[float, str]] = []
        self._put_off: set[str] = set()
        # However many names are postponed, a listing shows the others.
        self._window = Window(files.queue, local=local_disk, skip=self._put_off)
        super().__init__(files, clock, inotify, (self._window,), local_disk=local_disk, rescan=_RESCAN)
        self._records = BlockedRecords(files.base)
        self._blocked = {files.queue: BlockedFiles(files.name, "queue", clock, self._records)}
        self.trigger = files.open_trigger()
        self._limits = limits
        self._most_lingering = most_lingering
        # Items that are finished and still locked: (the loop's time of the end, item).
        self._lingering: deque[tuple[float, ClaimedItem]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    # -- changes -----------------------------------------------------------------------------------------------------

    def _watch(self) -> list[int]:
        return [
            self._inotify.watch(self.files.queue, self._on_new_item),
            # Only to wake the waits for the end of a pause.
            self._inotify.watch(self.files.base, ignore, ignore),
        ]

    def _on_new_item(self, name: str | None) -> None:
        if name is None:
            self._window.mark_incomplete()
        elif name[0] != "." and name not in self.own:
            self._window.add(name)

    def _offer(self, name: str) -> None:
        self._put_off.discard(name)
        self._window.add(name)

    def added(self, names: list[str], *, returned: bool = False) -> None:
        """Add items that this instance has put into queue/.

        Args:
            names: The names of the items.
            returned: Whether they may come before the names in the window, so they are needed now. If not, inotify
                reports them later.
        """
        if self._is_followed and (returned or not self._is_watched):
            for name in names:
                self._window.add(name)

    # -- checking for work -------------------------------------------------------------------------------------------

    async def has_work(self) -> bool:
        """Return whether something may be leased.

        Raises:
            OSError: The queue cannot be listed.
        """
        if not self._is_followed:
            await self._read_unsettled()
            self.follow()
        if self.files.is_down:
            return False
        self.take_due()
        if self._first() is not None:
            return True
        await self._refresh()
        return self._first() is not None

    def until_due(self) -> float:
        """Return the seconds until the next delayed item is due; infinite while paused, or if none is known."""
        if not self._due or self.files.is_down:
            return float("inf")
        return max(0.001, self._due[0][0] - self._clock.time())

    def _first(self) -> str | None:
        """Return the oldest name that may be tried, without taking it."""
        window = self._window
        while (name := window.first()) is not None and name in self._put_off:
            window.take()
        return name

    def take_due(self) -> int:
        """Offer items that are due and return how many were due by their delay."""
        count, now = 0, self._clock.time()
        while self._due and self._due[0][0] <= now:
            self._offer(heapq.heappop(self._due)[1])
            count += 1
        self._retry_busy()
        if self._has_blocked:
            blocked = self._blocked[self.files.queue]
            for name in blocked.take_due():
                if name in self.own:
                    # Its worker still tries to settle it.
                    blocked.repeat_pause(name)
                else:
                    self._offer(name)
        return count

    # -- leasing -----------------------------------------------------------------------------------------------------

    async def lease(self, limit: int, visibility: float) -> list[FsqLease]:
        """Claim up to `limit` messages, oldest first. A cancelled call holds none of them.

        Raises:
            OSError: The store failed, and nothing is held.
        """
        leases: list[FsqLease] = []
        if limit <= 0 or not await self.has_work():
            return leases
        try:
            await self._lease(limit, visibility, leases)
        except BaseException:
            for lease in leases:
                self._drop(lease)
            raise
        return leases

    def _drop(self, lease: FsqLease) -> None:
        name = lease.claimed.name
        self.own.pop(name, None)
        lease.claimed.close()
        self._offer(name)

    async def _lease(self, limit: int, visibility: float, leases: list[FsqLease]) -> None:
        turn_ends = time.perf_counter() + _TURN
        while len(leases) < limit:
            name = self._first()
            if name is None:
                await self._refresh()
                if self._first() is None:
                    return
                continue
            if self.files.is_down:
                return
            self._window.take()
            try:
                lease = self._try_lease(name, visibility)
            except OSError:
                # Claimed items stay claimed.
                if leases:
                    return
                raise
            if lease is not None:
                leases.append(lease)
                if lease.claimed.size > ON_LOOP:
                    # The caller begins to extend these leases before it gets more.
                    await self._read_large(lease, leases)
                    return
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN

    async def _read_large(self, lease: FsqLease, leases: list[FsqLease]) -> None:
        """Read the body of the last lease off the loop. If it cannot be read, the lease ends.

        Raises:
            OSError: It cannot be read, and there are no other leases.
        """
        try:
            body = await read_in_slices(OwnDescriptor(lease.claimed.fd))
        except OSError as error:
            leases.remove(lease)
            name, ready = lease.claimed.name, self.files.queue
            self._drop(lease)
            if self._block(ready, name, error, ready):
                self._put_off.add(name)
            elif not leases:
                raise
            return
        lease.message = msgspec.structs.replace(lease.message, body=body)

    def _try_lease(self, name: str, visibility: float) -> FsqLease | None:
        try:
            return self._lease_one(name, visibility)
        except OSError as error:
            if self._block(self.files.queue, name, error, self.files.queue):
                self._put_off.add(name)
                return None
            # The store failed, not the item, which is tried again.
            self._window.add(name)
            raise

    def _lease_one(self, name: str, visibility: float) -> FsqLease | None:
        now = self._clock.time()
        claimed = claim(self.files, name, self._limits, now=now)
        if claimed in {SkipReason.REFUSED, SkipReason.TOO_LARGE}:
            self._rest(name, is_too_large=claimed is SkipReason.TOO_LARGE)
            return None
        was_busy = self._pauses.pop(name, None) if isinstance(claimed, ClaimedItem) else None
        if isinstance(claimed, ClaimedItem) and self._is_unsettled(name, was_busy=was_busy is not None):
            self._count_try(claimed)
            return None
        if self._has_blocked and not self._stays_unsettled(name, claimed):
            self._unblock(self.files.queue, name)
        if isinstance(claimed, ClaimedItem):
            return self._make_lease(claimed, now, visibility)
        if isinstance(claimed, float):
            self._put_off.add(name)
            heapq.heappush(self._due, (claimed, name))
        elif claimed is SkipReason.GONE:
            self._pauses.pop(name, None)
            self._window.skip_taken(name, self._is_ready)
        elif claimed is not SkipReason.FAILED:
            self._put_off.add(name)
            self._try_later(name)
        return None

    async def _read_unsettled(self) -> None:
        """Learn which items other processes could not settle."""
        found = {os.fsdecode(file.name) for file in await self._records.read() if file.unsettled}
        if found:
            self._blocked[self.files.queue].unsettled |= found
            self._has_blocked = True

    def _is_unsettled(self, name: str, *, was_busy: bool) -> bool:
        """Return whether an item ran before, and its outcome could not be stored."""
        if self._has_blocked and name in self._blocked[self.files.queue].unsettled:
            return True
        # Only another process can have had it meanwhile.
        if not (was_busy and self._records.is_unsettled("queue", name)):
            return False
        self._blocked[self.files.queue].unsettled.add(name)
        self._has_blocked = True
        return True

    def _stays_unsettled(self, name: str, claimed: ClaimedItem | SkipReason | float) -> bool:
        is_held_back = isinstance(claimed, float) or claimed is SkipReason.BUSY
        return is_held_back and name in self._blocked[self.files.queue].unsettled

    def _count_try(self, claimed: ClaimedItem) -> None:
        """Count a try of an item whose outcome could not be stored. It runs again only if its file can be moved.

        Raises:
            OSError: It cannot be moved.
        """
        name = claimed.name
        try:
            is_ready = claimed.retry() and claimed.name != name
        finally:
            claimed.close()
        self._unblock(self.files.queue, name)
        if is_ready:
            self._window.add(claimed.name)

    def _rest(self, name: str, *, is_too_large: bool) -> None:
        """Let an item rest that is too large, or that this user cannot open."""
        ready = self.files.queue
        if is_too_large:
            if not self._block_too_large(ready, name):
                return
        else:
            self._blocked[ready].add(name, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
            self._has_blocked = True
        self._put_off.add(name)

    def _make_lease(self, claimed: ClaimedItem, now: float, visibility: float) -> FsqLease:
        try:
            body = b"" if claimed.size > ON_LOOP else claimed.read()
        except BaseException:
            claimed.close()
            raise
        lease = FsqLease(
            message=make_message(self.files, claimed, body),
            token=_Tokens.next(now),
            expires_at=now + visibility,
            claimed=claimed,
            deadline=self._clock.monotonic() + visibility,
        )
        self.own[claimed.name] = lease
        self._put_off.add(claimed.name)
        return lease

    def _is_ready(self, name: str) -> bool:
        return has_entry(name, self.files.queue)

    # -- ending ------------------------------------------------------------------------------------------------------

    def on_lease_end(self, lease: FsqLease, name: str, *, stays: bool, due: float | None = None) -> None:
        """Release the resources of a lease.

        Args:
            lease: The lease.
            name: The name that the item had while it was held.
            stays: Whether it is still in queue/.
            due: When it may be tried again, in Unix seconds; None: now.
        """
        if self.own.get(name) is lease:
            del self.own[name]
            self._put_off.discard(name)
        claimed = lease.claimed
        if not stays:
            if claimed.fd >= 0:
                self._close_later(claimed)
            return
        claimed.close()
        if due is None:
            self._window.add(claimed.name)
        elif claimed.name not in self._put_off:
            self._put_off.add(claimed.name)
            heapq.heappush(self._due, (due, claimed.name))

    def on_unsettled(self, lease: FsqLease, error: OSError) -> None:
        """Record an item whose outcome cannot be stored because of its own file.

        Its worker tries again until the lease expires. Then the item does not run again before its file can be moved.
        """
        files, name = self.files, lease.claimed.name
        blocked = self._blocked[files.queue]
        if name in blocked.unsettled or not is_about_one_file(error, files.tmp, files.queue, files.done, files.fail):
            return
        blocked.add_unsettled(name, error)
        self._has_blocked = True

    def on_settled(self, name: str) -> None:
        """Forget that the outcome of an item could not be stored before."""
        if self._has_blocked:
            self._unblock(self.files.queue, name)

    @property
    def unsettled(self) -> list[FsqLease]:
        """The leases of this instance whose outcome could not be stored."""
        if not self._has_blocked:
            return []
        names = self._blocked[self.files.queue].unsettled
        return [lease for name, lease in self.own.items() if name in names]

    def end_blocked(self, lease: FsqLease, name: str, error: OSError) -> None:
        """Let an item rest whose lease is over and which cannot be moved.

        Raises:
            OSError: The store failed, not the item.
        """
        ready = self.files.queue
        if not is_about_one_file(error, self.files.tmp, ready):
            raise error
        self.on_lease_end(lease, name, stays=True)
        self._blocked[ready].add_unsettled(name, error)
        self._has_blocked = True
        self._put_off.add(name)

    def _close_later(self, claimed: ClaimedItem) -> None:
        loop = asyncio.get_running_loop()
        self._lingering.append((loop.time(), claimed))
        while len(self._lingering) > self._most_lingering:
            self._lingering.popleft()[1].close(gone=True)
        if self._timer is None:
            self._timer = loop.call_later(LINGER, self._close_lingering)

    def _close_lingering(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - LINGER
        while self._lingering and self._lingering[0][0] <= oldest:
            self._lingering.popleft()[1].close(gone=True)
        if self._lingering:
            self._timer = loop.call_later(self._lingering[0][0] - oldest, self._close_lingering)

    def until_closable(self) -> float:
        """Return the seconds until the queue can be closed without unlocking an item that was finished just now."""
        if not self._lingering:
            return 0.0
        return max(0.0, self._lingering[-1][0] + LEAST_LINGER - asyncio.get_running_loop().time())

    def release_finished(self) -> None:
        """Release the locks of finished items now, because the items are needed again."""
        while self._lingering:
            self._lingering.popleft()[1].close()

    def lose(self, name: str) -> None:
        """Drop the lease of an item that was removed."""
        lease = self.own.pop(name, None)
        if lease is not None:
            self._put_off.discard(name)
            lease.claimed.close()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close everything. Leases that are held end as if the process had died. Idempotent."""
        self.close_deleted()
        self.files.close()

    def close_deleted(self) -> None:
        """Close everything but the directories. Idempotent."""
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.release_finished()
        for lease in self.own.values():
            lease.claimed.close()
        self.own.clear()
        if self.trigger >= 0:
            trigger, self.trigger = self.trigger, -1
            os.close(trigger)
