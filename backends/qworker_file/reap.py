"""Ending the leases of dead holders and expired leases: the liveness file is gone, or the time is over.

Time is measured by this process's monotonic clock from the first time that it sees a lease's name. Every extension
makes another name, so a name that has not changed for the length of its lease has expired. No step of a wall clock, and
no wrong clock of a host on a shared file system, ends a live lease early.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable

import msgspec

from qworker.bulk.cleanup import clean_up_staged, has_staged
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.kit.directory.blocked import BlockedFiles, BlockedRecords, is_about_one_file
from qworker.kit.directory.liveness import AbandonedFiles, has_died
from qworker.kit.files import list_names, try_unlink
from qworker.kit.planted import rename_file
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import LostLease
from qworker_file.app_keys import clean_up_app_keys
from qworker_file.cell_file import TEMPORARY
from qworker_file.cell_sweep import CellSweeper
from qworker_file.holder import DETACHED, parse_publisher
from qworker_file.id_index import clean_up_index
from qworker_file.id_place import Place, record_move
from qworker_file.layout import QueueDir
from qworker_file.lease import FileLease
from qworker_file.lease_length import ClockMarks, LeaseTimes, read_lease_times, shared_length
from qworker_file.loads import clean_up_loads
from qworker_file.losses import LossDetector, drop_lost
from qworker_file.names import delay_name, parse_id, parse_item, parse_lease, with_tries

__all__ = ["ObservedLease", "QueueReaper"]

_TURN = 0.002
# Seconds between two clean-ups of tmp/ and of everything that is not urgent.
_CLEAN_UP = 10.0
_CLEAN_UP_TMP = 600.0
# Seconds after which an unfinished file in tmp/ is removed.
_STRAY = 36 * 3600.0


class ObservedLease(msgspec.Struct, gc=False):
    """A lease of another holder."""

    # Monotonic seconds when it was first seen, and how long it was then known to last.
    since: float
    lasts: float
    # The times of its file if a later mark of its holder's clock can change how long it lasts.
    times: LeaseTimes | None = None


class QueueReaper:
    """A reaper of one queue.

    Args:
        files: The queue.
        clock: The store's clock.
        local_disk: True if no other machine uses the directory.
        own: This instance's leases, by item.
        losses: Receives the leases of this instance that are gone.
        holder: Returns this instance's own name.
    """

    def __init__(
        self,
        files: QueueDir,
        clock: Clock,
        *,
        local_disk: bool,
        own: dict[str, FileLease],
        losses: list[LostLease],
        holder: Callable[[], str],
    ) -> None:
        self._files = files
        self._clock = clock
        self._local_disk = local_disk
        self._own = own
        self._losses = losses
        self._detector = LossDetector(files, own, losses, local_disk=local_disk)
        self._holder = holder
        self.observed: dict[str, ObservedLease] = {}
        self._records = BlockedRecords(files.base)
        self._blocked = BlockedFiles(files.name, "lease", clock, self._records)
        self._marks = ClockMarks(files.workers)
        self._abandoned = AbandonedFiles(files.workers, clock)
        self._sweeper = CellSweeper(files, clock)
        self._cleaned_at = self._tmp_cleaned_at = float("-inf")

    async def reap(self) -> list[str]:
        """Move expired messages to delay/, due now and with one more try. Return their names there.

        Raises:
            OSError: The store failed. Messages that were moved stay moved.
        """
        names = await list_names(self._files.lease)
        now = self._clock.monotonic()
        self._blocked.take_due()
        dead: dict[str, bool] = {}
        self._marks.begin_round({parsed[2] for name in names if (parsed := parse_lease(name)) is not None})
        seen: dict[str, ObservedLease] = {}
        returned: list[str] = []
        turn_ends = time.perf_counter() + _TURN
        for name in names:
            parsed = parse_lease(name)
            if parsed is None:
                continue
            item, expiry_ms, holder = parsed
            if name not in self._blocked and self._is_over(
                name, item, expiry_ms / 1000, holder, dead=dead, seen=seen, now=now
            ):
                moved = self._try_return(name, item)
                if moved is not None:
                    returned.append(moved)
            if time.perf_counter() > turn_ends:
                self.observed.update(seen)
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN
        self.observed = seen
        if self._own:
            self._detector.look(frozenset(names))
        if now - self._cleaned_at >= _CLEAN_UP:
            self._cleaned_at = now
            await self._clean_up()
        await self._sweeper.sweep()
        return returned

    def close(self) -> None:
        """Leave the cells that are swept now. Idempotent."""
        self._sweeper.close()

    def _is_over(
        self,
        name: str,
        item: str,
        expiry: float,
        holder: str,
        *,
        dead: dict[str, bool],
        seen: dict[str, ObservedLease],
        now: float,
    ) -> bool:
        if holder == self._holder():
            mine = self._own.get(item)
            if mine is not None:
                # Its name may have changed since the listing. In that case the extension moved the deadline too.
                return mine.path == name and now >= mine.deadline
        else:
            if holder not in dead:
                dead[holder] = self._has_died(holder)
            if dead[holder]:
                return True
        known = self.observed.get(name)
        if known is None:
            known = self._observe(name, expiry, holder, now)
            if known is None:
                return False
            if not self._local_disk:
                # This host may have an old view of the holder's mark: another one decides in the next round.
                seen[name] = known
                return False
        elif known.times is not None:
            self._measure(known, known.times, expiry, holder)
        seen[name] = known
        return now - known.since >= known.lasts

    def _has_died(self, holder: str) -> bool:
        """Return whether a holder is known to be dead. The leases of a detached one end by time alone."""
        return not holder.startswith(DETACHED) and has_died(self._files.workers, holder, local=self._local_disk)

    def _observe(self, name: str, expiry: float, holder: str, now: float) -> ObservedLease | None:
        """Return a lease that is seen for the first time, or None if it is gone."""
        times = read_lease_times(self._files.lease, name)
        if times is None:
            return None
        # The kernel's time of the rename can be compared only with the system's clock. With another clock this is the
        # remaining time.
        known = ObservedLease(now, expiry - (times.made_at if self._clock is SYSTEM_CLOCK else self._clock.time()))
        if not self._local_disk and self._clock is SYSTEM_CLOCK:
            self._measure(known, times, expiry, holder)
        return known

    def _measure(self, known: ObservedLease, times: LeaseTimes, expiry: float, holder: str) -> None:
        """Set how long a lease on a shared file system lasts."""
        known.lasts, is_final = shared_length(expiry, times, self._marks.of(holder))
        known.times = None if is_final else times

    def _try_return(self, name: str, item: str) -> str | None:
        """Return a message's name in delay/, or None if it is gone or cannot be moved."""
        files = self._files
        try:
            moved = self._return(name, item)
        except OSError as error:
            if not is_about_one_file(error, files.tmp, files.lease, files.delay):
                raise
            # The messages behind it must not wait for it.
            self._blocked.add(name, error)
            return None
        if self._blocked:
            self._blocked.forget(name)
        return moved

    def _return(self, name: str, item: str) -> str | None:
        mine = self._own.get(item)
        moved = _return_lease(self._files, name, item, self._due(name))
        if mine is not None and mine.path == name:
            # This lease of this instance has expired.
            drop_lost(mine, self._own, self._losses)
        return moved

    def _due(self, name: str) -> float:
        """Return the time from which a returned message is due: for every host if the clock of this one is fast."""
        now = self._clock.time()
        if self._local_disk:
            return now
        times = read_lease_times(self._files.lease, name)
        return now if times is None else min(now, times.made_at)

    # -- leftovers ---------------------------------------------------------------------------------------------------

    async def _clean_up(self) -> None:
        """Remove the files of dead holders, and files that will not be finished."""
        dead = await self._dead_holders()
        now = self._clock.monotonic()
        if dead or now - self._tmp_cleaned_at >= _CLEAN_UP_TMP:
            self._tmp_cleaned_at = now
            await self._clean_up_tmp({parse_publisher(holder) for holder in dead})
            await clean_up_index(self._files, self._clock.time())
            await clean_up_app_keys(self._files)
        for holder in dead:
            # A holder that was stopped for a day may have continued in the meantime.
            if self._is_gone(holder):
                _unlink(holder, self._files.workers)
        files = self._files
        await self._records.clean_up(
            {"queue": files.queue, "delay": files.delay, "lease": files.lease, ".": files.base}
        )

    async def _dead_holders(self) -> list[str]:
        """Find the dead holders that left their file but no lease."""
        workers = await list_names(self._files.workers)
        self._abandoned.keep_only(frozenset(workers))
        if all(worker == self._holder() for worker in workers):
            return []
        leased = {
            parsed[2] for name in await list_names(self._files.lease) if (parsed := parse_lease(name)) is not None
        }
        return [
            worker for worker in workers if worker != self._holder() and worker not in leased and self._is_gone(worker)
        ]

    def _is_gone(self, worker: str) -> bool:
        """Return whether the process of a file in workers/ is dead."""
        if has_died(self._files.workers, worker, local=self._local_disk):
            return True
        return not self._local_disk and self._abandoned.has(worker)

    async def _clean_up_tmp(self, publishers: set[str]) -> None:
        oldest = time.time() - _STRAY
        for name in await list_names(self._files.tmp):
            message_id = parse_id(name) or ""
            if message_id.rpartition("-")[2] in publishers:
                _unlink(name, self._files.tmp)
                continue
            try:
                found = os.stat(name, dir_fd=self._files.tmp, follow_symlinks=False)
                is_old = found.st_mtime < oldest
                if name.startswith(TEMPORARY):
                    # The modification time of a cell is the moment at which it expires, and 0 if it does not.
                    is_old = found.st_ctime < oldest or (is_old and found.st_mtime_ns != 0)
                if is_old:
                    _unlink(name, self._files.tmp)
            except FileNotFoundError:
                # It was published in the meantime.
                continue
        if has_staged(self._files.tmp):
            # It takes long if a load died and left whole directories of messages. The thread has its own descriptor,
            # because it may outlive a close.
            await run_in_thread(BlockingCall.STAGE, _clean_up_staged, os.dup(self._files.tmp), oldest)
        await run_in_thread(BlockingCall.STAGE, _clean_up_loads, os.dup(self._files.base))


def _clean_up_staged(tmp: int, oldest: float) -> None:
    try:
        clean_up_staged(tmp, oldest)
    finally:
        os.close(tmp)


def _clean_up_loads(base: int) -> None:
    try:
        clean_up_loads(base)
    finally:
        os.close(base)


def _return_lease(files: QueueDir, name: str, item: str, now: float) -> str | None:
    """End a lease with one more try and one more death. Return its name in delay/, or None if it is gone."""
    parsed = parse_item(item)
    moved = delay_name(
        item if parsed is None else with_tries(item, parsed.tries + 1, parsed.deaths + 1), int(now * 1000)
    )
    record_move(files, item, Place("delay", moved))
    try:
        rename_file(name, moved, files.lease, files.delay)
    except FileNotFoundError:
        return None
    return moved


def _unlink(name: str, directory: int) -> None:
    try:
        try_unlink(name, directory)
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            raise
