"""The names that arrive in queue directories: Linux inotify, read when the store requests it.

It is only a hint. Without it, or after an overflow, the directory is listed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache

__all__ = ["DirectoryWatcher"]

_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_ONLYDIR = 0x01000000
_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
    return libc


class DirectoryWatcher:
    """Watches directories.

    Args:
        on_created: Called with a watch's number and each name that arrived in its directory.
        on_overflow: Called when events were lost.
        on_change: Called after any event, also when a name has left.
    """

    def __init__(
        self, *, on_created: Callable[[int, str], None], on_overflow: Callable[[], None], on_change: Callable[[], None]
    ) -> None:
        self._on_created = on_created
        self._on_overflow = on_overflow
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        libc = _libc()
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(libc, "inotify_init1") else -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self.drain)

    def add(self, directory: int) -> int | None:
        """Watch a directory, given by its descriptor. Return the watch's number; None if the kernel refuses."""
        if self._fd < 0:
            return None
        mask = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR
        watch = int(_libc().inotify_add_watch(self._fd, f"/proc/self/fd/{directory}".encode(), mask))
        return watch if watch >= 0 else None

    def drain(self) -> None:
        """Report the changes so far."""
        changed = False
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            changed = True
            self._report(data)
        if changed:
            self._on_change()

    def _report(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _OVERFLOW:
                self._on_overflow()
            elif mask & (_MOVED_TO | _CREATE):
                self._on_created(watch, os.fsdecode(name))

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
