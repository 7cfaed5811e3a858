"""Settlements: each is one rename, under the message's lock and conditional on the token (see `message_lock`)."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Sequence

from qworker.errors import BackendUnavailable
from qworker.kit.files import has_entry
from qworker.kit.own_files import write_own
from qworker.kit.settle import Unstored
from qworker.kit.store_errors import FULL
from qworker.message import SettleAction, Settlement
from qworker_mq.daemons import Trash
from qworker_mq.layout import QueueDirs, try_rename
from qworker_mq.lease_state import LeaseState
from qworker_mq.message_lock import LOCK_TIMEOUT, MessageLocked, NotARegularFile
from qworker_mq.store import OpenQueue, Store
from qworker_mq.window import SLICE

__all__ = ["move_to_failed", "release", "settle_messages", "settle_one"]

_LOCKED = "another process holds a message lock and does not release it: check for a stopped process"
# Seconds that one locked message may delay the others of its batch. A transition takes much less.
_SHORT = 0.02


async def settle_messages(store: Store, trash: Trash, settlements: Sequence[Settlement]) -> list[Settlement]:
    """End leases, sync the directories, and return the refused settlements.

    Raises:
        SettledInPart: The others are stored.
        OSError: None is stored.
        BackendUnavailable: The only one is not stored: another process holds its lock.
    """
    refused: list[Settlement] = []
    acked: list[str] = []
    touched: set[int] = set()
    unstored = Unstored()
    until = time.monotonic() + SLICE
    patience = LOCK_TIMEOUT if len(settlements) == 1 else _SHORT
    for settlement in settlements:
        if unstored.has_enough:
            unstored.add(settlement)
            continue
        # A deleted queue has no lease to end.
        queue = store.get(settlement.lease.message.queue)
        try:
            ended = queue is not None and await _settle_when_unlocked(store, settlement, queue.dirs, patience)
        except OSError as error:
            unstored.add(settlement, error)
            continue
        if queue is None or not ended:
            refused.append(settlement)
        else:
            touched |= _note_settled(store, queue, settlement, acked)
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + SLICE
    if touched:
        await store.sync_directories(store.root.delay, *touched)
    trash.unlink(acked)
    unstored.raise_error(settlements, refused)
    return refused


async def _settle_when_unlocked(store: Store, settlement: Settlement, dirs: QueueDirs, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            return settle_one(store, settlement, dirs)
        except NotARegularFile:
            return False
        except MessageLocked:
            if time.monotonic() >= deadline:
                if patience < LOCK_TIMEOUT:
                    raise BlockingIOError(errno.EWOULDBLOCK, _LOCKED) from None
                raise BackendUnavailable(_LOCKED) from None
            await asyncio.sleep(0.001)


def _note_settled(store: Store, queue: OpenQueue, settlement: Settlement, acked: list[str]) -> set[int]:
    """Record what a settlement did, and return the directories to sync."""
    message = settlement.lease.message
    if settlement.action is SettleAction.ACK:
        acked.append(f"{message.queue}:{message.id}")
        return {store.root.remove}
    if settlement.action is SettleAction.FAIL_PERM:
        return {queue.dirs.fail, store.root.reason}
    if settlement.delay > 0:
        return {queue.dirs.due}
    queue.window.add(message.id)
    store.wake(message.queue)
    return {queue.dirs.ready}


def settle_one(store: Store, settlement: Settlement, dirs: QueueDirs) -> bool:
    """End one lease, and return whether it was still valid.

    Raises:
        MessageLocked: Another process is moving the message.
    """
    lease = settlement.lease
    name = f"{lease.message.queue}:{lease.message.id}"
    with store.lock_lease(lease.message.queue, lease.message.id, lease.token) as locked:
        if locked is None:
            return False
        _, state = locked
        if settlement.action is SettleAction.ACK:
            return _ack(store, name)
        if settlement.action is SettleAction.FAIL_PERM:
            return _fail(store, name, lease.message.id, dirs, state, settlement.error or "")
        failed = settlement.action is SettleAction.FAIL_TMP
        after = state.without_lease(tries=state.tries + failed, error=settlement.error)
        due_at = store.clock.time() + settlement.delay if settlement.delay > 0 else 0.0
        return release(store, name, lease.message.id, dirs, state, after, due_at)


def _ack(store: Store, name: str) -> bool:
    if not try_rename(name, store.root.delay, name, store.root.remove):
        return False
    store.lease_states.delete(name)
    return True


def _fail(store: Store, name: str, message_id: str, dirs: QueueDirs, state: LeaseState, error: str) -> bool:
    # The reason is written first: a message in fail/ always has one.
    _write_reason(store, name, error)
    store.lease_states.write(name, state.without_lease())
    return _move(store, name, message_id, dirs.fail, state)


def release(
    store: Store,
    name: str,
    message_id: str,
    dirs: QueueDirs,
    before: LeaseState,
    after: LeaseState,
    due_at: float,
) -> bool:
    """Return a leased message, which this process has locked, to its queue.

    Args:
        store: The opened root.
        name: The message's name in delay/.
        message_id: Its id.
        dirs: The directories of its queue.
        before: Its state until now, which it keeps if it cannot be moved.
        after: Its state from now on.
        due_at: When it becomes ready, in Unix seconds. 0: now.

    Returns:
        Whether the message was still in delay/. If not, a foreign program has moved it.
    """
    # The state is written first: a stale holder finds its lease ended before the message can be leased again.
    store.lease_states.write(name, after)
    if due_at:
        return _move(store, name, f"{int(due_at * 1000)}.{message_id}", dirs.due, before)
    return _move(store, name, message_id, dirs.ready, before)


def _move(store: Store, name: str, target: str, destination: int, before: LeaseState) -> bool:
    """Move a leased message whose new state is written, and return whether it was still in delay/.

    Raises:
        OSError: It cannot be moved, and its lease is as before: the same settlement can be repeated.
    """
    try:
        return try_rename(name, store.root.delay, target, destination)
    except OSError:
        if not has_entry(name, store.root.delay):
            # The reply was lost: the rename has happened.
            return True
        store.lease_states.write(name, before)
        raise


def move_to_failed(store: Store, name: str, directory: int, queue: OpenQueue, message_id: str) -> None:
    """Move a file that is not regular to the failed messages, with the reason."""
    _write_reason(store, f"{queue.name}:{message_id}", "this is not a regular file, so it is not a message")
    try_rename(name, directory, message_id, queue.dirs.fail)


def _write_reason(store: Store, name: str, error: str) -> None:
    """Store the reason of a failure. If the store is full, the message is kept without it."""
    try:
        os.close(write_own(name, store.root.reason, error.encode(errors="replace")))
    except OSError as found:
        if found.errno not in FULL:
            raise
