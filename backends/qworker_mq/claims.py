"""The transitions of one message: each is one rename, made under the message's lock and conditional on the lease's token.

The lock is a flock on the message's file, held for the few system calls of one transition, never while a handler works: it makes
"the token is still mine" and the rename one step among qworker processes. mq's own programs know no locks and no tokens; what they
did since the lease shows in the file's change time, which every rename sets.

A crash between the record and the rename of one transition leaves a message that is leased by nobody: the mover returns it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from qworker.clock import Clock
from qworker.kit.store_errors import store_errors
from qworker.message import Lease, Message, SettleAction, Settlement
from qworker.names import check_queue
from qworker_mq.layout import QueueDirs, Root
from qworker_mq.record import Record, Records

__all__ = ["Busy", "Claims", "MqLease", "RemoteMqLeases", "Stranger", "write_reason"]

T = TypeVar("T")

_MESSAGE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# How long another process's transition may take before a caller is told that the store does not answer.
_PATIENCE = 5.0


class MqLease(Lease, kw_only=True, eq=False):
    """A lease on `mq:`."""

    # The change time (ns) that the file got by being leased.
    moved: int = 0
    # Whether the lease has a record; see `Claims`.
    recorded: bool = True


class Busy(Exception):
    """Another process moves this message at this moment."""


class Stranger(Exception):
    """What has a message's name is not a regular file."""


class RemoteMqLeases:
    """Leases whose holders are not in this process; see `qworker.backend.RemoteLeases`.

    Args:
        claims: gives the transitions of the opened directories.
    """

    def __init__(self, claims: Callable[[], Claims]) -> None:
        self._claims = claims

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease that has this token."""
        with store_errors(f"find a lease of {queue!r}"):
            return self._claims().find_lease(check_queue(queue), message_id, token)


class Claims:
    """The transitions of the messages below one root. Safe to use from several threads.

    Args:
        root: the opened directories.
        records: the leases and tries.
        clock: where expiries come from.
        plain: seconds after which a mover returns what has no record. A lease of just this length, bound to no process, is what an mq
            server's fetch is, and needs no record either: its token is the file's change time.
    """

    def __init__(self, root: Root, records: Records, clock: Clock, *, plain: float) -> None:
        self._root = root
        self._records = records
        self._clock = clock
        self._plain = plain

    def claim(self, queue: str, dirs: QueueDirs, message_id: str, visibility: float, holder: str) -> MqLease | None:
        """Lease a ready message; None when it is gone.

        Raises:
            Busy: somebody else moves it.
            Stranger: not a regular file.
        """
        fd = _locked(message_id, dirs.ready)
        if fd < 0:
            return None
        try:
            body = _read(fd)
            name = f"{queue}:{message_id}"
            record = self._records.read(name)
            try:
                os.rename(message_id, name, src_dir_fd=dirs.ready, dst_dir_fd=self._root.delay)
            except FileNotFoundError:
                return None
            return self._leased(fd, queue, message_id, body, record, visibility, holder)
        finally:
            os.close(fd)

    def _leased(
        self, fd: int, queue: str, message_id: str, body: bytes, record: Record, visibility: float, holder: str
    ) -> MqLease:
        now = self._clock.time()
        found = os.fstat(fd)
        # A lease in the record of a ready message: a foreign mover ended it, and it counts as expired.
        tries = record.tries + 1 if record.visibility else record.tries
        token = max(record.token + 1, _plain_token(found.st_ctime_ns))
        recorded = bool(record.token or record.tries or record.origin or holder or visibility != self._plain)
        if recorded:
            self._records.write(
                f"{queue}:{message_id}",
                Record(
                    tries=tries,
                    token=token,
                    visibility=visibility,
                    expires_at=now + visibility,
                    holder=holder,
                    moved=found.st_ctime_ns,
                    error=record.error,
                    origin=record.origin,
                ),
            )
        origin = record.origin or None
        message = Message(
            id=message_id, queue=queue, body=body, tries=tries, enqueued_at=found.st_mtime, original_id=origin
        )
        return MqLease(
            message=message, token=token, expires_at=now + visibility, moved=found.st_ctime_ns, recorded=recorded
        )

    def extend(self, lease: Lease, visibility: float) -> bool:
        """Extend a lease; False when it is lost. Waits for a transition that is under way."""
        return self._patiently(lambda: self._extend(lease, visibility))

    def _extend(self, lease: Lease, visibility: float) -> bool:
        name = _name(lease)
        fd = _locked(name, self._root.delay)
        if fd < 0:
            return False
        try:
            record = self._held(fd, name, lease.token)
            if record is None:
                return False
            expires_at = self._clock.time() + visibility
            self._records.write(
                name,
                Record(
                    tries=record.tries,
                    token=record.token,
                    visibility=visibility,
                    expires_at=expires_at,
                    holder=record.holder,
                    moved=record.moved,
                    error=record.error,
                    origin=record.origin,
                ),
            )
            lease.expires_at = expires_at
            if isinstance(lease, MqLease):
                lease.recorded = True
            return True
        finally:
            os.close(fd)

    def settle(self, settlement: Settlement, dirs: QueueDirs) -> bool:
        """End a lease; False when it is lost.

        Raises:
            Busy: somebody else moves the message.
        """
        lease = settlement.lease
        name = _name(lease)
        fd = _locked(name, self._root.delay)
        if fd < 0:
            return False
        try:
            record = self._held(fd, name, lease.token)
            if record is None:
                return False
            if settlement.action is SettleAction.ACK:
                return self._ack(name)
            if settlement.action is SettleAction.FAIL_PERM:
                return self._fail(name, lease.message.id, dirs, record, settlement.error or "")
            failed = settlement.action is SettleAction.FAIL_TMP
            after = record.ended(tries=record.tries + failed, error=settlement.error)
            due_at = self._clock.time() + settlement.delay if settlement.delay > 0 else 0.0
            return self._back(name, lease.message.id, dirs, after, due_at)
        finally:
            os.close(fd)

    def _ack(self, name: str) -> bool:
        if not _moved(name, self._root.delay, name, self._root.remove):
            return False
        self._records.forget(name)
        return True

    def _fail(self, name: str, message_id: str, dirs: QueueDirs, record: Record, error: str) -> bool:
        # The reason first: a message in fail/ always has one.
        write_reason(self._root.reason, name, error)
        self._records.write(name, record.ended())
        return _moved(name, self._root.delay, message_id, dirs.fail)

    def _back(self, name: str, message_id: str, dirs: QueueDirs, after: Record, due_at: float) -> bool:
        # The record first: a stale holder finds its lease ended before the message can be leased again.
        self._records.write(name, after)
        if due_at:
            return _moved(name, self._root.delay, f"{int(due_at * 1000)}.{message_id}", dirs.due)
        return _moved(name, self._root.delay, message_id, dirs.ready)

    def expire(self, name: str, message_id: str, dirs: QueueDirs, seen: tuple[int, float, int]) -> bool:
        """Return a leased message to its queue with tries + 1, if its lease is still the one that was `seen`.

        Args:
            name: in delay/.
            message_id: the part of it after the queue.
            dirs: its queue's directories.
            seen: token, expiry and change time.

        Raises:
            Busy: somebody else moves the message.
        """
        fd = _locked(name, self._root.delay)
        if fd < 0:
            return False
        try:
            record = self._records.read(name)
            if (record.token, record.expires_at, os.fstat(fd).st_ctime_ns) != seen:
                return False
            after = record.ended(tries=record.tries + 1, error="the lease expired")
            return self._back(name, message_id, dirs, after, 0.0)
        finally:
            os.close(fd)

    def _held(self, fd: int, name: str, token: int) -> Record | None:
        """The record behind a lease, while it is held."""
        record = self._records.read(name)
        moved = os.fstat(fd).st_ctime_ns
        if not record.token and token == _plain_token(moved):
            # Without a record: see `plain`.
            expires_at = moved / 1e9 + self._plain
            return Record(tries=record.tries, token=token, visibility=self._plain, expires_at=expires_at, moved=moved)
        if record.token != token or not record.visibility or record.moved != moved:
            return None
        return record

    def find_lease(self, queue: str, message_id: str, token: int) -> MqLease | None:
        """The lease that has this token, whoever took it; None when it is lost."""
        return self._patiently(lambda: self._find_lease(queue, message_id, token))

    def _find_lease(self, queue: str, message_id: str, token: int) -> MqLease | None:
        name = f"{queue}:{message_id}"
        fd = _locked(name, self._root.delay)
        if fd < 0:
            return None
        try:
            record = self._held(fd, name, token)
            if record is None:
                return None
            message = Message(
                id=message_id,
                queue=queue,
                body=_read(fd),
                tries=record.tries,
                enqueued_at=os.fstat(fd).st_mtime,
                original_id=record.origin or None,
            )
            return MqLease(message=message, token=token, expires_at=record.expires_at, moved=record.moved)
        finally:
            os.close(fd)

    @staticmethod
    def _patiently(step: Callable[[], T]) -> T:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return step()
            except Busy:
                if time.monotonic() >= deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds a message lock") from None
                time.sleep(0.001)


def _plain_token(moved: int) -> int:
    """The token of a lease without a record: microseconds, which JSON's numbers hold in every language."""
    return moved // 1000


def _name(lease: Lease) -> str:
    return f"{lease.message.queue}:{lease.message.id}"


def _locked(name: str, directory: int) -> int:
    """A locked descriptor of a message's file; -1 when there is none."""
    try:
        fd = os.open(name, _MESSAGE, dir_fd=directory)
    except FileNotFoundError:
        return -1
    except OSError as error:
        # ELOOP: a link. ENXIO: a socket, or a device without a driver.
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise Stranger(name) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Stranger(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Busy from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(fd: int) -> bytes:
    body = os.read(fd, 1 << 16)
    if len(body) < 1 << 16:
        return body
    parts = [body]
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _moved(name: str, source: int, target: str, destination: int) -> bool:
    """Rename; False when the file is gone, which is when a foreign program moved it."""
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except FileNotFoundError:
        return False
    return True


def write_reason(directory: int, name: str, error: str) -> None:
    """Keep why a message failed; a store that is full keeps the message without it."""
    try:
        fd = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
        )
        try:
            os.write(fd, error.encode(errors="replace"))
        finally:
            os.close(fd)
    except OSError as found:
        if found.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
