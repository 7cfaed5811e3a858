"""The data of an item's file apart from its contents: due time, original id, reason of a failure; and its renames."""

from __future__ import annotations

import errno
import hashlib
import os

from qworker.kit.directory.queue_files import is_directory
from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import find_inode, try_unlink
from qworker.kit.planted import rename_file
from qworker_fsq.layout import QueueDir
from qworker_fsq.names import MAX_NAME, InvalidItemName, parse, with_tries

__all__ = [
    "fail_item",
    "mark_due",
    "read_due",
    "read_original_id",
    "reason_name",
    "try_rename",
    "write_original_id",
]

# The last digits of a modification time that is a due time. The standard has no delays, and other programs see none.
_MILLION, _MARK = 1_000_000, 271_828
_ORIGINAL_ID = "user.qworker.origin"
_NO_ATTRIBUTES = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOSPC})


def try_rename(name: str, target: str, source: int, destination: int, inode: int | None) -> bool:
    """Rename a file and return whether the name existed.

    An error that is reported although the rename has happened is ignored.
    """
    try:
        rename_file(name, target, source, destination)
    except OSError as error:
        if inode is not None and find_inode(target, destination) == inode:
            return True
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def fail_item(files: QueueDir, name: str, reason: str | None) -> bool:
    """Move an item of queue/ to fail/, with its reason, and return whether it was in queue/.

    Raises:
        OSError: It cannot be moved.
    """
    inode = find_inode(name, files.queue)
    if inode is None:
        return False
    target = _free_name(files, name)
    if reason is not None:
        os.close(write_reason(files.fail, reason_name(target), reason, mode=files.constants.item_mode))
    if try_rename(name, target, files.queue, files.fail, inode):
        return True
    if reason is not None:
        try_unlink(reason_name(target), files.fail)
    return False


def _free_name(files: QueueDir, name: str) -> str:
    """Return a free name in fail/.

    If an item was enqueued twice, both failures are kept, the later one with more tries. A directory is no item: the
    rename moves it aside.
    """
    if not _is_taken(name, files.fail):
        return name
    try:
        tries = parse(name, files.constants).tries
    except InvalidItemName:
        return name
    target = name
    while len(os.fsencode(target)) <= MAX_NAME and _is_taken(target, files.fail):
        tries += 1
        target = with_tries(name, tries, files.constants)
    return target if len(os.fsencode(target)) <= MAX_NAME else name


def _is_taken(name: str, directory: int) -> bool:
    return find_inode(name, directory) is not None and not is_directory(directory, name)


def read_due(status: os.stat_result) -> float | None:
    """Return when a file that a qworker has delayed is due, in Unix seconds, or None for any other file."""
    moment = status.st_mtime_ns
    return moment // _MILLION / 1000 if moment % _MILLION == _MARK else None


def mark_due(fd: int, due: float) -> bool:
    """Delay a file, which only its owner can do, and return whether that was done."""
    moment = int(due * 1000) * _MILLION + _MARK
    try:
        os.utime(fd, ns=(moment, moment))
    except PermissionError:
        return False
    return True


# -- original ids, which the standard does not have: an attribute of the file ------------------------------------------


def write_original_id(fd: int, original_id: str) -> None:
    """Store the id that a message had in the store that it was moved from, if the file system has attributes."""
    try:
        os.setxattr(fd, _ORIGINAL_ID, original_id.encode())
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise


def read_original_id(fd: int) -> str | None:
    """Return the id that was stored, or None."""
    try:
        return os.getxattr(fd, _ORIGINAL_ID).decode(errors="replace")
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return None


# -- reasons, which the standard does not have: hidden files in fail/ --------------------------------------------------


def reason_name(name: str) -> str:
    """Return the name of the file with the reason of a failed item."""
    hidden = f".{name}.reason"
    if len(os.fsencode(hidden)) <= MAX_NAME:
        return hidden
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()}.reason"
