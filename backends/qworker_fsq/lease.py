"""Claiming an item in place: the lock on the open file is the lease, and every end is one rename of its name.

    queue/<name>, unlocked       ready
    queue/<name>, flock(LOCK_EX) leased; the kernel frees the lock when the worker dies
    done/<name>, fail/<name>     finished

The file is looked up by its name once more under the lock: between the open and the lock another worker may have
finished it, and renamed the file that is open here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from enum import Enum, auto

from qworker.clock import Clock
from qworker.errors import BackendUnavailable
from qworker.kit.files import find_inode, read_all, try_unlink
from qworker.kit.opening import open_entry, try_lock
from qworker.kit.store_errors import NOT_A_FILE
from qworker.message import Lease, Message, Settlement
from qworker_fsq.environment import ItemLimits
from qworker_fsq.item_file import fail_item, mark_due, read_due, read_original_id, try_rename
from qworker_fsq.layout import QueueDir
from qworker_fsq.names import MAX_NAME, InvalidItemName, Item, parse, with_tries

__all__ = ["LEAST_LINGER", "LINGER", "ClaimedItem", "FsqLease", "SkipReason", "claim", "extend", "make_message"]


# Seconds for which a finished item stays locked, and the least of them if its process ends. An fsq program that opened
# it before it was finished, and locks it only now, would process it once more: fsq does not check the name again. On a
# busy machine a program may stand still between these two calls.
LINGER, LEAST_LINGER = 1.0, 0.1


class SkipReason(Enum):
    """Why an item was not claimed."""

    # It was finished or renamed.
    GONE = auto()
    # Another process works on it.
    BUSY = auto()
    # This user has no permission to open it.
    REFUSED = auto()
    # It cannot be processed, and is in fail/ now.
    FAILED = auto()
    # Its body is larger than `max_body`: it stays where it is, and is tried again later.
    TOO_LARGE = auto()


# The items that this process has locked: a forked child would keep the locks after its parent's death.
_open: set[ClaimedItem] = set()


def _close_in_child() -> None:
    for claimed in _open:
        os.close(claimed.fd)
        claimed.fd = -1
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


class ClaimedItem:
    """An item that is locked.

    Args:
        files: The queue.
        name: The file's name in queue/.
        item: The fields of the name.
        fd: A descriptor of the file, with the lock, which this object owns from now on.
        status: The file's status.
    """

    __slots__ = ("fd", "files", "inode", "item", "name", "size", "written_at")

    def __init__(self, files: QueueDir, name: str, item: Item, fd: int, status: os.stat_result) -> None:
        self.files = files
        self.name = name
        self.item = item
        self.fd = fd
        self.inode = status.st_ino
        self.size = status.st_size
        self.written_at = status.st_mtime
        _open.add(self)

    @property
    def is_ours(self) -> bool:
        """True if the name is still that of this file. Only a scan without locks or a person can have changed that."""
        return find_inode(self.name, self.files.queue) == self.inode

    def read(self) -> bytes:
        """Read the body."""
        return read_all(self.fd, self.size)

    def finish(self, *, keep: bool) -> bool:
        """Finish the item and return whether it still belonged to this process.

        Args:
            keep: Whether it is kept in done/, as the standard says.
        """
        if not keep:
            return self.is_ours and try_unlink(self.name, self.files.queue)
        return self._rename(self.name, self.files.done)

    def fail(self, reason: str | None = None) -> bool:
        """Fail the item and return whether it still belonged to this process.

        A failure is never seen without its reason.
        """
        if not self.is_ours:
            return False
        return fail_item(self.files, self.name, reason)

    def retry(self, due: float | None = None) -> bool:
        """Make the item ready again with one more try and return whether it still belonged to this process.

        Args:
            due: Unix seconds before which no qworker claims it; None: now.
        """
        if not self.is_ours:
            return False
        constants = self.files.constants
        tries = self.item.tries + 1
        name = with_tries(self.name, tries, constants)
        # A copy that a person made must not be overwritten.
        while len(os.fsencode(name)) <= MAX_NAME and find_inode(name, self.files.queue) is not None:
            tries += 1
            name = with_tries(self.name, tries, constants)
        if len(os.fsencode(name)) > MAX_NAME:
            return fail_item(self.files, self.name, "its name has no room for one more try")
        if due is not None:
            mark_due(self.fd, due)
        if not self._rename(name, self.files.queue):
            return False
        self.name = name
        return True

    def retry_later(self, due: float) -> bool:
        """Release the item for later, under its own name, and return whether it still belonged to this process."""
        if not self.is_ours:
            return False
        # Another user's file cannot be delayed, so it is ready now.
        mark_due(self.fd, due)
        return True

    def _rename(self, name: str, directory: int) -> bool:
        if not self.is_ours:
            return False
        return try_rename(self.name, name, self.files.queue, directory, self.inode)

    def close(self, *, gone: bool = False) -> None:
        """Release the lock. Idempotent.

        Args:
            gone: Whether it has left queue/, where no worker searches for it again. A program that also has it open may
                keep the lock.
        """
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _open.discard(self)
            if not gone:
                # A program that is just being started may have the descriptor too, so the lock is released explicitly.
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def abandon(self) -> None:
        """Close the file and leave the lock to a program that also has it open and still works on it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _open.discard(self)
            os.close(fd)


def claim(
    files: QueueDir, name: str, limits: ItemLimits, *, now: float, lock: bool = True
) -> ClaimedItem | SkipReason | float:
    """Claim one item of queue/. A returned number is when it is due, in Unix seconds.

    Args:
        files: The queue.
        name: The file's name.
        limits: The limits after which an item has failed.
        now: Unix seconds.
        lock: False: the caller ensures that no other program works on the item.

    Raises:
        OSError: The store failed, and nothing is claimed.
    """
    try:
        fd = open_entry(name, os.O_RDONLY, files.queue)
    except FileNotFoundError:
        return SkipReason.GONE
    except PermissionError:
        return SkipReason.REFUSED
    except OSError as error:
        if error.errno in NOT_A_FILE:
            return _fail(files, name, "not a regular file")
        raise
    try:
        claimed = _claim(files, name, limits, fd, now, lock=lock)
    except BaseException:
        os.close(fd)
        raise
    if not isinstance(claimed, ClaimedItem):
        os.close(fd)
    return claimed


def _claim(
    files: QueueDir, name: str, limits: ItemLimits, fd: int, now: float, *, lock: bool
) -> ClaimedItem | SkipReason | float:
    if lock and not try_lock(fd):
        return SkipReason.BUSY
    status = os.fstat(fd)
    if find_inode(name, files.queue) != status.st_ino:
        return SkipReason.GONE
    if not stat.S_ISREG(status.st_mode):
        return _fail(files, name, "not a regular file")
    try:
        item = parse(name, files.constants)
    except InvalidItemName as error:
        return _fail(files, name, f"malformed name: {error}")
    due = read_due(status)
    if due is not None and due > now:
        return due
    if files.max_body is not None and status.st_size > files.max_body:
        return SkipReason.TOO_LARGE
    reason = limits.why_exhausted(item.tries, item.enqueued_at, now)
    if reason is not None:
        return _fail(files, name, reason)
    return ClaimedItem(files, name, item, fd, status)


def _fail(files: QueueDir, name: str, reason: str) -> SkipReason:
    return SkipReason.FAILED if fail_item(files, name, reason) else SkipReason.GONE


# -- leases ------------------------------------------------------------------------------------------------------------


class FsqLease(Lease, kw_only=True, eq=False):
    """A locked item."""

    claimed: ClaimedItem
    # This process's monotonic time at which it ends, if it ends by time: no step of the wall clock ends it early.
    deadline: float = 0.0
    # How it ended; None while it is held.
    ended: Settlement | None = None


def make_message(files: QueueDir, claimed: ClaimedItem, body: bytes) -> Message:
    """Make the message of an item."""
    item = claimed.item
    return Message(
        id=item.id,
        queue=files.name,
        body=body,
        tries=item.tries,
        enqueued_at=item.enqueued_at,
        argv=item.arguments,
        # Only an item that was moved here has a number longer than any pid's.
        original_id=read_original_id(claimed.fd) if len(item.pid) > 12 else None,
    )


def extend(leases: Sequence[Lease], visibility: float, clock: Clock) -> list[Lease]:
    """Set the expiry of the leases that are still held and return the lost ones. Any thread can call it.

    Raises:
        BackendUnavailable: It is unknown which are lost.
    """
    lost: list[Lease] = []
    for lease in leases:
        assert isinstance(lease, FsqLease)
        try:
            is_held = lease.ended is None and lease.claimed.fd >= 0 and lease.claimed.is_ours
        except OSError as error:
            if error.errno != errno.EBADF:
                raise BackendUnavailable(f"cannot read leases: {error.strerror}") from error
            # Another thread closed it in the meantime.
            is_held = False
        if is_held:
            lease.expires_at = clock.time() + visibility
            lease.deadline = clock.monotonic() + visibility
        else:
            lost.append(lease)
    return lost
