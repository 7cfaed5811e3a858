"""One queue that one backend instance has open: its directories, its windows, its own leases, its liveness file."""

from __future__ import annotations

import asyncio
import heapq
import os
import time

from qworker.clock import Clock
from qworker.kit.directory.blocked import BlockedFiles, BlockedRecords
from qworker.kit.directory.followed_queue import FollowedQueue
from qworker.kit.directory.liveness import REFRESH, REFRESHED, LivenessFile
from qworker.kit.directory.window import Window
from qworker.kit.files import has_entry
from qworker.kit.inotify import Inotify
from qworker.kit.store_errors import DAMAGED, FULL
from qworker.message import LostLease
from qworker_file.foreign import ClaimResult, move_to_failed
from qworker_file.holder import DETACHED, Holder
from qworker_file.layout import QueueDir
from qworker_file.lease import ExpiryClock, FileLease, claim, read_large_body
from qworker_file.lease_end import release
from qworker_file.lease_length import CLOCK_STEP
from qworker_file.load_window import LoadWindow
from qworker_file.loads import is_load
from qworker_file.losses import drop_lost
from qworker_file.names import DELIMITERS, LAST_DUE_MS, delay_name, is_delay_name, is_due_time, parse_delay
from qworker_file.read_ahead import ReadAhead
from qworker_file.reap import ObservedLease, QueueReaper

__all__ = ["OpenQueue"]

_TURN = 0.002
# Seconds between two looks for messages with a priority, while others are known that can be leased before them.
_LOOK = 0.05
# How names with a priority begin.
_URGENT = frozenset(DELIMITERS[1:])


class OpenQueue(FollowedQueue[QueueDir, FileLease]):
    """An open queue.

    Args:
        files: The open directories. This object closes them.
        clock: The store's clock.
        holder: The name under which this instance leases.
        inotify: Reports changes.
        local_disk: True if no other machine uses the directory.
        local_time: Whether timestamps are in local time.
        rescan: Seconds after which a window is listed again although no change was reported.
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
        records = BlockedRecords(files.base)
        blocked_ready = BlockedFiles(files.name, "queue", clock, records)
        blocked_delayed = BlockedFiles(files.name, "delay", clock, records)
        self._ready = Window(files.queue, local=local_disk, skip=blocked_ready)
        self._delayed = Window(files.delay, local=local_disk, skip=blocked_delayed, is_ordered=is_delay_name)
        super().__init__(files, clock, inotify, (self._ready, self._delayed), local_disk=local_disk, rescan=rescan)
        self._blocked = {files.queue: blocked_ready, files.delay: blocked_delayed}
        self.loads = LoadWindow(files, clock, records, local_time=local_time)
        self._holder = holder
        self._local_disk = local_disk
        self._local_time = local_time
        # The lost leases of this instance that were not reported yet.
        self._losses: list[LostLease] = []
        self._reaper = QueueReaper(
            files, clock, local_disk=local_disk, own=self.own, losses=self._losses, holder=lambda: holder.name
        )
        self._read_ahead = ReadAhead(files.queue, self._ready.peek)
        # Due messages taken from the window of delay/: (item, name there).
        self._due: list[tuple[str, str]] = []
        # Whether messages with a priority were seen here, and when their arrival was last looked for (perf_counter).
        self._has_priorities = False
        self._looked_at = 0.0
        # Whether the queue may have been paused or resumed since the last check.
        self._is_stirred = True
        self._liveness: LivenessFile | None = None
        self._outlived: LivenessFile | None = None
        self._leases_as = holder.name
        # How far the wall clock was ahead of the monotonic one when others were last shown the wall clock.
        self._marked = float("-inf")
        # Monotonic seconds of that moment.
        self._marked_at = float("-inf")

    # -- changes -----------------------------------------------------------------------------------------------------

    def _watch(self) -> list[int]:
        files = self.files
        return [
            self._inotify.watch(files.queue, self._on_new_ready),
            self._inotify.watch(files.delay, self._on_new_delayed),
            # Wakes the waits for the end of a pause, and reports its beginning.
            self._inotify.watch(files.base, self._on_base_change, self._on_base_change),
        ]

    def _on_new_ready(self, name: str | None) -> None:
        if name is None:
            self._ready.mark_incomplete()
        elif name[0] != ".":
            self._has_priorities = self._has_priorities or name[0] in _URGENT
            self._ready.add(name)

    def _on_new_delayed(self, name: str | None) -> None:
        if name is None:
            self._delayed.mark_incomplete()
        elif name[0] != ".":
            self._delayed.add(name)

    def _on_base_change(self, name: str | None) -> None:
        self._is_stirred = True
        if name is None or is_load(name):
            self.loads.find()

    def _offer(self, name: str) -> None:
        self._ready.add(name)

    def added(self, ready: list[str], delayed: list[str], *, returned: bool = False) -> None:
        """Add files that this instance has renamed into queue/ and delay/.

        Args:
            ready: Names in queue/.
            delayed: Names in delay/.
            returned: Whether they may come before the names in the window, so they are needed now. If not, inotify
                reports them later.
        """
        if self._is_followed and (returned or not self._is_watched):
            for name in ready:
                self._ready.add(name)
            for name in delayed:
                self._delayed.add(name)
        elif ready and ready[-1][0] in _URGENT:
            self._has_priorities = True

    # -- checking for work -------------------------------------------------------------------------------------------

    async def has_work(self) -> bool:
        """Return whether something may be leased.

        Raises:
            OSError: The queue cannot be listed.
        """
        self.follow()
        # It is set before the check, not after it, so that no change is missed.
        self._is_stirred = False
        if self.files.is_down:
            # A wait on a paused queue can end for any reason: the lease that follows checks the queue again.
            self._is_stirred = True
            return False
        self._retry_busy()
        if self._has_blocked:
            self._retry_blocked()
        self._look_for_priorities()
        self._take_due()
        self.loads.refresh(self._rescan)
        if self._ready or self._due:
            return True
        # Also if a load has messages: older ones may be in queue/.
        await self._refresh()
        self._take_due()
        return self._has_candidates

    def _look_for_priorities(self) -> None:
        """Learn of messages that come before the known ones. Where none has a priority, only now and then."""
        now = time.perf_counter()
        if self._has_priorities or now - self._looked_at > _LOOK:
            self._looked_at = now
            self._inotify.drain()

    @property
    def _has_candidates(self) -> bool:
        return bool(self._ready or self._due or self.loads)

    async def _refresh(self) -> None:
        await super()._refresh()
        self.loads.refresh(self._rescan)

    def until_check(self) -> float:
        """Return the seconds until the next check. What other workers left of a load is looked for again soon."""
        return min(super().until_check(), self.loads.until_retry())

    def _retry_blocked(self) -> None:
        for source, window in ((self.files.queue, self._ready), (self.files.delay, self._delayed)):
            for name in self._blocked[source].take_due():
                window.add(name)

    def until_due(self) -> float:
        """Return the seconds until the next delayed message is due; infinite while paused, or if none is known."""
        name = self._delayed.first()
        parsed = None if name is None or self.files.is_down else parse_delay(name)
        return float("inf") if parsed is None else max(0.001, parsed[0] / 1000 - self._clock.time())

    def _take_due(self) -> None:
        """Move due messages from the window of delay/ to the heap, from which they are leased in the order of items."""
        window = self._delayed
        if window.unordered:
            self._order_all()
        now_ms = self._clock.time() * 1000
        while (name := window.first()) is not None:
            parsed = parse_delay(name)
            if parsed is not None and parsed[0] > now_ms:
                return
            window.take()
            if parsed is not None:
                heapq.heappush(self._due, (parsed[1], name))

    def _order_all(self) -> None:
        """Give names of delay/ that have no place in the order of due times such a place, or move them to fail/.

        Other programs can write any number of digits, and text does not sort numbers of different lengths.
        """
        files, window = self.files, self._delayed
        while window.unordered:
            name = window.unordered.pop()
            try:
                parsed = parse_delay(name)
                if parsed is not None and is_due_time(parsed[0]):
                    ordered = self._free_delay_name(parsed[1], parsed[0])
                    os.rename(name, ordered, src_dir_fd=files.delay, dst_dir_fd=files.delay)
                    window.add(ordered)
                else:
                    move_to_failed(files, files.delay, name, "its name does not begin with a due time in milliseconds")
            except FileNotFoundError:
                # Another worker was faster.
                continue
            except OSError as error:
                if not self._block(files.delay, name, error, files.delay):
                    window.unordered.add(name)
                    raise

    def _free_delay_name(self, item: str, due_ms: int) -> str:
        # A rename would replace a file of that name.
        while has_entry(name := delay_name(item, due_ms), self.files.delay):
            due_ms = min(due_ms, LAST_DUE_MS) - 1
        return name

    # -- leasing -----------------------------------------------------------------------------------------------------

    async def lease(self, limit: int, visibility: float, expiries: ExpiryClock, *, notified: bool) -> list[FileLease]:
        """Claim up to `limit` messages, oldest first. A cancelled call holds none of them.

        Args:
            limit: The largest number of messages.
            visibility: Seconds.
            expiries: Gives the leases' names.
            notified: Whether the queue was checked before the wait that has just finished: the watches would have
                reported a pause since.

        Raises:
            OSError: The store failed, and nothing is held.
        """
        has_work = notified and self._is_watched and not self._is_stirred and bool(self._ready)
        if limit <= 0 or not (has_work or await self.has_work()):
            return []
        self.create_liveness()
        if not self._local_disk:
            self._refresh_liveness()
        leases: list[FileLease] = []
        try:
            await self._lease(limit, visibility, expiries, leases)
        except BaseException:
            now = self._clock.time()
            for lease in leases:
                self.own.pop(lease.item, None)
                release(lease, now)
                self._offer_released(lease)
            raise
        # One can have been cancelled, and reported, while a large body was read.
        return [lease for lease in leases if not lease.lost]

    async def _lease(self, limit: int, visibility: float, expiries: ExpiryClock, leases: list[FileLease]) -> None:
        clock = self._clock
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
                if not self._has_candidates:
                    return
                continue
            source, name, item = found
            try:
                claimed = self._try_claim(source, name, item, suffix, now)
            except OSError:
                # Claimed messages stay claimed.
                if leases:
                    return
                raise
            if isinstance(claimed, FileLease):
                claimed.expires_at, claimed.deadline = expires_at, deadline
                leases.append(claimed)
                if claimed.item in self.own:
                    # It was cancelled or failed, and requeued, before a reap has noticed it.
                    drop_lost(self.own[claimed.item], self.own, self._losses)
                self.own[claimed.item] = claimed
                if claimed.is_unread:
                    # The caller begins to extend these leases before it gets more.
                    await self._read_large(claimed, leases)
                    return
            else:
                self._skip(source, name, claimed)
            began, moment = moment, time.perf_counter()
            self._read_ahead.claimed(moment - began)
            if moment > turn_ends:
                await asyncio.sleep(0)
                moment = time.perf_counter()
                turn_ends = moment + _TURN

    def _offer_released(self, lease: FileLease) -> None:
        names = [] if lease.released_as is None else [lease.released_as]
        self.added(*((names, []) if lease.is_in_queue else ([], names)), returned=True)

    def _try_claim(self, source: int, name: str, item: str, suffix: str, now: float) -> FileLease | ClaimResult:
        files = self.files
        try:
            claimed = claim(files, source, name, item, suffix, now=now, local=self._local_time)
        except OSError as error:
            if source not in self._blocked:
                self.loads.block(error, source)
                return ClaimResult.BLOCKED
            if self._block(source, name, error, files.lease):
                return ClaimResult.BLOCKED
            # The store failed, not the message, which is tried again.
            self.added(*(([name], []) if source == files.queue else ([], [name])), returned=True)
            raise
        if source not in self._blocked:
            self.loads.on_claimed(claimed)
        elif self._has_blocked and claimed is not ClaimResult.TOO_LARGE:
            self._unblock(source, name)
        return claimed

    async def _read_large(self, lease: FileLease, leases: list[FileLease]) -> None:
        """Read the body of the last lease off the loop. If it cannot be read, the lease ends.

        Raises:
            OSError: It cannot be read, and there are no other leases.
        """
        try:
            await read_large_body(lease)
        except OSError as error:
            leases.remove(lease)
            self.own.pop(lease.item, None)
            release(lease, self._clock.time())
            if error.errno in DAMAGED:
                if lease.released_as is not None:
                    source = self.files.queue if lease.is_in_queue else self.files.delay
                    move_to_failed(self.files, source, lease.released_as, f"it cannot be read: {error.strerror}")
                return
            self._offer_released(lease)
            if not leases:
                raise

    def _skip(self, source: int, name: str, result: ClaimResult) -> None:
        """Continue after a name that gave no lease."""
        if source not in self._blocked:
            return
        if result is ClaimResult.TOO_LARGE:
            self._block_too_large(source, name)
            return
        if source != self.files.queue:
            return
        if result is ClaimResult.BUSY:
            self._try_later(name)
        if result in {ClaimResult.BUSY, ClaimResult.GONE}:
            self._ready.skip_taken(name, self._is_ready)

    def _is_ready(self, name: str) -> bool:
        return has_entry(name, self.files.queue)

    def _next(self) -> tuple[int, str, str] | None:
        """Take the next candidate: directory, name there, item."""
        ready = self._ready.first()
        staged = self.loads.first()
        if staged is not None and (ready is None or staged[0] < ready) and (not self._due or staged < self._due[0]):
            return self.loads.take()
        if self._due and (ready is None or self._due[0][0] <= ready):
            item, name = heapq.heappop(self._due)
            return self.files.delay, name, item
        if ready is None:
            return None
        name = self._ready.take()
        return self.files.queue, name, name

    def create_liveness(self) -> None:
        """Create this instance's file in workers/, unless its leases end by time alone and no other host sees them.

        Raises:
            OSError: The store failed.
        """
        if self._liveness is not None or (self._local_disk and self._is_detached):
            return
        files = self.files
        try:
            note = f"\n{os.getpid()}\n{REFRESHED}\n"
            self._liveness = LivenessFile(files.tmp, files.workers, self._holder.name, files.item_mode, note)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # It must be possible to drain a full disk: leases without a liveness file end by time alone.
            self._leases_as = self._holder.detached_name
        else:
            self._leases_as = self._holder.name

    @property
    def _is_detached(self) -> bool:
        return self._holder.name.startswith(DETACHED)

    def _refresh_liveness(self) -> None:
        """Show this host's clock before the first lease, after a step of it, and each hour.

        The last shows that this process lives. If another process found it dead, because it was stopped for a day, its
        earlier leases are lost. It creates the file again, or its next leases would be lost too.
        """
        monotonic = self._clock.monotonic()
        has_stepped = abs(self._clock.time() - monotonic - self._marked) > CLOCK_STEP
        if (has_stepped or monotonic - self._marked_at > REFRESH) and not self.mark_clock():
            if self._liveness is not None:
                self._liveness.abandon()
                self._liveness = None
            self.create_liveness()
            self.mark_clock()

    def mark_clock(self) -> bool:
        """Show the hosts of a shared file system this host's clock (qworker_file.lease_length). From any thread.

        Returns:
            False if this instance's file is gone.

        Raises:
            OSError: The store failed.
        """
        liveness, now, monotonic = self._liveness, self._clock.time(), self._clock.monotonic()
        if liveness is not None:
            try:
                liveness.mark_clock(now)
            except FileNotFoundError:
                # Another process has found this one dead: its leases are lost.
                return False
            self._marked, self._marked_at = now - monotonic, monotonic
        return True

    async def reap(self) -> int:
        """Return the expired leases, and their number.

        Raises:
            OSError: The store failed.
        """
        if not self._local_disk and self._liveness is not None:
            self._refresh_liveness()
        returned = await self._reaper.reap()
        self.added([], returned, returned=True)
        if self._is_followed:
            # Retries must not wait behind a deep backlog, so their window is refreshed too.
            self._inotify.drain()
            if self._delayed.is_exhausted:
                await self._delayed.list()
        self._take_due()
        return len(returned)

    @property
    def observed(self) -> dict[str, ObservedLease]:
        """The leases of other processes, by their names in lease/, as the reaper has observed them."""
        return self._reaper.observed

    @observed.setter
    def observed(self, observed: dict[str, ObservedLease]) -> None:
        self._reaper.observed = observed

    @property
    def is_needed(self) -> bool:
        """Also while leases exist that were found again, and that this instance extends or ends, or losses."""
        return super().is_needed or bool(self.files.found) or bool(self._losses)

    def count_due(self) -> int:
        """Return how many messages became due since the last call, as far as is known.

        They are ready without a move.
        """
        before = len(self._due)
        self._take_due()
        return len(self._due) - before

    def lose(self, items: list[str], *, cancelled: bool = False) -> None:
        """Drop the leases of messages that were removed or cancelled."""
        for item in items:
            lease = self.own.get(item)
            if lease is not None:
                drop_lost(lease, self.own, self._losses, cancelled=cancelled)

    def take_losses(self) -> list[LostLease]:
        """Return the leases of this instance that are gone, each once."""
        losses = self._losses.copy()
        self._losses.clear()
        return losses

    # -- the end -----------------------------------------------------------------------------------------------------

    def close_deleted(self) -> None:
        """Stop following a queue that was deleted. Its leases find that out when they end."""
        self._unwatch()
        if self._liveness is not None:
            if self.own and self.files.exists:
                # The directory was moved away, or has lost a part: its leases live until they end.
                self._outlived = self._liveness
            else:
                self._liveness.abandon()
            self._liveness = None

    def close(self) -> None:
        """Close everything. Leases that are held end as if the process had died. Idempotent."""
        self._unwatch()
        self._reaper.close()
        for lease in self.own.values():
            lease.lost = True
            lease.close()
        self.own.clear()
        self.loads.close()
        if self._liveness is not None:
            # The mark of a detached holder is needed as long as its leases. A reaper removes it after them.
            if self._is_detached:
                self._liveness.abandon()
            else:
                self._liveness.close()
            self._liveness = None
        if self._outlived is not None:
            # The name may be that of the queue which replaced this one.
            self._outlived.abandon()
            self._outlived = None
        self.files.close()
