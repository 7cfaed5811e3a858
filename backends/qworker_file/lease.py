"""From queue/ and delay/ to lease/, and extending leases: each transition is one rename of one name.

A lease is the file `lease/<item>.<expiry>.<holder>`. A call that ends or extends it names all three, so a stale
holder's call finds no file. The descriptor stays open, with its flock, until the lease is settled: fsq programs work
under that lock, in place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Sequence

import msgspec

from qworker.clock import Clock
from qworker.errors import BackendUnavailable
from qworker.kit.body_slices import ON_LOOP, OwnDescriptor, read_in_slices
from qworker.kit.files import read_all
from qworker.kit.linux import has_writer
from qworker.kit.opening import open_entry, try_lock
from qworker.kit.planted import rename_file
from qworker.kit.store_errors import DAMAGED, UNREADABLE
from qworker.message import Lease, Message, Settlement
from qworker_file import foreign
from qworker_file.foreign import ClaimResult
from qworker_file.holds import keep_hold
from qworker_file.layout import QueueDir
from qworker_file.names import MAX_OWN, Item, byte_length, delay_name, given_id, lease_name, parse_item, started_item
from qworker_file.unique_keys import key_of

__all__ = ["ExpiryClock", "FileLease", "claim", "extend", "make_lease", "read_large_body", "try_rename"]

_QUIETLY = os.O_RDONLY | os.O_NOATIME


class FileLease(Lease, kw_only=True, eq=False, weakref=True):
    """A claimed file."""

    files: QueueDir
    # Its name without the suffixes of its state.
    item: str
    # Its name in lease/.
    path: str
    # A descriptor of the file; -1 after it was closed.
    fd: int = -1
    # Whether the descriptor has the flock that keeps fsq programs away from it.
    locked: bool = False
    # Whether its body is still to be read, off the loop.
    is_unread: bool = False
    # The holder's name in its next extension; empty: as in `path`.
    extends_as: str = ""
    inode: int = 0
    # Whether names/ may have a second link to it.
    indexed: bool = False
    # This process's monotonic time at which it ends.
    deadline: float = 0.0
    # How it ended; None while it is held.
    ended: Settlement | None = None
    lost: bool = False
    # Set by the first attempt to end it, whose outcome may be unknown.
    is_ending: bool = False
    # Its name after an extension that is under way, in another thread.
    moves_to: str = ""
    # Where it is ready again, after a release or a retry: the name, and whether it is in queue/.
    released_as: str | None = None
    is_in_queue: bool = False
    # A descriptor of its reason until the reason is on the disk; -1 without one.
    reason_fd: int = -1

    def close(self) -> None:
        """Close the file and release its lock, also for other processes that share the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if self.locked:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


class ExpiryClock:
    """A source of expiry times in milliseconds. No two valid ones are equal, so a lease's name is never used twice."""

    __slots__ = ("_lock", "_used")

    def __init__(self) -> None:
        self._used: set[int] = set()
        # Extensions come from another thread.
        self._lock = threading.Lock()

    def next(self, wanted: float, now: float) -> int:
        """Return the first unused millisecond from `wanted` on, both in Unix seconds."""
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
) -> FileLease | ClaimResult:
    """Lease one file.

    Args:
        files: The queue.
        source: The descriptor of queue/ or delay/.
        name: The file's name there.
        item: The same without the state's own part.
        suffix: `.<expiry>.<holder>`.
        now: Unix seconds, by the store's clock.
        local: Whether timestamps are in local time.

    Raises:
        OSError: The store failed; nothing is claimed.
    """
    try:
        fd = _open(name, source)
    except FileNotFoundError:
        return ClaimResult.GONE
    except OSError as error:
        if error.errno in UNREADABLE and error.errno != errno.EIO:
            return foreign.move_to_failed(files, source, name, f"cannot open: {error.strerror}")
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
) -> FileLease | ClaimResult:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return foreign.move_to_failed(files, source, name, "not a regular file")
    if files.max_body is not None and status.st_size > files.max_body:
        return ClaimResult.TOO_LARGE
    parsed = parse_item(item, local=local)
    locked = try_lock(fd)
    # A name of qworker is given to one file only. Any other name may be given to the next file too.
    is_own = parsed is not None and parsed.is_own
    if source == files.queue:
        # An fsq program processes items only there. Files elsewhere may still be locked by a holder that was given up.
        if not locked:
            return ClaimResult.BUSY
        if not is_own and has_writer(fd):
            return ClaimResult.BUSY
    if parsed is None or byte_length(item) > MAX_OWN:
        item, parsed = foreign.give_own_name(files, item, parsed)
    # If its unique key is free from now on, this rename frees it.
    waiting, item = item, started_item(item)
    path = item + suffix
    if not try_rename(name, path, source, files.lease, fd):
        return ClaimResult.GONE
    if not is_own and os.stat(path, dir_fd=files.lease, follow_symlinks=False).st_ino != status.st_ino:
        # Another file took the name between our open and our rename: it is moved back, and leased as the file that it
        # is.
        os.rename(path, delay_name(waiting, int(now * 1000)), src_dir_fd=files.lease, dst_dir_fd=files.delay)
        return ClaimResult.BUSY
    try:
        return _read_claimed(files, fd, status, item, parsed, path, locked, now)
    except OSError as error:
        return _return_unread(files, error, path, item, waiting, now)


def _read_claimed(
    files: QueueDir, fd: int, status: os.stat_result, item: str, parsed: Item, path: str, locked: bool, now: float
) -> FileLease:
    """Read a file that is now in lease/."""
    keep_hold(files, item, now)
    token = max(status.st_mtime_ns + 1, int(now * 1e9))
    is_large = status.st_size > ON_LOOP
    _set_time(fd, token)
    body = b"" if is_large else read_all(fd, status.st_size)
    lease = make_lease(files, fd, status, item, parsed, path, token, body)
    lease.locked = locked
    lease.is_unread = is_large
    return lease


def _return_unread(
    files: QueueDir, error: OSError, path: str, item: str, waiting: str, now: float
) -> FileLease | ClaimResult:
    """Set a damaged file aside. Otherwise another attempt may succeed: raise the error, and let the message wait."""
    if error.errno in DAMAGED:
        os.rename(path, item, src_dir_fd=files.lease, dst_dir_fd=files.queue)
        return foreign.move_to_failed(files, files.queue, item, f"it cannot be read: {error.strerror}")
    # Under its first name: it has not started, so it keeps its unique key.
    os.rename(path, delay_name(waiting, int(now * 1000)), src_dir_fd=files.lease, dst_dir_fd=files.delay)
    raise error


def _set_time(fd: int, time_ns: int) -> None:
    try:
        os.utime(fd, ns=(time_ns, time_ns))
    except PermissionError:
        # It is another user's file: its time cannot be set, and only the clock makes the token rise.
        pass


async def read_large_body(lease: FileLease) -> None:
    """Read the body of a lease that `claim` has left unread.

    Raises:
        OSError: It cannot be read.
    """
    lease.message = msgspec.structs.replace(lease.message, body=await read_in_slices(OwnDescriptor(lease.fd)))
    lease.is_unread = False


def make_lease(
    files: QueueDir, fd: int, status: os.stat_result, item: str, parsed: Item, path: str, token: int, body: bytes
) -> FileLease:
    """Make the lease of a file that is open."""
    enqueued_at = status.st_mtime if parsed.enqueued_at is None else parsed.enqueued_at
    key, unique = key_of(files, item)
    message = Message(
        id=parsed.id,
        queue=files.name,
        body=body,
        tries=parsed.tries,
        deaths=parsed.deaths,
        enqueued_at=enqueued_at,
        unique_key=key,
        unique=unique,
        priority=parsed.priority,
        argv=parsed.arguments if not parsed.arguments else foreign.read_arguments(files, parsed),
    )
    return FileLease(
        message=message,
        token=token,
        expires_at=0.0,
        files=files,
        item=item,
        path=path,
        fd=fd,
        inode=status.st_ino,
        # A backup can have made the other link.
        indexed=status.st_nlink > 1 and given_id(item) is not None,
    )


def _open(name: str, directory: int) -> int:
    try:
        # A read that does not change the access time saves the file system a change.
        return open_entry(name, _QUIETLY, directory)
    except PermissionError:
        # Only the owner may request that.
        return open_entry(name, os.O_RDONLY, directory)


def try_rename(name: str, target: str, source: int, destination: int, fd: int, token: int | None = None) -> bool:
    """Rename the file that `fd` has open and return whether the name existed.

    An error that is reported although the rename has happened is ignored.

    Args:
        name: The file's name.
        target: The new name.
        source: The descriptor of its directory.
        destination: The descriptor of the new directory.
        fd: The open file.
        token: The token of the lease that this rename ends. A file with a later time was cancelled, requeued and leased
            again, and another holder has moved it to the same name. None: no other rename has this target.
    """
    try:
        rename_file(name, target, source, destination)
    except OSError as error:
        try:
            found = os.stat(target, dir_fd=destination, follow_symlinks=False)
        except FileNotFoundError:
            if error.errno == errno.ENOENT:
                return False
            raise error from None
        if found.st_ino == os.fstat(fd).st_ino and (token is None or found.st_mtime_ns <= token):
            return True
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


# -- extending -------------------------------------------------------------------------------------------------------


def extend(leases: Sequence[Lease], visibility: float, expiries: ExpiryClock | None, clock: Clock) -> list[Lease]:
    """Extend leases and return the lost ones. It blocks, and any thread can call it.

    Args:
        leases: The leases.
        visibility: Seconds.
        expiries: Gives the leases' names. None: the store is closed, and all leases are lost.
        clock: The store's clock.

    Raises:
        BackendUnavailable: It is unknown which are lost.
    """
    lost: list[Lease] = []
    for lease in leases:
        assert isinstance(lease, FileLease)
        try:
            if expiries is None or not _extend_one(lease, visibility, expiries, clock):
                lease.lost = True
                lost.append(lease)
        except OSError as error:
            raise BackendUnavailable(f"cannot extend leases: {error.strerror}") from error
    return lost


def _extend_one(lease: FileLease, visibility: float, expiries: ExpiryClock, clock: Clock) -> bool:
    if lease.lost or lease.ended is not None:
        return False
    now = clock.time()
    expiry = expiries.next(now + visibility, now)
    # The holder comes from the name: another process may have found a detached lease again.
    path = lease.moves_to = lease_name(lease.item, expiry, lease.extends_as or lease.path.rpartition(".")[2])
    if not try_rename(lease.path, path, lease.files.lease, lease.files.lease, lease.fd):
        return False
    lease.path = path
    lease.expires_at = expiry / 1000
    lease.deadline = clock.monotonic() + visibility
    return True
