"""Ending leases: one rename each, from a name that only the holder knows."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from qworker.kit.files import has_entry, try_unlink
from qworker.kit.planted import rename_file
from qworker.kit.settle import Unstored
from qworker.kit.store_errors import store_errors
from qworker.message import SettleAction, Settlement
from qworker_vsqs.lease import VsqsLease
from qworker_vsqs.names import Unit, leased_name
from qworker_vsqs.queue_dir import QueueDirectory
from qworker_vsqs.store import VsqsStore

__all__ = ["settle_in_queue"]


async def settle_in_queue(
    store: VsqsStore, queue: QueueDirectory, settlements: Sequence[Settlement]
) -> list[Settlement]:
    """End leases of one queue and return the refused settlements."""
    # Descriptors to sync and close.
    files: list[int] = []
    # The leases that were ended, also when a later one raises.
    ended: list[VsqsLease] = []
    unstored = Unstored()
    try:
        with store_errors(f"settle messages of {queue.name}"):
            try:
                refused = await _end_leases(store, queue, settlements, files, ended, unstored)
            finally:
                if ended:
                    await store.sync(queue, files, has_info=bool(files))
            unstored.raise_error(settlements, refused)
    except BaseException:
        # They are ended, but perhaps not durably: a repetition succeeds, and syncs them.
        for lease in ended:
            lease.is_unsynced = True
        raise
    finally:
        if any(settlement.action is not SettleAction.ACK for settlement in settlements):
            store.wake_all()
    return refused


async def _end_leases(
    store: VsqsStore,
    queue: QueueDirectory,
    settlements: Sequence[Settlement],
    files: list[int],
    ended: list[VsqsLease],
    unstored: Unstored,
) -> list[Settlement]:
    refused: list[Settlement] = []
    with_info: list[Settlement] = []
    for settlement in settlements:
        lease = settlement.lease
        if not isinstance(lease, VsqsLease):
            refused.append(settlement)
        elif lease.is_unsynced:
            lease.is_unsynced = False
            ended.append(lease)
        elif settlement.action is SettleAction.ACK or (
            settlement.action is SettleAction.RELEASE and settlement.delay <= 0
        ):
            _ack_or_release(queue, settlement, lease, ended, refused, unstored)
        else:
            with_info.append(settlement)
    if with_info:
        now = store.clock.time()
        async with queue.locked():
            for settlement in with_info:
                try:
                    fd = _fail_or_delay(queue, store.options.unit, settlement, now)
                except OSError as error:
                    unstored.add(settlement, error)
                    continue
                if fd is None:
                    refused.append(settlement)
                else:
                    files.append(fd)
                    assert isinstance(settlement.lease, VsqsLease)
                    ended.append(settlement.lease)
    return refused


def _ack_or_release(
    queue: QueueDirectory,
    settlement: Settlement,
    lease: VsqsLease,
    ended: list[VsqsLease],
    refused: list[Settlement],
    unstored: Unstored,
) -> None:
    try:
        done = _release(queue, lease) if settlement.action is SettleAction.RELEASE else _ack(queue, lease)
    except OSError as error:
        unstored.add(settlement, error)
        return
    if done:
        ended.append(lease)
    else:
        refused.append(settlement)


def _release(queue: QueueDirectory, lease: VsqsLease) -> bool:
    if not queue.try_rename(leased_name(lease.number, lease.expiry), str(lease.number)):
        return False
    queue.window.add(str(lease.number))
    return True


def _ack(queue: QueueDirectory, lease: VsqsLease) -> bool:
    if not try_unlink(leased_name(lease.number, lease.expiry), queue.fd):
        return False
    queue.delete_info(lease.number)
    return True


def _fail_or_delay(queue: QueueDirectory, unit: Unit, settlement: Settlement, now: float) -> int | None:
    """End a lease whose end must be recorded. Return the descriptor of the info, or None if the lease is lost."""
    lease = settlement.lease
    assert isinstance(lease, VsqsLease)
    number, expiry = lease.number, lease.expiry
    error = None if settlement.error is None else settlement.error.encode(errors="replace").decode()
    replace = msgspec.structs.replace
    if settlement.action is SettleAction.FAIL_PERM:
        return _fail(queue, number, expiry, error, now)
    due = unit.ticks(now + settlement.delay) if settlement.delay > 0 else None
    target = str(number) if due is None else leased_name(number, due)
    if settlement.action is SettleAction.FAIL_TMP:
        fd = queue.end_lease(
            number,
            expiry,
            target,
            lambda info: replace(info, tries=info.tries + 1, after=expiry, due=due, error=error),
        )
    else:
        fd = queue.end_lease(number, expiry, target, lambda info: replace(info, due=due))
    if fd is not None:
        queue.window.add(target)
    return fd


def _fail(queue: QueueDirectory, number: int, expiry: int, error: str | None, now: float) -> int | None:
    """Move a leased message to fail/, after its reason is written.

    Returns:
        The descriptor of the info; None if the lease is lost.
    """
    name = leased_name(number, expiry)
    if not has_entry(name, queue.fd):
        return None
    before = queue.read_info(number)
    fd = queue.write_info(number, msgspec.structs.replace(before, error=error, failed_at=now, due=None))
    try:
        rename_file(name, str(number), queue.fd, queue.fail)
    except FileNotFoundError:
        os.close(queue.write_info(number, before))
        os.close(fd)
        return None
    return fd
