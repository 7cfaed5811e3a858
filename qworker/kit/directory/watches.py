"""Changes in directories, reported by inotify with the names that were added.

A worker that is woken opens that file and lists nothing. A directory that once held a million files stays as large as
it was, so a listing would cost its old size at every wake-up. All of this is a hint. The guarantee is the timed rescan.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

__all__ = ["Inotify"]

_CREATE, _CLOSE_WRITE, _MOVED_TO, _DELETE, _MOVED_FROM = 0x100, 0x8, 0x80, 0x200, 0x40
_OVERFLOW, _IGNORED, _ONLYDIR = 0x4000, 0x8000, 0x01000000
_HEAD = struct.Struct("iIII")
# Bytes read at once: a few events, which is what wakes an idle worker, or many.
_FEW, _MANY = 1 << 11, 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]

# Receives the name that was added, or None if the kernel dropped events.
_OnName = Callable[[str | None], None]


class Inotify:
    """One inotify instance. `fd` is -1 if the user can have no more of them, or the system has no inotify."""

    def __init__(self) -> None:
        self.fd = -1
        if hasattr(_libc, "inotify_init1"):
            self.fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._watches: dict[int, _OnName] = {}

    def watch(self, directory: int, on_name: _OnName, *, removals: bool = False) -> int:
        """Watch a directory, given by its descriptor, and return the watch; -1 if the kernel refuses it."""
        if self.fd < 0:
            return -1
        mask = _CREATE | _CLOSE_WRITE | _MOVED_TO
        if removals:
            mask = _CREATE | _MOVED_TO | _DELETE | _MOVED_FROM
        watch = int(_libc.inotify_add_watch(self.fd, f"/proc/self/fd/{directory}".encode(), mask | _ONLYDIR))
        if watch >= 0:
            self._watches[watch] = on_name
        return watch

    def unwatch(self, watch: int) -> None:
        """Stop one watch."""
        if self._watches.pop(watch, None) is not None:
            _libc.inotify_rm_watch(self.fd, watch)

    def drain(self) -> bool:
        """Report the events that the kernel has kept, and return whether there were any."""
        if self.fd < 0:
            return False
        has_read, size = False, _FEW
        while True:
            try:
                events = os.read(self.fd, size)
            except BlockingIOError:
                return has_read
            has_read = True
            self._report(events)
            if len(events) < size // 2:
                return has_read
            size = _MANY

    def _report(self, events: bytes) -> None:
        at, end = 0, len(events)
        while at < end:
            watch, mask, _, length = _HEAD.unpack_from(events, at)
            at += 16 + length
            if mask & _OVERFLOW:
                for on_name in self._watches.values():
                    on_name(None)
            elif mask & _IGNORED:
                self._watches.pop(watch, None)
            elif length and watch in self._watches:
                self._watches[watch](events[at - length : at].rstrip(b"\0").decode(errors="surrogateescape"))

    def close(self) -> None:
        """End every watch. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
            self._watches.clear()
