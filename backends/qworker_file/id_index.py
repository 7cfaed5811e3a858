"""The ids that publishers chose: each stored message with such an id has a second link in names/, called by the id alone.

`link` never overwrites, so of two publishes of one id one makes the link. The number of links tells whether the message is still
stored in any state: a link that is the last one is free. Only who holds the lock of names/ removes a last link, for between a look
at the number and the removal another publish could have taken the id.
"""

from __future__ import annotations

import fcntl
import os

from qworker.kit.files import DIRECTORY, list_names
from qworker_file.layout import QueueDir
from qworker_file.names import index_name

__all__ = ["forget_index", "sweep_index", "try_lock_index", "unlock_index"]


def try_lock_index(files: QueueDir) -> int | None:
    """Lock the index between processes: a descriptor for `unlock_index`; None while another has it."""
    fd = os.open(".", DIRECTORY, dir_fd=files.names)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock_index(fd: int) -> None:
    """Unlock, also for a child forked meanwhile, and close."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def forget_index(files: QueueDir, message_id: str) -> None:
    """Free the id of a message that is gone. What cannot be freed now is swept later."""
    fd = try_lock_index(files)
    if fd is None:
        return
    try:
        _remove_last(files, index_name(message_id))
    finally:
        unlock_index(fd)


async def sweep_index(files: QueueDir) -> int:
    """Free every id whose message is gone; count them."""
    names = [name for name in await list_names(files.names) if name.startswith("id-")]
    count = 0
    for name in names:
        if not _is_last(files, name):
            continue
        fd = try_lock_index(files)
        if fd is None:
            return count
        try:
            count += _remove_last(files, name)
        finally:
            unlock_index(fd)
    return count


def _is_last(files: QueueDir, name: str) -> bool:
    try:
        return os.stat(name, dir_fd=files.names, follow_symlinks=False).st_nlink == 1
    except FileNotFoundError:
        return False


def _remove_last(files: QueueDir, name: str) -> bool:
    if not _is_last(files, name):
        return False
    try:
        os.unlink(name, dir_fd=files.names)
    except FileNotFoundError:
        # With the queue.
        return False
    return True
