"""One queue as one backend instance sees it: its open directories, its windows, its own leases, its life sign."""

from __future__ import annotations

import asyncio
import heapq
import os
import time

from qworker.clock import Clock
from qworker.kit.directory.watches import Inotify
from qworker.kit.directory.window import Window
from qworker.kit.files import FULL
from qworker_file.foreign import Claim
from qworker_file.holder import DETACHED, Holder, LifeSign
from qworker_file.layout import QueueDir
from qworker_file.lease import Expiries, FileLease, claim, give_back
from qworker_file.names import parse_delay
from qworker_file.read_ahead import ReadAhead
from qworker_file.reap import Reaper

__all__ = ["LocalQueue"]

_TURN = 0.002
_RESCAN_BLIND = 1.0
# Seconds until a file that somebody works on or writes is tried again: the first time, and at most.
_BUSY_FIRST, _BUSY_LAST = 0.02, 1.0


class LocalQueue:
    """See the module.

    Args:
        files: the open directories; closed by this object.
        clock: the store's clock.
        holder: the name under which this instance leases.
        inotify: where to be told of changes.
        local_disk: whether no other machine sees the directory.
        local_time: whether timestamps are in local time.
        rescan: seconds after which a window is listed again although nothing was told.
    """

    def __init__(
        self,
        files: QueueDir,
        clock: Clock,
        holder: Holder,
        inotify: Inotify,
        *,
        local_disk: bool,
        local_time: bool,
        rescan: float,
    ) -> None:
        self.files = files
        self.own: dict[str, FileLease] = {}
        self.reaper = Reaper(files, clock, local_disk=local_disk, own=self.own, holder=lambda: holder.name)
        self._clock = clock
        self._holder = holder
        self._inotify = inotify
        self._local_time = local_time
        # Where inotify does not tell, or not of other hosts, a second is long enough.
        self._rescan = rescan if local_disk else min(rescan, _RESCAN_BLIND)
        self._ready = Window(files.queue, local=local_disk)
        self._delayed = Window(files.delay, local=local_disk)
        self._ahead = ReadAhead(files.queue, self._ready.following)
        # Due messages taken from the window of delay/: (item, name there).
        self._due: list[tuple[str, str]] = []
        # Files that others worked on: (the loop's time of the next attempt, name), and the pause that each has reached.
        self._busy: list[tuple[float, str]] = []
        self._pauses: dict[str, float] = {}
        self._watches: list[int] = []
        self._in_use = self._watched = False
        # Whether the queue may have been paused or resumed since the last look.
        self._stirred = True
        self._life_sign: LifeSign | None = None
        self._leases_as = holder.name

    # -- being told --------------------------------------------------------------------------------------------------

    def use(self) -> None:
        """Begin to follow the queue: the watches are set before the first listing, so that nothing falls between."""
        if self._in_use:
            return
        self._in_use = True
        files = self.files
        watches = [
            self._inotify.watch(files.queue, self._told_ready),
            self._inotify.watch(files.delay, self._told_delayed),
            # Wakes those who wait for the end of a pause, and tells of its beginning.
            self._inotify.watch(files.base, self._told_base, removals=True),
        ]
        self._watches = [watch for watch in watches if watch >= 0]
        self._watched = len(self._watches) == len(watches)
        if not self._watched:
            self._rescan = min(self._rescan, _RESCAN_BLIND)

    def _told_ready(self, name: str | None) -> None:
        if name is None:
            self._ready.missed()
        elif name[0] != ".":
            self._ready.add(name)

    def _told_base(self, _name: str | None) -> None:
        self._stirred = True

    def _told_delayed(self, name: str | None) -> None:
        if name is None:
            self._delayed.missed()
        else:
            self._delayed.add(name)

    def added(self, ready: list[str], delayed: list[str], *, returned: bool = False) -> None:
        """This instance renamed files into queue/ and delay/.

        Args:
            ready: names in queue/.
            delayed: names in delay/.
            returned: they may come before what the window has, so they are needed now; else inotify tells in its time.
        """
        if self._in_use and (returned or not self._watched):
            for name in ready:
                self._ready.add(name)
            for name in delayed:
                self._delayed.add(name)

    # -- looking -----------------------------------------------------------------------------------------------------

    async def has_work(self) -> bool:
        """Whether something may be leased.

        Raises:
            OSError: the queue cannot be listed.
        """
        self.use()
        # Before the look, not after it.
        self._stirred = False
        if self.files.is_down:
            return False
        self._retry_busy()
        self._take_due()
        if self._ready or self._due:
            return True
        await self._refresh()
        self._take_due()
        return bool(self._ready or self._due)

    def until_due(self) -> float:
        """Seconds until the next delayed message is due; endless while paused, or where none is known."""
        name = self._delayed.first()
        parsed = None if name is None or self.files.is_down else parse_delay(name)
        return float("inf") if parsed is None else max(0.001, parsed[0] / 1000 - self._clock.time())

    def until_look(self) -> float:
        """Seconds until a busy file is tried again, or the directories are listed again."""
        now = asyncio.get_running_loop().time()
        pause = min(self._ready.listed_at, self._delayed.listed_at) + self._rescan - now
        if self._busy:
            pause = min(pause, self._busy[0][0] - now)
        return max(pause, 0.001)

    async def _refresh(self) -> None:
        """Learn what was added since the last look, by a listing only where nothing else tells."""
        self._inotify.drain()
        oldest = asyncio.get_running_loop().time() - self._rescan
        for window in (self._ready, self._delayed):
            if window.exhausted:
                await window.list()
            elif (not self._watched or window.listed_at <= oldest) and not window:
                if window.unchanged():
                    window.listed_at = asyncio.get_running_loop().time()
                else:
                    await window.list()

    def _take_due(self) -> None:
        """Move what is due from the window of delay/ to the heap from which it is leased, by its item."""
        window = self._delayed
        now_ms = self._clock.time() * 1000
        while (name := window.first()) is not None:
            parsed = parse_delay(name)
            if parsed is not None and parsed[0] > now_ms:
                return
            window.take()
            if parsed is not None:
                heapq.heappush(self._due, (parsed[1], name))

    def _retry_busy(self) -> None:
        if self._busy:
            now = asyncio.get_running_loop().time()
            while self._busy and self._busy[0][0] <= now:
                self._ready.add(heapq.heappop(self._busy)[1])

    # -- leasing -----------------------------------------------------------------------------------------------------

    async def lease(self, limit: int, visibility: float, expiries: Expiries, *, told: bool) -> list[FileLease]:
        """Claim up to `limit` messages, oldest first; a cancelled call holds none.

        Args:
            limit: how many at most.
            visibility: seconds.
            expiries: gives the leases' names.
            told: it was looked into before the wait that ended just now: the watches would have told of a pause since.

        Raises:
            OSError: the store is in trouble; nothing is held.
        """
        surely = told and self._watched and not self._stirred and bool(self._ready)
        if limit <= 0 or not (surely or await self.has_work()):
            return []
        self._show_life()
        leases: list[FileLease] = []
        try:
            await self._lease(limit, visibility, expiries, leases)
        except BaseException:
            now = self._clock.time()
            for lease in leases:
                self.own.pop(lease.item, None)
                give_back(lease, now)
                self.added([lease.item], [], returned=True)
            raise
        return leases

    async def _lease(self, limit: int, visibility: float, expiries: Expiries, leases: list[FileLease]) -> None:
        clock, files = self._clock, self.files
        now = clock.time()
        expiry = expiries.next(now + visibility, now)
        suffix = f".{expiry}.{self._leases_as}"
        expires_at, deadline = expiry / 1000, clock.monotonic() + visibility
        moment = time.perf_counter()
        turn_ends = moment + _TURN
        while len(leases) < limit:
            found = self._next()
            if found is None:
                await self._refresh()
                self._take_due()
                if not (self._ready or self._due):
                    return
                continue
            source, name, item = found
            try:
                claimed = claim(files, source, name, item, suffix, now=now, local=self._local_time)
            except OSError:
                # Trouble of the store, not of the message: it is tried again, and what is claimed is not given back for it.
                self.added(*(([name], []) if source == files.queue else ([], [name])), returned=True)
                if leases:
                    return
                raise
            if isinstance(claimed, FileLease):
                claimed.expires_at, claimed.deadline = expires_at, deadline
                leases.append(claimed)
                self.own[claimed.item] = claimed
            elif source == files.queue:
                self._lost(name, claimed)
            began, moment = moment, time.perf_counter()
            self._ahead.claimed(moment - began)
            if moment > turn_ends:
                await asyncio.sleep(0)
                moment = time.perf_counter()
                turn_ends = moment + _TURN

    def _lost(self, name: str, why: Claim) -> None:
        """A name of queue/ gave no lease."""
        if why is Claim.BUSY:
            self._try_later(name)
        if why is not Claim.ASIDE:
            self._ready.lost(name, self._is_ready)

    def _is_ready(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.files.queue, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _next(self) -> tuple[int, str, str] | None:
        """The next candidate: directory, name there, item."""
        ready = self._ready.first()
        if self._due and (ready is None or self._due[0][0] <= ready):
            item, name = heapq.heappop(self._due)
            return self.files.delay, name, item
        if ready is None:
            return None
        name = self._ready.take()
        return self.files.queue, name, name

    def _try_later(self, name: str) -> None:
        if len(self._pauses) > 10_000:
            # Names that are gone by now, nearly all of them.
            self._pauses.clear()
        pause = min(self._pauses.get(name, _BUSY_FIRST / 2) * 2, _BUSY_LAST)
        self._pauses[name] = pause
        heapq.heappush(self._busy, (asyncio.get_running_loop().time() + pause, name))

    def _show_life(self) -> None:
        if self._life_sign is not None or self._holder.name.startswith(DETACHED):
            return
        files = self.files
        try:
            self._life_sign = LifeSign(files.tmp, files.workers, self._holder.name, files.item_mode)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # A full disk must be drained all the same: leases without a life sign end by time alone.
            self._leases_as = self._holder.detached_name
        else:
            self._leases_as = self._holder.name

    async def reap(self) -> int:
        """Return the leases that are over; count them.

        Raises:
            OSError: the store is in trouble.
        """
        returned = await self.reaper.reap()
        self.added([], returned, returned=True)
        if self._in_use:
            # A deep backlog is no reason to leave retries waiting: their window is looked after beside it.
            self._inotify.drain()
            if self._delayed.exhausted:
                await self._delayed.list()
        self._take_due()
        return len(returned)

    def count_due(self) -> int:
        """How many messages became due since the last call, as far as is known: they are ready without being moved."""
        before = len(self._due)
        self._take_due()
        return len(self._due) - before

    def lose(self, items: list[str]) -> None:
        """Messages of this instance were deleted by hand."""
        for item in items:
            lease = self.own.pop(item, None)
            if lease is not None:
                lease.lost = True
                lease.close()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close_deleted(self) -> None:
        """The queue was deleted: follow it no more, and let its leases find out for themselves."""
        for watch in self._watches:
            self._inotify.forget(watch)
        self._watches.clear()
        if self._life_sign is not None:
            self._life_sign.drop()
            self._life_sign = None
        if not self.own:
            self.files.close()

    def close(self) -> None:
        """Let go of everything: leases that are held end as if the process had died. Idempotent."""
        for watch in self._watches:
            self._inotify.forget(watch)
        self._watches.clear()
        for lease in self.own.values():
            lease.lost = True
            lease.close()
        self.own.clear()
        if self._life_sign is not None:
            self._life_sign.end()
            self._life_sign = None
        self.files.close()
