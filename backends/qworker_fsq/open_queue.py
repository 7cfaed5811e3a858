"""One queue as one backend instance sees it: its open directories, its window, its own leases.

Nothing tells of a lock that was let go of, so what somebody else works on is tried again after a pause, of a second at most.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import deque

from qworker.clock import Clock
from qworker.kit.directory.watches import Inotify
from qworker.kit.directory.window import Window
from qworker_fsq.layout import QueueDir
from qworker_fsq.lease import Claimed, NotClaimed, claim
from qworker_fsq.lease_end import FsqLease, Limits, make_message

__all__ = ["MOST_LINGERING", "LocalQueue"]

_TURN = 0.002
# Seconds until a locked item is tried again: the first time, and at most.
_BUSY_FIRST, _BUSY_LAST = 0.02, 1.0
# Seconds for which a finished item stays locked, and how many at most: an fsq program that opened it before it was finished, and
# locks it only now, would work on it once more.
_LINGER, MOST_LINGERING = 0.1, 2000


class _Tokens:
    """Numbers that rise with every delivery, whoever has the lock next: the time, and more within the same moment."""

    last = 0

    @classmethod
    def next(cls, now: float) -> int:
        cls.last = max(int(now * 1e9), cls.last + 1)
        return cls.last


class LocalQueue:
    """See the module.

    Args:
        files: the open directories; closed by this object.
        clock: the store's clock.
        limits: when an item is given up.
        inotify: where to be told of changes.
        local_disk: whether no other machine sees the directory.
        rescan: seconds after which the queue is listed again although nothing was told, with and without inotify.
        most_lingering: finished items that may stay open for a moment.
    """

    def __init__(
        self,
        files: QueueDir,
        clock: Clock,
        limits: Limits,
        inotify: Inotify,
        *,
        local_disk: bool,
        rescan: tuple[float, float],
        most_lingering: int,
    ) -> None:
        self.files = files
        # Our leases, by name in queue/.
        self.own: dict[str, FsqLease] = {}
        self.trigger = files.open_trigger()
        self._clock = clock
        self._limits = limits
        self._inotify = inotify
        self._rescan, self._rescan_blind = rescan
        if not local_disk:
            self._rescan = self._rescan_blind
        # Names that are not to be tried yet: (the loop's time, name), and (Unix seconds, name); those, and our own, as a set.
        self._busy: list[tuple[float, str]] = []
        self._due: list[tuple[float, str]] = []
        self._put_off: set[str] = set()
        # However many are put off, a listing shows what is not.
        self._window = Window(files.queue, local=local_disk, skip=self._put_off)
        self._pauses: dict[str, float] = {}
        self._watches: list[int] = []
        self._in_use = self._watched = False
        self._most_lingering = most_lingering
        # Finished, and still locked: (the loop's time of the end, item).
        self._lingering: deque[tuple[float, Claimed]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.pruned_at = float("-inf")

    # -- being told --------------------------------------------------------------------------------------------------

    def use(self) -> None:
        """Begin to follow the queue: the watches are set before the first listing, so that nothing falls between."""
        if self._in_use:
            return
        self._in_use = True
        watches = [
            self._inotify.watch(self.files.queue, self._told),
            # Only to wake those who wait for the end of a pause.
            self._inotify.watch(self.files.base, _nothing, removals=True),
        ]
        self._watches = [watch for watch in watches if watch >= 0]
        self._watched = len(self._watches) == len(watches)
        if not self._watched:
            self._rescan = min(self._rescan, self._rescan_blind)

    def _told(self, name: str | None) -> None:
        if name is None:
            self._window.missed()
        elif name[0] != "." and name not in self.own:
            self._window.add(name)

    def added(self, names: list[str], *, returned: bool = False) -> None:
        """This instance put items into queue/.

        Args:
            names: of the items.
            returned: they may come before what the window has, so they are needed now; else inotify tells in its time.
        """
        if self._in_use and (returned or not self._watched):
            for name in names:
                self._window.add(name)

    # -- looking -----------------------------------------------------------------------------------------------------

    async def has_work(self) -> bool:
        """Whether something may be leased.

        Raises:
            OSError: the queue cannot be listed.
        """
        self.use()
        if self.files.is_down:
            return False
        self.take_due()
        if self._first() is not None:
            return True
        await self._refresh()
        return self._first() is not None

    def until_due(self) -> float:
        """Seconds until the next item that was put off is due; endless while paused, or where none is known."""
        if not self._due or self.files.is_down:
            return float("inf")
        return max(0.001, self._due[0][0] - self._clock.time())

    def until_look(self) -> float:
        """Seconds until a locked item is tried again, or the queue is listed again."""
        now = asyncio.get_running_loop().time()
        pause = self._window.listed_at + self._rescan - now
        if self._busy:
            pause = min(pause, self._busy[0][0] - now)
        return max(pause, 0.001)

    async def _refresh(self) -> None:
        """Learn what was added since the last look, by a listing only where nothing else tells."""
        self._inotify.drain()
        window = self._window
        loop = asyncio.get_running_loop()
        if window.exhausted:
            await window.list()
        elif not window and (not self._watched or window.listed_at <= loop.time() - self._rescan):
            if window.unchanged():
                window.listed_at = loop.time()
            else:
                await window.list()

    def _first(self) -> str | None:
        """The oldest name that may be tried, which stays."""
        window = self._window
        while (name := window.first()) is not None and name in self._put_off:
            window.take()
        return name

    def take_due(self) -> int:
        """Let items be tried whose time has come; how many were due by their delay."""
        count, now = 0, self._clock.time()
        while self._due and self._due[0][0] <= now:
            self._try_again(heapq.heappop(self._due)[1])
            count += 1
        if self._busy:
            now = asyncio.get_running_loop().time()
            while self._busy and self._busy[0][0] <= now:
                self._try_again(heapq.heappop(self._busy)[1])
        return count

    def _try_again(self, name: str) -> None:
        self._put_off.discard(name)
        self._window.add(name)

    def _try_later(self, name: str) -> None:
        if len(self._pauses) > 10_000:
            # Names that are gone by now, nearly all of them.
            self._pauses.clear()
        pause = min(self._pauses.get(name, _BUSY_FIRST / 2) * 2, _BUSY_LAST)
        self._pauses[name] = pause
        self._put_off.add(name)
        heapq.heappush(self._busy, (asyncio.get_running_loop().time() + pause, name))

    # -- leasing -----------------------------------------------------------------------------------------------------

    async def lease(self, limit: int, visibility: float) -> list[FsqLease]:
        """Claim up to `limit` messages, oldest first; a cancelled call holds none.

        Raises:
            OSError: the store is in trouble; nothing is held.
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
        self._try_again(name)

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
                lease = self._lease_one(name, visibility)
            except OSError:
                # Trouble of the store, not of the message: it is tried again, and what is claimed is not given back for it.
                self._window.add(name)
                if leases:
                    return
                raise
            if lease is not None:
                leases.append(lease)
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN

    def _lease_one(self, name: str, visibility: float) -> FsqLease | None:
        limits, now = self._limits, self._clock.time()
        claimed = claim(self.files, name, now=now, max_tries=limits.max_tries, ttl=limits.ttl)
        if isinstance(claimed, Claimed):
            self._pauses.pop(name, None)
            return self._leased(claimed, now, visibility)
        if isinstance(claimed, float):
            self._put_off.add(name)
            heapq.heappush(self._due, (claimed, name))
        elif claimed is NotClaimed.GONE:
            self._pauses.pop(name, None)
            self._window.lost(name, self._is_there)
        elif claimed is not NotClaimed.FAILED:
            self._try_later(name)
        return None

    def _leased(self, claimed: Claimed, now: float, visibility: float) -> FsqLease:
        try:
            body = claimed.read()
        except BaseException:
            claimed.close()
            raise
        lease = FsqLease(
            message=make_message(self.files, claimed, body),
            token=_Tokens.next(now),
            expires_at=now + visibility,
            claimed=claimed,
        )
        self.own[claimed.name] = lease
        self._put_off.add(claimed.name)
        return lease

    def _is_there(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.files.queue, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    # -- ending ------------------------------------------------------------------------------------------------------

    def ended(self, lease: FsqLease, name: str, *, stays: bool, due: float | None = None) -> None:
        """A lease is over.

        Args:
            lease: the one.
            name: what it was called while it was held.
            stays: it is in queue/ still.
            due: when it may be tried again; None: now.
        """
        if self.own.get(name) is lease:
            del self.own[name]
            self._put_off.discard(name)
        claimed = lease.claimed
        if not stays:
            if claimed.fd >= 0:
                self._linger(claimed)
            return
        claimed.close()
        if due is None:
            self._window.add(claimed.name)
        elif claimed.name not in self._put_off:
            self._put_off.add(claimed.name)
            heapq.heappush(self._due, (due, claimed.name))

    def _linger(self, claimed: Claimed) -> None:
        loop = asyncio.get_running_loop()
        self._lingering.append((loop.time(), claimed))
        while len(self._lingering) > self._most_lingering:
            self._lingering.popleft()[1].close(gone=True)
        if self._timer is None:
            self._timer = loop.call_later(_LINGER, self._end_lingering)

    def _end_lingering(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - _LINGER
        while self._lingering and self._lingering[0][0] <= oldest:
            self._lingering.popleft()[1].close(gone=True)
        if self._lingering:
            self._timer = loop.call_later(self._lingering[0][0] - oldest, self._end_lingering)

    def let_go(self) -> None:
        """End the lingering now: what was finished is wanted again."""
        while self._lingering:
            self._lingering.popleft()[1].close()

    def expire(self) -> int:
        """End our own leases whose time has passed, for holders elsewhere: tries + 1; count them."""
        now, count = self._clock.time(), 0
        for name, lease in tuple(self.own.items()):
            if lease.expires_at <= now:
                if lease.claimed.retry():
                    count += 1
                self.ended(lease, name, stays=True)
        return count

    def lose(self, name: str) -> None:
        """A message of this instance was deleted by hand."""
        lease = self.own.pop(name, None)
        if lease is not None:
            self._put_off.discard(name)
            lease.claimed.close()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of everything: leases that are held end as if the process had died. Idempotent."""
        for watch in self._watches:
            self._inotify.forget(watch)
        self._watches.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.let_go()
        for lease in self.own.values():
            lease.claimed.close()
        self.own.clear()
        if self.trigger >= 0:
            trigger, self.trigger = self.trigger, -1
            os.close(trigger)
        self.files.close()


def _nothing(_name: str | None) -> None:
    """The event itself is the news."""
