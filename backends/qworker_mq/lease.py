"""Leases: take them, extend them, and find them for the clients of a server."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import msgspec

from qworker.kit.body_slices import ON_LOOP, OwnDescriptor, read_in_slices
from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.files import read_all
from qworker.kit.store_errors import store_errors
from qworker.message import Lease, Message, SettleAction, Settlement
from qworker.names import check_queue
from qworker_mq.layout import try_rename
from qworker_mq.lease_state import LeaseState, MqLease, change_time_token
from qworker_mq.message_lock import LOCK_TIMEOUT, MessageLocked, NotARegularFile, lock_message
from qworker_mq.reap import StoreReaper
from qworker_mq.settle import move_to_failed, settle_one
from qworker_mq.store import OpenQueue, Store
from qworker_mq.window import SLICE

__all__ = ["RemoteMqLeases", "extend_leases", "lease_messages"]

P = ParamSpec("P")
T = TypeVar("T")


class RemoteMqLeases:
    """Leases whose holders are not in this process. See `qworker.backend.RemoteLeases`.

    Args:
        open_store: Returns the opened store.
    """

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open_store = open_store

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease that has this token."""
        with store_errors(f"find a lease of {queue!r}"):
            store = self._open_store()
            found = _retry_while_locked(_find_lease, store, check_queue(queue), message_id, token)
            if found is not None:
                await _finish_reading(found)
            return found


async def lease_messages(store: Store, reaper: StoreReaper, queue: str, limit: int, visibility: float) -> list[Lease]:
    """Lease up to `limit` ready messages of a queue, without waiting for them."""
    open_queue = store.get(queue)
    if open_queue is None:
        return []
    async with open_queue.fetching:
        if store.is_paused(queue):
            return []
        reaper.promote(open_queue)
        return await _lease_ready(store, reaper, open_queue, limit, visibility)


async def _lease_ready(
    store: Store, reaper: StoreReaper, queue: OpenQueue, limit: int, visibility: float
) -> list[Lease]:
    leases: list[MqLease] = []
    locked: list[str] = []
    holder = store.holder()
    until = time.monotonic() + SLICE
    queue.retry_blocked()
    try:
        while len(leases) < limit:
            message_id = await queue.window.take()
            if message_id is None:
                break
            if message_id in queue.blocked:
                continue
            lease = _try_lease(store, queue, message_id, visibility, holder, locked)
            if lease is not None:
                queue.blocked.forget(message_id)
                reaper.note(lease, visibility, holder)
                leases.append(lease)
                if lease.unread is not None:
                    # The caller begins to extend these leases before it gets more.
                    await _finish_reading(lease)
                    break
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + SLICE
    except BaseException as error:
        # The call was cancelled, or the store failed: the caller does not get these leases.
        _release_all(store, queue, leases)
        if not (isinstance(error, OSError) and _is_unreadable(store, error, leases)):
            raise
        queue.blocked.add(leases[-1].message.id, error)
        return []
    finally:
        for message_id in locked:
            queue.window.add(message_id)
    return list(leases)


def _is_unreadable(store: Store, error: OSError, leases: Sequence[MqLease]) -> bool:
    """Return whether the body of the last lease cannot be read, and everything else can."""
    return bool(leases) and leases[-1].unread is not None and is_about_one_file(error, store.root.tmp)


async def _finish_reading(lease: MqLease) -> None:
    """Read a body off the loop that was left unread.

    Raises:
        OSError: It cannot be read.
    """
    if lease.unread is not None:
        lease.message = msgspec.structs.replace(lease.message, body=await read_in_slices(lease.unread))
        lease.unread = None


def _try_lease(
    store: Store, queue: OpenQueue, message_id: str, visibility: float, holder: str, locked: list[str]
) -> MqLease | None:
    """Lease a ready message. None: it is gone, or locked, or it is too large or not a message."""
    try:
        return _lease_one(store, queue, message_id, visibility, holder)
    except MessageLocked:
        locked.append(message_id)
        return None
    except NotARegularFile:
        move_to_failed(store, message_id, queue.dirs.ready, queue, message_id)
        return None
    except FileNotFoundError:
        # Not the message, but a directory of the root is missing.
        raise
    except OSError as error:
        if not is_about_one_file(error, store.root.tmp):
            raise
        queue.blocked.add(message_id, error)
        return None


def _lease_one(store: Store, queue: OpenQueue, message_id: str, visibility: float, holder: str) -> MqLease | None:
    ready = queue.dirs.ready
    fd = lock_message(message_id, ready)
    if fd < 0:
        return None
    body: bytes | OwnDescriptor = b""
    try:
        most = store.options.max_body
        if most is not None and (size := os.fstat(fd).st_size) > most:
            queue.blocked.add_too_large(message_id, size, most)
            return None
        body = _read_body(fd)
        name = f"{queue.name}:{message_id}"
        state = store.lease_states.read(name)
        if not try_rename(message_id, ready, name, store.root.delay):
            return None
        try:
            return _make_lease(store, fd, queue.name, message_id, body, state, visibility, holder)
        except OSError:
            # The caller does not get the lease.
            try_rename(name, store.root.delay, message_id, ready)
            queue.window.add(message_id)
            raise
    finally:
        if not isinstance(body, bytes):
            _unlock(fd)
        os.close(fd)


def _make_lease(
    store: Store,
    fd: int,
    queue: str,
    message_id: str,
    body: bytes | OwnDescriptor,
    state: LeaseState,
    visibility: float,
    holder: str,
) -> MqLease:
    now = store.clock.time()
    found = os.fstat(fd)
    name = f"{queue}:{message_id}"
    # A ready message that still has a lease: a foreign mover ended the lease, which counts as expired.
    tries = state.tries + store.lease_states.has_returned(name, state)
    token = max(state.token + 1, change_time_token(found.st_ctime_ns))
    has_state = bool(state.token or tries or state.origin or holder or store.keeps_all_states(visibility))
    if not has_state:
        store.lease_states.note_stateless(name)
    else:
        store.lease_states.write(
            name,
            LeaseState(
                tries=tries,
                token=token,
                visibility=visibility,
                expires_at=now + visibility,
                holder=holder,
                moved=found.st_ctime_ns,
                error=state.error,
                origin=state.origin,
            ),
        )
    origin = state.origin or None
    message = Message(
        id=message_id,
        queue=queue,
        body=body if isinstance(body, bytes) else b"",
        tries=tries,
        enqueued_at=found.st_mtime,
        original_id=origin,
    )
    return MqLease(
        message=message,
        token=token,
        expires_at=now + visibility,
        moved=found.st_ctime_ns,
        has_state=has_state,
        unread=None if isinstance(body, bytes) else body,
    )


def _release_all(store: Store, queue: OpenQueue, leases: Sequence[Lease]) -> None:
    for lease in leases:
        try:
            if settle_one(store, Settlement(lease=lease, action=SettleAction.RELEASE), queue.dirs):
                queue.window.add(lease.message.id)
        except MessageLocked:
            # The lease ends when it expires.
            continue


def extend_leases(store: Store, reaper: StoreReaper, leases: Sequence[Lease], visibility: float) -> list[Lease]:
    """Extend leases, and return the lost ones. Blocks while another process moves a message. Any thread can call it."""
    lost: list[Lease] = []
    with store.extend_lock:
        holder = store.holder()
        for lease in leases:
            if store.closed or not _retry_while_locked(_extend_one, store, lease, visibility):
                lost.append(lease)
            elif isinstance(lease, MqLease):
                reaper.note(lease, visibility, holder)
    return lost


def _extend_one(store: Store, lease: Lease, visibility: float) -> bool:
    with store.lock_lease(lease.message.queue, lease.message.id, lease.token) as locked:
        if locked is None:
            return False
        _, state = locked
        expires_at = store.clock.time() + visibility
        store.lease_states.write(
            f"{lease.message.queue}:{lease.message.id}",
            LeaseState(
                tries=state.tries,
                token=state.token,
                visibility=visibility,
                expires_at=expires_at,
                holder=state.holder,
                moved=state.moved,
                error=state.error,
                origin=state.origin,
            ),
        )
        lease.expires_at = expires_at
        if isinstance(lease, MqLease):
            lease.has_state = True
        return True


def _find_lease(store: Store, queue: str, message_id: str, token: int) -> MqLease | None:
    with store.lock_lease(queue, message_id, token) as locked:
        if locked is None:
            return None
        fd, state = locked
        body = _read_body(fd)
        message = Message(
            id=message_id,
            queue=queue,
            body=body if isinstance(body, bytes) else b"",
            tries=state.tries,
            enqueued_at=os.fstat(fd).st_mtime,
            original_id=state.origin or None,
        )
        _unlock(fd)
        return MqLease(
            message=message,
            token=token,
            expires_at=state.expires_at,
            moved=state.moved,
            unread=None if isinstance(body, bytes) else body,
        )


def _unlock(fd: int) -> None:
    """Release a message's lock: a body that is still to be read has a descriptor that would keep it."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def _read_body(fd: int) -> bytes | OwnDescriptor:
    """Read a body. A large one is left for `read_in_slices`."""
    body = os.read(fd, 1 << 16)
    if len(body) < 1 << 16:
        return body
    size = os.fstat(fd).st_size
    return OwnDescriptor(fd) if size > ON_LOOP else body + read_all(fd, size - len(body))


def _retry_while_locked(step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return step(*args, **kwargs)
        except MessageLocked:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds a message lock") from None
            time.sleep(0.001)
