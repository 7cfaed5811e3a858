"""From queue/ and delay/ to lease/, and onwards: each transition is one rename or unlink of one name.

A lease is the file `lease/<item>.<expiry>.<holder>`. Whoever ends or extends it names all three, so a stale holder's call finds no
file. The descriptor stays open, with its flock, until the lease is settled: fsq programs work under that lock, in place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable

from qworker.clock import Clock
from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import READ, has_writer, list_names, read_all
from qworker.message import Lease, Message, SettleAction, Settlement
from qworker_file import foreign
from qworker_file.foreign import Claim
from qworker_file.holder import DETACHED
from qworker_file.id_index import forget_index
from qworker_file.layout import QueueDir
from qworker_file.names import (
    MAX_OWN,
    Item,
    delay_name,
    id_of,
    lease_name,
    parse_item,
    parse_lease,
    reason_name,
    size_of,
    with_tries,
)

__all__ = ["Expiries", "FileLease", "claim", "extend", "find_lease", "give_back", "settle"]


_READ_QUIETLY = READ | os.O_NOATIME


class FileLease(Lease, kw_only=True, eq=False):
    """A claimed file."""

    files: QueueDir
    # What it is called without the suffixes of its state.
    item: str
    # Its name in lease/.
    path: str
    # Open on the file; -1 when it is let go of.
    fd: int = -1
    # Whether the descriptor has the flock that keeps fsq programs away from it.
    locked: bool = False
    # Whether names/ has a second link to it.
    indexed: bool = False
    # This process's monotonic time at which it ends.
    deadline: float = 0.0
    # How it ended; None while it is held.
    ended: Settlement | None = None
    lost: bool = False
    # Where it is ready again, after a release or a temporary failure: the name, and whether that is in queue/.
    left: str | None = None
    left_ready: bool = False
    # Its reason, open until it is on the disk; -1 without one.
    reason_fd: int = -1

    def close(self) -> None:
        """Let go of the file, and of its lock for every process that shares the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if self.locked:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


class Expiries:
    """Expiry times in milliseconds, no two alike while either counts: with them a lease's name is never used twice."""

    __slots__ = ("_lock", "_used")

    def __init__(self) -> None:
        self._used: set[int] = set()
        # Extensions come from another thread.
        self._lock = threading.Lock()

    def next(self, wanted: float, now: float) -> int:
        """The first unused millisecond from `wanted` on, both in Unix seconds."""
        with self._lock:
            if len(self._used) > 20_000:
                now_ms = int(now * 1000)
                self._used = {used for used in self._used if used >= now_ms}
            expiry = int(wanted * 1000)
            while expiry in self._used:
                expiry += 1
            self._used.add(expiry)
            return expiry


# -- leasing ---------------------------------------------------------------------------------------------------------


def claim(
    files: QueueDir, source: int, name: str, item: str, suffix: str, *, now: float, local: bool
) -> FileLease | Claim:
    """Lease one file.

    Args:
        files: the queue.
        source: the descriptor of queue/ or delay/.
        name: the file's name there.
        item: the same without the state's own part.
        suffix: `.<expiry>.<holder>`.
        now: Unix seconds, by the store's clock.
        local: whether timestamps are in local time.

    Raises:
        OSError: the store is in trouble; nothing is claimed.
    """
    try:
        fd = _open(name, source)
    except FileNotFoundError:
        return Claim.GONE
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EACCES, errno.ENODEV}:
            return foreign.put_aside(files, source, name, f"cannot open: {error.strerror}")
        raise
    try:
        lease = _claim_open(files, source, fd, name, item, suffix, now, local)
    except BaseException:
        os.close(fd)
        raise
    if not isinstance(lease, FileLease):
        os.close(fd)
    return lease


def _claim_open(
    files: QueueDir, source: int, fd: int, name: str, item: str, suffix: str, now: float, local: bool
) -> FileLease | Claim:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return foreign.put_aside(files, source, name, "not a regular file")
    parsed = parse_item(item, local=local)
    locked = _lock(fd)
    # A name of our own is given to one file only; any other may be given to the next one.
    is_own = parsed is not None and parsed.is_own
    if source == files.queue:
        # Only there does an fsq program work on items; what is elsewhere may still be locked by a holder that was given up.
        if not locked:
            return Claim.BUSY
        if not is_own and has_writer(fd):
            return Claim.BUSY
    if parsed is None or size_of(item) > MAX_OWN:
        item, parsed = foreign.own_name(files, item, parsed)
    path = item + suffix
    if not _rename(name, path, source, files.lease, fd):
        return Claim.GONE
    if not is_own and os.stat(path, dir_fd=files.lease, follow_symlinks=False).st_ino != status.st_ino:
        # Another file took the name between our open and our rename: it comes back, and is leased as what it is.
        os.rename(path, delay_name(item, int(now * 1000)), src_dir_fd=files.lease, dst_dir_fd=files.delay)
        return Claim.BUSY
    return _claimed(files, fd, status, item, parsed, path, locked, now)


def _claimed(
    files: QueueDir, fd: int, status: os.stat_result, item: str, parsed: Item, path: str, locked: bool, now: float
) -> FileLease | Claim:
    """Read a file that is ours by now."""
    token = max(status.st_mtime_ns + 1, int(now * 1e9))
    try:
        os.utime(fd, ns=(token, token))
        body = read_all(fd, status.st_size)
    except OSError as error:
        if error.errno == errno.EPERM:
            # Somebody else's file: its time cannot be set, and the clock alone makes the token rise.
            body = read_all(fd, status.st_size)
        elif error.errno == errno.EIO:
            os.rename(path, item, src_dir_fd=files.lease, dst_dir_fd=files.queue)
            return foreign.put_aside(files, files.queue, item, "it cannot be read: Input/output error")
        else:
            os.rename(path, delay_name(item, int(now * 1000)), src_dir_fd=files.lease, dst_dir_fd=files.delay)
            raise
    lease = _make(files, fd, status, item, parsed, path, token, body)
    lease.locked = locked
    return lease


def _make(
    files: QueueDir, fd: int, status: os.stat_result, item: str, parsed: Item, path: str, token: int, body: bytes
) -> FileLease:
    enqueued_at = status.st_mtime if parsed.enqueued_at is None else parsed.enqueued_at
    message = Message(
        id=parsed.id,
        queue=files.name,
        body=body,
        tries=parsed.tries,
        enqueued_at=enqueued_at,
        argv=parsed.arguments if not parsed.arguments else foreign.arguments(files, parsed),
    )
    return FileLease(
        message=message,
        token=token,
        expires_at=0.0,
        files=files,
        item=item,
        path=path,
        fd=fd,
        indexed=status.st_nlink > 1,
    )


def _open(name: str, directory: int) -> int:
    try:
        # A read that leaves the time of the last one alone spares the file system a change.
        return os.open(name, _READ_QUIETLY, dir_fd=directory)
    except PermissionError:
        # Only the owner may ask for that.
        return os.open(name, READ, dir_fd=directory)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _rename(name: str, target: str, source: int, destination: int, fd: int) -> bool:
    """Rename the file that `fd` is open on; False when the name is gone. An error after a rename that happened is none."""
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except OSError as error:
        try:
            found = os.stat(target, dir_fd=destination, follow_symlinks=False)
        except FileNotFoundError:
            if error.errno == errno.ENOENT:
                return False
            raise error from None
        if found.st_ino == os.fstat(fd).st_ino:
            return True
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


# -- extending -------------------------------------------------------------------------------------------------------


def extend(lease: FileLease, visibility: float, expiries: Expiries, clock: Clock) -> bool:
    """Extend a lease; False when it is lost. Blocks, in any thread.

    Raises:
        OSError: nothing is known to be lost.
    """
    if lease.lost or lease.ended is not None:
        return False
    now = clock.time()
    expiry = expiries.next(now + visibility, now)
    # Whoever took it: a detached lease may have been found again by another process.
    path = lease_name(lease.item, expiry, lease.path.rpartition(".")[2])
    if not _rename(lease.path, path, lease.files.lease, lease.files.lease, lease.fd):
        return False
    lease.path = path
    lease.expires_at = expiry / 1000
    lease.deadline = clock.monotonic() + visibility
    return True


# -- ending ----------------------------------------------------------------------------------------------------------


def settle(
    settlement: Settlement, lease: FileLease, now: float, finished: list[int], *, keep_done: bool
) -> frozenset[int] | None:
    """End a lease; the descriptors of the directories that changed, or None when it is lost.

    Args:
        settlement: how it ends.
        lease: what ends.
        now: Unix seconds, by the store's clock.
        finished: gets the descriptors of acked files, which the caller closes (`close_all`): nobody waits for their locks.
        keep_done: whether acked files are kept in done/.

    Raises:
        OSError: it is held as before, or ended, which a repetition tells.
    """
    if lease.ended is not None:
        # Ended before by the same call, or acked twice: perhaps not yet on the disk.
        same = lease.ended is settlement or lease.ended.action is settlement.action is SettleAction.ACK
        return frozenset({lease.files.lease}) if same else None
    if lease.lost:
        return None
    step = _STEPS[settlement.action]
    changed = step(settlement, lease, now) if settlement.action is not SettleAction.ACK or keep_done else _unlink(lease)
    if changed is None:
        lease.lost = True
    else:
        lease.ended = settlement
        if settlement.action is SettleAction.ACK and lease.fd >= 0:
            finished.append(lease.fd)
            lease.fd = -1
    lease.close()
    return changed


def _unlink(lease: FileLease) -> frozenset[int] | None:
    files = lease.files
    try:
        os.unlink(lease.path, dir_fd=files.lease)
    except FileNotFoundError:
        return None
    if lease.indexed:
        forget_index(files, lease.message.id)
    return frozenset({files.lease})


def _done(_settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    return _finish(lease, lease.files.done, now)


def _failed(settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    files = lease.files
    # The reason first: a failed message without one is never seen. A stale holder leaves no reason of its own behind.
    if settlement.error is not None:
        try:
            os.stat(lease.path, dir_fd=files.lease, follow_symlinks=False)
        except FileNotFoundError:
            return None
        lease.reason_fd = write_reason(files.fail, reason_name(lease.item), settlement.error, mode=files.item_mode)
    changed = _finish(lease, files.fail, now)
    if changed is None and settlement.error is not None:
        _unlink_reason(files, lease.item)
    return changed


def _unlink_reason(files: QueueDir, item: str) -> None:
    try:
        os.stat(item, dir_fd=files.fail, follow_symlinks=False)
    except FileNotFoundError:
        try:
            os.unlink(reason_name(item), dir_fd=files.fail)
        except FileNotFoundError:
            pass


def _finish(lease: FileLease, target: int, now: float) -> frozenset[int] | None:
    if not _rename(lease.path, lease.item, lease.files.lease, target, lease.fd):
        return None
    # When it was finished; never before its token.
    moment = max(int(now * 1e9), lease.token)
    try:
        os.utime(lease.fd, ns=(moment, moment))
    except PermissionError:
        # Somebody else's file: it is shown with the time it has.
        pass
    return frozenset({lease.files.lease, target})


def _failed_for_now(settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    item = with_tries(lease.item, lease.message.tries + 1)
    return _delay(lease, item, now + max(settlement.delay, 0.0))


def _released(settlement: Settlement, lease: FileLease, now: float) -> frozenset[int] | None:
    if settlement.delay > 0:
        return _delay(lease, lease.item, now + settlement.delay)
    if not lease.locked:
        # An fsq program could take it from queue/ while another descriptor's lock is forgotten: not so from delay/.
        return _delay(lease, lease.item, now)
    files = lease.files
    if not _rename(lease.path, lease.item, files.lease, files.queue, lease.fd):
        return None
    lease.left, lease.left_ready = lease.item, True
    return frozenset({files.lease, files.queue})


def _delay(lease: FileLease, item: str, due: float) -> frozenset[int] | None:
    files = lease.files
    name = delay_name(item, int(due * 1000))
    if not _rename(lease.path, name, files.lease, files.delay, lease.fd):
        return None
    lease.left = name
    return frozenset({files.lease, files.delay})


async def find_lease(
    files: QueueDir, own: dict[str, FileLease], message_id: str, token: int, clock: Clock
) -> FileLease | None:
    """The lease of a message that has this token: of this instance, or of one whose leases end by time alone.

    Raises:
        OSError: lease/ cannot be listed.
    """
    for lease in own.values():
        if lease.message.id == message_id and lease.token == token:
            return lease
    for name in await list_names(files.lease):
        parsed = parse_lease(name)
        if parsed is None or not parsed[2].startswith(DETACHED) or id_of(parsed[0]) != message_id:
            continue
        found = _reopened(files, name, parsed[0], token)
        if found is not None:
            found.expires_at = parsed[1] / 1000
            found.deadline = clock.monotonic() + max(0.0, found.expires_at - clock.time())
            return found
    return None


def _reopened(files: QueueDir, path: str, item: str, token: int) -> FileLease | None:
    parsed = parse_item(item)
    if parsed is None:
        return None
    try:
        fd = os.open(path, READ, dir_fd=files.lease)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_mtime_ns == token:
            lease = _make(files, fd, status, item, parsed, path, token, read_all(fd, status.st_size))
            fd = -1
            return lease
        return None
    finally:
        if fd >= 0:
            os.close(fd)


_Step = Callable[[Settlement, FileLease, float], "frozenset[int] | None"]
_STEPS: dict[SettleAction, _Step] = {
    SettleAction.ACK: _done,
    SettleAction.FAIL_PERM: _failed,
    SettleAction.FAIL_TMP: _failed_for_now,
    SettleAction.RELEASE: _released,
}


def give_back(lease: FileLease, now: float) -> None:
    """Undo a claim that nobody will hear of."""
    settle(Settlement(lease=lease, action=SettleAction.RELEASE), lease, now, [], keep_done=True)
