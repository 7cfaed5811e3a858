"""Wake-ups from directories, without a thread: Linux inotify on a descriptor that the event loop watches.

A hint only: watches may be refused (their number is limited per user), events may overflow, and a network file system tells nothing
of other hosts. Every user of this rescans on a timer as well.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from functools import cache

__all__ = ["Watcher"]

_CLOSE_WRITE = 0x8
_MOVED_TO = 0x80
_CREATE = 0x100
_ONLYDIR = 0x01000000
_MASK = _CLOSE_WRITE | _MOVED_TO | _CREATE | _ONLYDIR


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
    return libc


class Watcher:
    """Calls back, on the running event loop, after something was made, finished or moved in a watched directory.

    Args:
        on_change: called with no more than one call per loop turn, however much happened.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        libc = _libc()
        if hasattr(libc, "inotify_init1"):
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._drain)

    @property
    def active(self) -> bool:
        """Whether the kernel gave us a watcher at all."""
        return self._fd >= 0

    def add(self, directory: int) -> bool:
        """Watch a directory, given by descriptor; False when the kernel refuses."""
        if self._fd < 0:
            return False
        path = f"/proc/self/fd/{directory}".encode()
        return int(_libc().inotify_add_watch(self._fd, path, _MASK)) >= 0

    def _drain(self) -> None:
        try:
            while len(os.read(self._fd, 1 << 16)) > 1 << 15:
                pass
        except BlockingIOError:
            pass
        self._on_change()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
