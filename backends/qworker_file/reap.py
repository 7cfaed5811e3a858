"""Leases that ended without their holder's word: its life sign is gone, or its time is over.

Time is measured by this process's monotonic clock from its first sight of a lease's name: every extension makes another name, so one
that has not changed for the length of its lease is over, and no step of any wall clock takes a living lease early.
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
from qworker.kit.files import list_names
from qworker_file.holder import has_died, publisher_of
from qworker_file.id_index import sweep_index
from qworker_file.layout import QueueDir
from qworker_file.lease import FileLease
from qworker_file.names import delay_name, id_of, parse_item, parse_lease, with_tries

__all__ = ["Reaper", "return_lease"]

_TURN = 0.002
# Seconds between two looks at things that hurry nobody.
_HOUSEKEEPING = 10.0
_STRAY_LOOKS = 600.0
# Seconds after which an unfinished file in tmp/ is nobody's.
_STRAY = 36 * 3600.0


class _Seen(msgspec.Struct, gc=False):
    """A lease of another holder."""

    # Monotonic seconds of the first sight, and how long the lease was then known to last.
    since: float
    lasts: float


class Reaper:
    """Reaps one queue.

    Args:
        files: the queue.
        clock: the store's clock.
        local_disk: whether no other machine can see the directory.
        own: this instance's leases, by item.
        holder: this instance's own name.
    """

    def __init__(
        self, files: QueueDir, clock: Clock, *, local_disk: bool, own: dict[str, FileLease], holder: Callable[[], str]
    ) -> None:
        self._files = files
        self._clock = clock
        self._local_disk = local_disk
        self._own = own
        self._holder = holder
        self._seen: dict[str, _Seen] = {}
        self._swept_at = self._tmp_swept_at = float("-inf")

    async def reap(self) -> list[str]:
        """Return leases that are over to delay/, due now and with one more try; their names there.

        Raises:
            OSError: the store is in trouble; what was returned is returned.
        """
        names = await list_names(self._files.lease)
        now = self._clock.monotonic()
        dead: dict[str, bool] = {}
        seen: dict[str, _Seen] = {}
        returned: list[str] = []
        turn_ends = time.perf_counter() + _TURN
        for name in names:
            parsed = parse_lease(name)
            if parsed is None:
                continue
            item, expiry_ms, holder = parsed
            if self._is_over(name, item, expiry_ms / 1000, holder, dead=dead, seen=seen, now=now):
                moved = self._return(name, item)
                if moved is not None:
                    returned.append(moved)
            if time.perf_counter() > turn_ends:
                self._seen.update(seen)
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN
        self._seen = seen
        if now - self._swept_at >= _HOUSEKEEPING:
            self._swept_at = now
            await self._sweep()
        return returned

    def _is_over(
        self,
        name: str,
        item: str,
        expiry: float,
        holder: str,
        *,
        dead: dict[str, bool],
        seen: dict[str, _Seen],
        now: float,
    ) -> bool:
        if holder == self._holder():
            mine = self._own.get(item)
            if mine is not None:
                # Its name may have changed since the listing; then the extension moved the deadline too.
                return mine.path == name and now >= mine.deadline
        else:
            if holder not in dead:
                dead[holder] = has_died(self._files.workers, holder, local=self._local_disk)
            if dead[holder]:
                return True
        known = self._seen.get(name)
        if known is None:
            lasts = self._lasts(name, expiry)
            if lasts is None:
                return False
            known = _Seen(now, lasts)
        seen[name] = known
        return now - known.since >= known.lasts

    def _lasts(self, name: str, expiry: float) -> float | None:
        """How long a lease lasts from its making; None when it is gone."""
        try:
            made_at = os.stat(name, dir_fd=self._files.lease, follow_symlinks=False).st_ctime
        except FileNotFoundError:
            return None
        # The kernel's time of the rename is comparable with the system's clock only; another clock gives what is left of the lease.
        return expiry - (made_at if self._clock is SYSTEM_CLOCK else self._clock.time())

    def _return(self, name: str, item: str) -> str | None:
        mine = self._own.get(item)
        moved = return_lease(self._files, name, item, self._clock.time())
        if mine is not None and mine.path == name:
            # Ours, and over: its handler is told so by its next extension or its end.
            mine.lost = True
            mine.close()
            del self._own[item]
        return moved

    # -- housekeeping ------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove the files of dead holders, and what nobody will finish."""
        dead = await self._dead_holders()
        now = self._clock.monotonic()
        if dead or now - self._tmp_swept_at >= _STRAY_LOOKS:
            self._tmp_swept_at = now
            await self._sweep_tmp({publisher_of(holder) for holder in dead})
            await sweep_index(self._files)
        for holder in dead:
            _unlink(holder, self._files.workers)

    async def _dead_holders(self) -> list[str]:
        """Holders that left their file and no lease."""
        workers = await list_names(self._files.workers)
        if all(worker == self._holder() for worker in workers):
            return []
        leased = {
            parsed[2] for name in await list_names(self._files.lease) if (parsed := parse_lease(name)) is not None
        }
        return [
            worker
            for worker in workers
            if worker != self._holder()
            and worker not in leased
            and has_died(self._files.workers, worker, local=self._local_disk)
        ]

    async def _sweep_tmp(self, publishers: set[str]) -> None:
        oldest = time.time() - _STRAY
        for name in await list_names(self._files.tmp):
            message_id = id_of(name) or ""
            if message_id.rpartition("-")[2] in publishers:
                _unlink(name, self._files.tmp)
                continue
            try:
                if os.stat(name, dir_fd=self._files.tmp, follow_symlinks=False).st_mtime < oldest:
                    _unlink(name, self._files.tmp)
            except FileNotFoundError:
                # Renamed into sight meanwhile.
                continue
        if has_staged(self._files.tmp):
            # Long, where a job died: whole directories of messages. With a descriptor of its own, for it outlives a close.
            await asyncio.to_thread(_sweep_staged, os.dup(self._files.tmp), oldest)


def _sweep_staged(tmp: int, oldest: float) -> None:
    try:
        clean_up_staged(tmp, oldest)
    finally:
        os.close(tmp)


def return_lease(files: QueueDir, name: str, item: str, now: float) -> str | None:
    """Return one lease, whoever holds it, with one more try; its name in delay/, or None when it is gone.

    Raises:
        OSError: it is leased as before.
    """
    parsed = parse_item(item)
    moved = delay_name(item if parsed is None else with_tries(item, parsed.tries + 1), int(now * 1000))
    try:
        os.rename(name, moved, src_dir_fd=files.lease, dst_dir_fd=files.delay)
    except FileNotFoundError:
        return None
    return moved


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        # Another reaper was faster.
        pass
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            raise
