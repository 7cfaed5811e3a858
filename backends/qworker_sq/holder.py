"""One process at a time leases from a channel: it has a flock, which the kernel releases when the process dies.

The lock belongs to the process: every instance in it may lease, and the last one that closes releases it.
"""

from __future__ import annotations

import fcntl
import os
import threading

import msgspec

from qworker.kit.opening import open_regular

__all__ = ["acquire", "release"]


class _ProcessLock(msgspec.Struct, eq=False):
    fd: int
    users: int


_lock = threading.Lock()
_locks: dict[tuple[int, int], _ProcessLock] = {}


def acquire(folder: int) -> tuple[tuple[int, int], bool] | None:
    """Take the lock of the channel with this directory, for one more instance.

    Returns:
        The argument of `release`, and whether this process did not have the lock before. None if another process has
        it.
    """
    with _lock:
        fd = open_regular("owner", folder, os.O_RDWR | os.O_CREAT)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        held = _locks.get(key)
        if held is not None:
            os.close(fd)
            held.users += 1
            return key, False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        _locks[key] = _ProcessLock(fd, 1)
        return key, True


def release(key: tuple[int, int]) -> None:
    """Give up the share of one instance."""
    with _lock:
        held = _locks.get(key)
        if held is None:
            return
        held.users -= 1
        if not held.users:
            del _locks[key]
            os.close(held.fd)


def _close_in_child() -> None:
    # A forked child would keep its parent's lock beyond the parent's death.
    global _lock  # noqa: PLW0603 - the parent may have held it in another thread
    _lock = threading.Lock()
    for held in _locks.values():
        os.close(held.fd)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)
