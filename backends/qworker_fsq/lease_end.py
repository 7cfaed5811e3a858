"""A lease on an item that is worked on in place, and its four ends."""

from __future__ import annotations

from qworker.message import Lease, Message, SettleAction, Settlement
from qworker_fsq.layout import QueueDir
from qworker_fsq.lease import Claimed, exhausted, read_origin

__all__ = ["FsqLease", "Limits", "settle"]


class Limits:
    """When an item is given up, as `FSQ_MAX_TRIES` and `FSQ_TTL` say; 0: never.

    Args:
        max_tries: failed attempts.
        ttl: seconds since it was enqueued.
        keep_done: whether finished items are kept.
    """

    __slots__ = ("keep_done", "max_tries", "ttl")

    def __init__(self, max_tries: int, ttl: float, *, keep_done: bool) -> None:
        self.max_tries = max_tries
        self.ttl = ttl
        self.keep_done = keep_done


class FsqLease(Lease, kw_only=True, eq=False):
    """A locked item."""

    claimed: Claimed
    # How it ended; None while it is held.
    ended: Settlement | None = None


def make_message(files: QueueDir, claimed: Claimed, body: bytes) -> Message:
    """The message in an item."""
    item = claimed.item
    return Message(
        id=item.id,
        queue=files.name,
        body=body,
        tries=item.tries,
        enqueued_at=item.enqueued_at,
        argv=item.arguments,
        # Only what was moved here has a number longer than any pid's.
        original_id=read_origin(claimed.fd) if len(item.pid) > 12 else None,
    )


def settle(settlement: Settlement, lease: FsqLease, now: float, limits: Limits) -> frozenset[int] | None:
    """End a lease; the descriptors of the directories that changed, or None when it is lost.

    Raises:
        OSError: it is held as before, or ended, which a repetition tells.
    """
    if lease.ended is not None:
        # Ended before by the same call, or acked twice: perhaps not yet on the disk.
        same = lease.ended is settlement or lease.ended.action is settlement.action is SettleAction.ACK
        return frozenset({lease.claimed.files.queue}) if same else None
    if lease.claimed.fd < 0:
        return None
    changed = _end(settlement, lease.claimed, now, limits)
    if changed is not None:
        lease.ended = settlement
    return changed


def _end(settlement: Settlement, claimed: Claimed, now: float, limits: Limits) -> frozenset[int] | None:
    files = claimed.files
    due = now + settlement.delay if settlement.delay > 0 else None
    if settlement.action is SettleAction.ACK:
        ended, changed = claimed.finish(keep=limits.keep_done), {files.queue, files.done}
    elif settlement.action is SettleAction.FAIL_PERM:
        ended, changed = claimed.fail(settlement.error), {files.queue, files.fail}
    elif settlement.action is SettleAction.RELEASE:
        ended, changed = claimed.is_ours if due is None else claimed.postpone(due), set[int]()
    else:
        item = claimed.item
        why = exhausted(item.tries + 1, item.enqueued_at, now, limits.max_tries, limits.ttl)
        if why is None:
            ended, changed = claimed.retry(due), {files.queue}
        else:
            # The news first.
            reason = why if settlement.error is None else f"{settlement.error}\n\n{why}"
            ended, changed = claimed.fail(reason), {files.queue, files.fail}
    return frozenset(changed) if ended else None
