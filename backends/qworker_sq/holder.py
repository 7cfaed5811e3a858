"""One process leases from a channel at a time: a flock that the kernel lets go of when the process dies.

The lock belongs to the process: every instance in it may lease, and the last that closes lets go.
"""

from __future__ import annotations

import fcntl
import os
import threading

import msgspec

from qworker.kit.segments.disk import open_regular

__all__ = ["acquire", "release"]


class _Owned(msgspec.Struct, eq=False):
    fd: int
    users: int


_lock = threading.Lock()
_owned: dict[tuple[int, int], _Owned] = {}


def acquire(folder: int) -> tuple[tuple[int, int], bool] | None:
    """Own the channel with this directory, for one more instance.

    Returns:
        What `release` needs, and whether this process did not own the channel until now; None while another process does.
    """
    with _lock:
        fd = open_regular("owner", folder, os.O_RDWR | os.O_CREAT)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        held = _owned.get(key)
        if held is not None:
            os.close(fd)
            held.users += 1
            return key, False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        _owned[key] = _Owned(fd, 1)
        return key, True


def release(key: tuple[int, int]) -> None:
    """Give up one instance's share."""
    with _lock:
        held = _owned.get(key)
        if held is None:
            return
        held.users -= 1
        if not held.users:
            del _owned[key]
            os.close(held.fd)


def _let_go_in_child() -> None:
    # A forked child would keep its parent's lock beyond the parent's death.
    global _lock  # noqa: PLW0603 - the parent may have held it in another thread
    _lock = threading.Lock()
    for held in _owned.values():
        os.close(held.fd)
    _owned.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
