"""Leasing and extending: one rename each, to a name that only the holder knows."""

from __future__ import annotations

import itertools
import os
import secrets

import msgspec
import structlog

from qworker.kit.body_slices import OwnDescriptor, read_in_slices
from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.planted import rename_file
from qworker.kit.store_errors import NOT_A_FILE
from qworker.message import Lease, Message
from qworker_vsqs.names import Unit, leased_name
from qworker_vsqs.queue_dir import MessageInfo, QueueDirectory

__all__ = ["VsqsLease", "VsqsLeases", "make_message"]

_log = structlog.get_logger("qworker.vsqs")


class VsqsLease(Lease, kw_only=True, eq=False, weakref=True):
    """A lease, with the number and the expiry that are its file's name.

    Attributes:
        number: The message's id.
        expiry: The expiry, in the queue's unit.
        is_unsynced: Whether the lease was ended, but the sync failed. A repetition makes it durable.
        unread: The file of a large body, until the body is read.
    """

    number: int
    expiry: int
    is_unsynced: bool = False
    unread: OwnDescriptor | None = None


def make_message(queue: QueueDirectory, number: int, body: bytes, info: MessageInfo) -> Message:
    """Return the message of a file."""
    return Message(
        id=str(number),
        queue=queue.name,
        body=body,
        tries=info.tries,
        enqueued_at=Unit.enqueued_at(number) if info.enqueued_at is None else info.enqueued_at,
        original_id=info.origin,
    )


class VsqsLeases:
    """Leases and extends for one backend instance.

    Args:
        unit: The unit of the expiries.
        max_body: The largest body in bytes that is leased. None: any size.
    """

    def __init__(self, unit: Unit, max_body: int | None) -> None:
        self._unit = unit
        self._max_body = max_body
        # No two leases of one process have the same expiry, and two processes are very unlikely to choose the same one.
        self._sequence = itertools.count(secrets.randbelow(unit.spread))
        self._token = 0

    def _make_expiry(self, at: float) -> int:
        """Return an expiry that no other lease has, not before Unix second `at`."""
        spread = self._unit.spread
        return (self._unit.ticks(at) // spread + 1) * spread + next(self._sequence) % spread

    async def lease(self, queue: QueueDirectory, limit: int, visibility: float, now: float) -> list[Lease]:
        """Lease up to `limit` messages of the window, the oldest first. A cancelled call holds none of them."""
        leases = self._claim(queue, limit, visibility, now)
        last = leases[-1] if leases else None
        try:
            if last is not None and last.unread is not None:
                last.message = msgspec.structs.replace(last.message, body=await read_in_slices(last.unread))
                last.unread = None
        except BaseException as error:
            for lease in leases:
                if queue.try_rename(leased_name(lease.number, lease.expiry), str(lease.number)):
                    queue.window.add(str(lease.number))
            if not isinstance(error, OSError) or not is_about_one_file(error, queue.side):
                raise
            assert last is not None
            queue.blocked.add(str(last.number), error)
            return []
        return list(leases)

    def _claim(self, queue: QueueDirectory, limit: int, visibility: float, now: float) -> list[VsqsLease]:
        """Lease messages up to one with a large body: the caller extends these leases before it gets more."""
        leases: list[VsqsLease] = []
        blocked = queue.blocked
        queue.retry_blocked()
        while len(leases) < limit and (number := queue.window.take()) is not None:
            if (name := str(number)) in blocked or self._is_too_large(queue, name):
                continue
            try:
                lease = self._claim_one(queue, number, now, visibility)
            except OSError as error:
                if is_about_one_file(error, queue.side):
                    blocked.add(name, error)
                    continue
                if leases:
                    # The next call finds out whether the store still fails.
                    break
                raise
            blocked.forget(name)
            if lease is not None:
                leases.append(lease)
                if lease.unread is not None:
                    break
        return leases

    def _claim_one(self, queue: QueueDirectory, number: int, now: float, visibility: float) -> VsqsLease | None:
        """Lease one message; return None if another worker was faster, or if it is not a regular file."""
        expiry = self._make_expiry(now + visibility)
        name = leased_name(number, expiry)
        if not queue.try_rename(str(number), name):
            return None
        try:
            body = queue.read(name)
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                queue.try_rename(name, str(number))
                raise
            self._move_to_failed(queue, number, name, now)
            return None
        if body is None:
            return None
        info = queue.read_info(number)
        self._token = max(self._token + 1, int(now * 1_000_000))
        return VsqsLease(
            message=make_message(queue, number, body if isinstance(body, bytes) else b"", info),
            unread=None if isinstance(body, bytes) else body,
            token=self._token,
            expires_at=self._unit.seconds(expiry),
            number=number,
            expiry=expiry,
        )

    def _is_too_large(self, queue: QueueDirectory, name: str) -> bool:
        """Return whether a message is larger than `max_body`. Then it rests."""
        if self._max_body is None:
            return False
        try:
            size = os.stat(name, dir_fd=queue.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return False
        if size <= self._max_body:
            return False
        queue.blocked.add_too_large(name, size, self._max_body)
        return True

    def _move_to_failed(self, queue: QueueDirectory, number: int, name: str, now: float) -> None:
        """Keep a link, a directory or a device with a message's name as failed. It is never opened."""
        _log.error("not_a_regular_file", queue=queue.name, id=str(number))
        os.close(queue.write_info(number, MessageInfo(error="not a regular file", failed_at=now)))
        rename_file(name, str(number), queue.fd, queue.fail)

    def extend(self, queue: QueueDirectory, lease: Lease, now: float, visibility: float) -> bool:
        """Extend a lease; return False if it is lost."""
        if not isinstance(lease, VsqsLease):
            return False
        expiry = self._make_expiry(now + visibility)
        if not queue.try_rename(leased_name(lease.number, lease.expiry), leased_name(lease.number, expiry)):
            return False
        lease.expiry = expiry
        lease.expires_at = self._unit.seconds(expiry)
        return True
