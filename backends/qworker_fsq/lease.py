"""Taking an item in place, and what becomes of it: the lock on the open file is the lease, and every end is one rename of its name.

    queue/<name>, unlocked       ready
    queue/<name>, flock(LOCK_EX) being worked on; the kernel frees the lock when the worker dies
    done/<name>, fail/<name>     finished

The file is looked up by its name once more under the lock: whoever had it before may have finished it between our open and our lock, and
renamed what we have open.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from enum import Enum, auto

from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import READ, read_all
from qworker_fsq.layout import QueueDir
from qworker_fsq.names import MAX_NAME, Item, Malformed, parse, with_tries

__all__ = [
    "Claimed",
    "NotClaimed",
    "claim",
    "due_at",
    "mark_due",
    "read_origin",
    "reason_name",
    "write_origin",
]

# The last digits of a modification time that is a due time: the standard has no delays, and other programs see none.
_MILLION, _MARK = 1_000_000, 271_828
_ORIGIN = "user.qworker.origin"
_NO_ATTRIBUTES = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOSPC})


class NotClaimed(Enum):
    """Why an item was not taken."""

    # Somebody finished it, or renamed it.
    GONE = auto()
    # Somebody is working on it.
    BUSY = auto()
    # This user may not open it.
    REFUSED = auto()
    # It could not be worked on, and is in fail/ by now.
    FAILED = auto()


# What this process has locked: a child that is forked and runs on would keep the locks after its parent's death.
_open: set[Claimed] = set()


def _let_go() -> None:
    for claimed in _open:
        os.close(claimed.fd)
        claimed.fd = -1
    _open.clear()


os.register_at_fork(after_in_child=_let_go)


class Claimed:
    """An item that is locked.

    Args:
        files: the queue.
        name: the file's name in queue/.
        item: what that says.
        fd: open on the file, with the lock; from now on this object's.
        status: of the file.
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
        """Whether the name still is this file's: nobody but an unlocked scan, or a person, can have changed that."""
        return _inode(self.name, self.files.queue) == self.inode

    def read(self) -> bytes:
        """The body."""
        return read_all(self.fd, self.size)

    def finish(self, *, keep: bool) -> bool:
        """It is done; False when it is not ours any more.

        Args:
            keep: in done/, as the standard says; else it is gone.
        """
        if not keep:
            return self.is_ours and _unlink(self.name, self.files.queue)
        return self._rename(self.name, self.files.done)

    def fail(self, reason: str | None = None) -> bool:
        """It failed for good; False when it is not ours any more. The reason first: what failed is never seen without."""
        if not self.is_ours:
            return False
        return fail_item(self.files, self.name, reason)

    def retry(self, due: float | None = None) -> bool:
        """It failed for now: one more in its name; False when it is not ours any more.

        Args:
            due: Unix seconds before which no qworker takes it; None: now.
        """
        if not self.is_ours:
            return False
        constants = self.files.constants
        tries = self.item.tries + 1
        name = with_tries(self.name, tries, constants)
        # A copy of it, made by hand, is not to be overwritten.
        while len(os.fsencode(name)) <= MAX_NAME and _inode(name, self.files.queue) is not None:
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

    def postpone(self, due: float) -> bool:
        """Give it back for later, with its name as it is; False when it is not ours any more."""
        if not self.is_ours:
            return False
        # Somebody else's file cannot be put off: it is given back for now.
        mark_due(self.fd, due)
        return True

    def _rename(self, name: str, directory: int) -> bool:
        if not self.is_ours:
            return False
        return _moved(self.name, name, self.files.queue, directory, self.inode)

    def close(self, *, gone: bool = False) -> None:
        """Let go of the lock. Idempotent.

        Args:
            gone: it has left queue/, where nobody will look for it again: what else has it open may keep the lock.
        """
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _open.discard(self)
            if not gone:
                # A program that was just being started may have the descriptor too.
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def abandon(self) -> None:
        """Close the file, and leave the lock to whoever else has it open: a program that still works on it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _open.discard(self)
            os.close(fd)


def claim(
    files: QueueDir, name: str, *, now: float, max_tries: int, ttl: float, lock: bool = True
) -> Claimed | NotClaimed | float:
    """Take one item of queue/; a number is when it is due, in Unix seconds.

    Args:
        files: the queue.
        name: the file's name.
        now: Unix seconds.
        max_tries: an item that was tried so often has failed; 0: never.
        ttl: an item older than so many seconds has failed; 0: never.
        lock: False: somebody else sees to it that nobody works on the same item.

    Raises:
        OSError: the store is in trouble; nothing is claimed.
    """
    try:
        fd = os.open(name, READ, dir_fd=files.queue)
    except FileNotFoundError:
        return NotClaimed.GONE
    except PermissionError:
        return NotClaimed.REFUSED
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENODEV}:
            return _failed(files, name, "not a regular file")
        raise
    try:
        claimed = _claim(files, name, fd, now, max_tries, ttl, lock=lock)
    except BaseException:
        os.close(fd)
        raise
    if not isinstance(claimed, Claimed):
        os.close(fd)
    return claimed


def _claim(
    files: QueueDir, name: str, fd: int, now: float, max_tries: int, ttl: float, *, lock: bool
) -> Claimed | NotClaimed | float:
    if lock:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return NotClaimed.BUSY
    status = os.fstat(fd)
    if _inode(name, files.queue) != status.st_ino:
        return NotClaimed.GONE
    if not stat.S_ISREG(status.st_mode):
        return _failed(files, name, "not a regular file")
    try:
        item = parse(name, files.constants)
    except Malformed as error:
        return _failed(files, name, f"malformed name: {error}")
    due = due_at(status)
    if due is not None and due > now:
        return due
    why = exhausted(item.tries, item.enqueued_at, now, max_tries, ttl)
    if why is not None:
        return _failed(files, name, why)
    return Claimed(files, name, item, fd, status)


def exhausted(tries: int, enqueued_at: float, now: float, max_tries: int, ttl: float) -> str | None:
    """Why an item may not be worked on any more; None when it may."""
    if 0 < max_tries <= tries:
        return f"Max tries exceeded: {max_tries} ({tries})"
    if ttl > 0 and now > enqueued_at + ttl:
        return f"TTL Expired: {ttl:.10g}"
    return None


# -- files -----------------------------------------------------------------------------------------------------------


def _inode(name: str, directory: int) -> int | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _unlink(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def _moved(name: str, target: str, source: int, destination: int, inode: int | None) -> bool:
    """Rename; False when the name is gone. An error after a rename that has happened is none."""
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except OSError as error:
        if inode is not None and _inode(target, destination) == inode:
            return True
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def _failed(files: QueueDir, name: str, why: str) -> NotClaimed:
    return NotClaimed.FAILED if fail_item(files, name, why) else NotClaimed.GONE


def fail_item(files: QueueDir, name: str, reason: str | None) -> bool:
    """Move an item of queue/ to fail/, with its reason; False when it is gone.

    Raises:
        OSError: it cannot be moved.
    """
    inode = _inode(name, files.queue)
    if inode is None:
        return False
    target = _free_name(files, name)
    if reason is not None:
        os.close(write_reason(files.fail, reason_name(target), reason, mode=files.constants.item_mode))
    if _moved(name, target, files.queue, files.fail, inode):
        return True
    if reason is not None:
        _unlink(reason_name(target), files.fail)
    return False


def _free_name(files: QueueDir, name: str) -> str:
    """A name in fail/ for an item: of one that was enqueued twice both failures are kept, the later with more tries."""
    if _inode(name, files.fail) is None:
        return name
    try:
        tries = parse(name, files.constants).tries
    except Malformed:
        return name
    target = name
    while len(os.fsencode(target)) <= MAX_NAME and _inode(target, files.fail) is not None:
        tries += 1
        target = with_tries(name, tries, files.constants)
    return target if len(os.fsencode(target)) <= MAX_NAME else name


def due_at(status: os.stat_result) -> float | None:
    """When a file that a qworker has put off is due; None for any other."""
    moment = status.st_mtime_ns
    return moment // _MILLION / 1000 if moment % _MILLION == _MARK else None


def mark_due(fd: int, due: float) -> bool:
    """Put a file off, which only its owner can; whether that was done."""
    moment = int(due * 1000) * _MILLION + _MARK
    try:
        os.utime(fd, ns=(moment, moment))
    except PermissionError:
        return False
    return True


# -- where a message comes from, which the standard has not: an attribute of its file ----------------------------------


def write_origin(fd: int, origin: str) -> None:
    """Note a message's id in the store that it was moved from, where the file system has attributes."""
    try:
        os.setxattr(fd, _ORIGIN, origin.encode())
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise


def read_origin(fd: int) -> str | None:
    """The id that was noted; None where none was."""
    try:
        return os.getxattr(fd, _ORIGIN).decode(errors="replace")
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return None


# -- reasons, which the standard has not, and which hide beside what failed ------------------------------------------


def reason_name(name: str) -> str:
    """Where the reason of a failed item is."""
    hidden = f".{name}.reason"
    if len(os.fsencode(hidden)) <= MAX_NAME:
        return hidden
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()}.reason"
