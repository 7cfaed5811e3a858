"""From lease/ to the place of a message after its lease: each end is one rename or unlink of one name."""

from __future__ import annotations

import os
from collections.abc import Callable

from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import has_entry, try_unlink
from qworker.message import SettleAction, Settlement
from qworker_file.id_index import remove_id
from qworker_file.id_place import Place, record_move
from qworker_file.lease import FileLease, try_rename
from qworker_file.names import delay_name, hold_end_ms, reason_name, with_tries

__all__ = ["end_lease", "release"]


def end_lease(
    settlement: Settlement, lease: FileLease, now: float, finished: list[int], *, keep_done: bool
) -> frozenset[int] | None:
    """End a lease and return the descriptors of the directories that changed, or None if it is lost.

    Args:
        settlement: The settlement.
        lease: The lease.
        now: Unix seconds, by the store's clock.
        finished: Receives the descriptors of acked files, which the caller closes (`close_all`): no process waits for
            their locks.
        keep_done: Whether acked files are kept in done/.

    Raises:
        OSError: It is held as before, or has ended. A repetition shows which.
    """
    if lease.ended is not None:
        # It was ended before by the same call, or acked twice: perhaps it is not yet on the disk.
        same = lease.ended is settlement or lease.ended.action is settlement.action is SettleAction.ACK
        return frozenset({lease.files.lease}) if same else None
    if lease.lost:
        return None
    lease.is_ending = True
    step = _STEPS[settlement.action]
    changed = step(settlement, lease, now) if settlement.action is not SettleAction.ACK or keep_done else _unlink(lease)
    if changed is None:
        lease.lost = True
    else:
        if hold_end_ms(lease.item) is not None:
            # The hold is as durable as the settlement.
            changed |= {lease.files.names}
        lease.ended = settlement
        if settlement.action is SettleAction.ACK and lease.fd >= 0:
            finished.append(lease.fd)
            lease.fd = -1
    lease.close()
    return changed


def _unlink(lease: FileLease) -> frozenset[int] | None:
    files = lease.files
    if not try_unlink(lease.path, files.lease):
        return None
    if lease.indexed:
        remove_id(files, lease.message.id, lease.inode, lease.item)
    return frozenset({files.lease})


def _ack(_settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    _record(lease, "done", lease.item)
    return _finish(lease, lease.files.done, now)


def _fail(settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    files = lease.files
    # The reason comes first: a failed message is never seen without it. A stale holder leaves no reason behind.
    if settlement.error is not None:
        if not has_entry(lease.path, files.lease):
            return None
        lease.reason_fd = write_reason(files.fail, reason_name(lease.item), settlement.error, mode=files.item_mode)
    _record(lease, "fail", lease.item)
    changed = _finish(lease, files.fail, now)
    if changed is None and settlement.error is not None and not has_entry(lease.item, files.fail):
        try_unlink(reason_name(lease.item), files.fail)
    return changed


def _finish(lease: FileLease, target: int, now: float) -> frozenset[int] | None:
    if not try_rename(lease.path, lease.item, lease.files.lease, target, lease.fd, lease.token):
        return None
    # The time at which it finished, which is never before its token.
    moment = max(int(now * 1e9), lease.token)
    try:
        os.utime(lease.fd, ns=(moment, moment))
    except PermissionError:
        # It is another user's file, which is shown with its present time.
        pass
    return frozenset({lease.files.lease, target})


def _retry(settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    message = lease.message
    item = with_tries(lease.item, message.tries + 1, message.deaths + 1 if settlement.died else 0)
    return _delay(lease, item, now + max(settlement.delay, 0.0))


def _release(settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    message = lease.message
    item = with_tries(lease.item, message.tries) if message.deaths and settlement.survived else lease.item
    if settlement.delay > 0:
        return _delay(lease, item, now + settlement.delay)
    if not lease.locked or message.tries:
        # Not queue/: an fsq program could take it from there while this process does not have the lock, but not from
        # delay/. And there a message with tries is found without listing queue/.
        return _delay(lease, item, now)
    files = lease.files
    _record(lease, "queue", lease.item)
    if not try_rename(lease.path, lease.item, files.lease, files.queue, lease.fd, lease.token):
        return None
    lease.released_as, lease.is_in_queue = lease.item, True
    return frozenset({files.lease, files.queue})


def _delay(lease: FileLease, item: str, due: float) -> frozenset[int] | None:
    files = lease.files
    name = delay_name(item, int(due * 1000))
    _record(lease, "delay", name)
    if not try_rename(lease.path, name, files.lease, files.delay, lease.fd, lease.token):
        return None
    lease.released_as = name
    return frozenset({files.lease, files.delay})


def _record(lease: FileLease, directory: str, name: str) -> None:
    """Record the place of a message before it moves there. The record of a stale holder is wrong, and is corrected."""
    if lease.indexed:
        record_move(lease.files, lease.item, Place(directory, name))


_Step = Callable[[Settlement, FileLease, float], "frozenset[int] | None"]
_STEPS: dict[SettleAction, _Step] = {
    SettleAction.ACK: _ack,
    SettleAction.FAIL_PERM: _fail,
    SettleAction.FAIL_TMP: _retry,
    SettleAction.RELEASE: _release,
}


def release(lease: FileLease, now: float) -> None:
    """Undo a claim that no caller has seen."""
    end_lease(Settlement(lease=lease, action=SettleAction.RELEASE), lease, now, [], keep_done=True)
