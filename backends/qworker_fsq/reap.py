"""Making due items ready, and pruning finished ones."""

from __future__ import annotations

import os
from collections.abc import Iterable

from qworker.kit.directory.blocked import BlockedRecords
from qworker.kit.directory.retention import prune
from qworker.kit.retention import RetentionPolicy
from qworker_fsq.item_file import reason_name
from qworker_fsq.lease import FsqLease
from qworker_fsq.open_queue import OpenQueue
from qworker_fsq.store import Store

__all__ = ["reap"]

# How long an unfinished file may be in tmp/.
_UNFINISHED = RetentionPolicy(age=36 * 3600.0)


async def reap(store: Store, queue: OpenQueue, *, expire: bool) -> int:
    """Make items ready that are due or whose lease is over, and return their number.

    Args:
        store: The store.
        queue: The queue.
        expire: Whether leases end by time, because the holders are outside this process.

    Raises:
        OSError: The store failed.
    """
    count = queue.take_due()
    # The worker has given up the others whose outcome could not be stored.
    leases = tuple(queue.own.values()) if expire else queue.unsettled
    count += _expire(queue, leases, store.clock.monotonic())
    if queue.is_pruning_due():
        # It is no use of the queue that keeps it open.
        queue.files.users += 1
        try:
            await _prune(store, queue)
        finally:
            queue.files.users -= 1
    if count:
        store.notify(queue)
    return count


def _expire(queue: OpenQueue, leases: Iterable[FsqLease], now: float) -> int:
    """End those of the leases whose time has passed, with one more try, and return their number."""
    count = 0
    for lease in leases:
        name = lease.claimed.name
        if lease.deadline <= now:
            try:
                count += lease.claimed.retry()
            except OSError as error:
                # The leases behind it must end too.
                queue.end_blocked(lease, name, error)
                continue
            queue.on_lease_end(lease, name, stays=True)
            queue.on_settled(name)
    return count


async def _prune(store: Store, queue: OpenQueue) -> None:
    files, options, now = queue.files, store.options, store.clock.time()
    await prune(files.tmp, _UNFINISHED, now, stuck=queue.stuck_in("tmp"), finished_at=_changed_at, hidden=True)
    await BlockedRecords(files.base).clean_up({"queue": files.queue})
    if options.keep_done.limits:
        await prune(files.done, options.keep_done, now, stuck=queue.stuck_in("done"), finished_at=_changed_at)
    if options.keep_failed.limits:
        stuck, keep = queue.stuck_in("fail"), options.keep_failed
        await prune(files.fail, keep, now, stuck=stuck, finished_at=_changed_at, reason_of=reason_name)


def _changed_at(status: os.stat_result) -> float:
    """Return when a file was last changed, which is when its item finished and was renamed.

    Its mtime is its producer's.
    """
    return status.st_ctime
