"""Wake-ups: our own calls at once, the trigger FIFO for one idle worker, inotify for everybody who does not know us.

inotify tells the names of what was renamed into queue/ and delay/, so a woken worker opens that file and lists nothing: a directory
that once held a million files stays as big as it was, and a listing of it would cost its old size at every wake-up. All of it is a
hint. The guarantee is the timed rescan.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import struct
from collections.abc import Callable, Sequence

__all__ = ["Inotify", "Waiter"]

_CREATE, _CLOSE_WRITE, _MOVED_TO, _DELETE, _MOVED_FROM = 0x100, 0x8, 0x80, 0x200, 0x40
_OVERFLOW, _IGNORED, _ONLYDIR = 0x4000, 0x8000, 0x01000000
_HEAD = struct.Struct("iIII")
# Bytes read at once: a few events, which is what wakes an idle worker, or many.
_FEW, _MANY = 1 << 11, 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]

# What was told: the watch's own callback gets a name; None: more happened than the kernel kept.
Told = Callable[[str | None], None]


class Inotify:
    """One inotify instance; absent where the user has no more of them, or the system has none."""

    def __init__(self) -> None:
        self.fd = -1
        if hasattr(_libc, "inotify_init1"):
            self.fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._watches: dict[int, Told] = {}

    def watch(self, directory: int, told: Told, *, removals: bool = False) -> int:
        """Watch a directory, given by descriptor; -1 when the kernel refuses."""
        if self.fd < 0:
            return -1
        mask = _CREATE | _CLOSE_WRITE | _MOVED_TO
        if removals:
            mask = _CREATE | _MOVED_TO | _DELETE | _MOVED_FROM
        watch = int(_libc.inotify_add_watch(self.fd, f"/proc/self/fd/{directory}".encode(), mask | _ONLYDIR))
        if watch >= 0:
            self._watches[watch] = told
        return watch

    def forget(self, watch: int) -> None:
        """Stop one watch."""
        if self._watches.pop(watch, None) is not None:
            _libc.inotify_rm_watch(self.fd, watch)

    def drain(self) -> bool:
        """Tell all that the kernel has kept; whether there was anything."""
        if self.fd < 0:
            return False
        heard, size = False, _FEW
        while True:
            try:
                events = os.read(self.fd, size)
            except BlockingIOError:
                return heard
            heard = True
            self._tell(events)
            if len(events) < size // 2:
                return heard
            size = _MANY

    def _tell(self, events: bytes) -> None:
        at, end = 0, len(events)
        while at < end:
            watch, mask, _, length = _HEAD.unpack_from(events, at)
            at += 16 + length
            if mask & _OVERFLOW:
                for tell in self._watches.values():
                    tell(None)
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


class Waiter:
    """One `wait`: what may end it early."""

    __slots__ = ("_loop", "_timer", "_woken", "queues")

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = frozenset(queues)
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[bool] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, told: bool = True) -> None:
        """End the wait.

        Args:
            told: something happened; else its time is over.
        """
        if not self._woken.done():
            self._woken.set_result(told)

    def wake_later(self) -> None:
        """End the wait a little later than whoever has the trigger does."""
        self._timer = self._timer or self._loop.call_later(random.uniform(0.002, 0.02), self.wake)

    async def rest(self, seconds: float) -> bool:
        """Wait so long at most; whether something was told."""
        ends = self._loop.call_later(seconds, self.wake, False)
        try:
            told = await self._woken
        finally:
            ends.cancel()
        if not told:
            self._woken = self._loop.create_future()
        return told

    def close(self) -> None:
        """Listen no more."""
        if self._timer is not None:
            self._timer.cancel()
