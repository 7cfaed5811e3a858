"""The four ends of a lease on an item."""

from __future__ import annotations

from qworker.message import SettleAction, Settlement
from qworker_fsq.environment import ItemLimits
from qworker_fsq.lease import ClaimedItem, FsqLease

__all__ = ["end_lease"]


def end_lease(settlement: Settlement, lease: FsqLease, now: float, limits: ItemLimits) -> frozenset[int] | None:
    """End a lease and return the descriptors of the directories that changed, or None if it is lost.

    Raises:
        OSError: It is held as before, or has ended. A repetition shows which.
    """
    if lease.ended is not None:
        # It was ended before by the same call, or acked twice: perhaps it is not yet on the disk.
        same = lease.ended is settlement or lease.ended.action is settlement.action is SettleAction.ACK
        return frozenset({lease.claimed.files.queue}) if same else None
    if lease.claimed.fd < 0:
        return None
    changed = _end(settlement, lease.claimed, now, limits)
    if changed is not None:
        lease.ended = settlement
    return changed


def _end(settlement: Settlement, claimed: ClaimedItem, now: float, limits: ItemLimits) -> frozenset[int] | None:
    files = claimed.files
    due = now + settlement.delay if settlement.delay > 0 else None
    if settlement.action is SettleAction.ACK:
        ended, changed = claimed.finish(keep=limits.keep_done), {files.queue, files.done}
    elif settlement.action is SettleAction.FAIL_PERM:
        ended, changed = claimed.fail(settlement.error), {files.queue, files.fail}
    elif settlement.action is SettleAction.RELEASE:
        ended, changed = claimed.is_ours if due is None else claimed.retry_later(due), set[int]()
    else:
        item = claimed.item
        exhausted = limits.why_exhausted(item.tries + 1, item.enqueued_at, now)
        if exhausted is None:
            ended, changed = claimed.retry(due), {files.queue}
        else:
            # The error comes first.
            reason = exhausted if settlement.error is None else f"{settlement.error}\n\n{exhausted}"
            ended, changed = claimed.fail(reason), {files.queue, files.fail}
    return frozenset(changed) if ended else None
