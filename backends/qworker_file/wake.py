"""Wake-ups: our own calls at once, the trigger FIFO for one idle worker, inotify for everybody who does not know us.

inotify tells the names of what was renamed into queue/ and delay/, so a woken worker opens that file and lists nothing: a directory
that once held a million files stays as big as it was, and a listing of it would cost its old size at every wake-up. All of it is a
hint. The guarantee is the timed rescan.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import random
import struct
from collections.abc import Callable, Sequence

from qworker_file.layout import QueueDir

__all__ = ["Inotify", "Trigger", "Waiter"]

_CREATE, _CLOSE_WRITE, _MOVED_TO, _DELETE, _MOVED_FROM = 0x100, 0x8, 0x80, 0x200, 0x40
_OVERFLOW, _IGNORED, _ONLYDIR = 0x4000, 0x8000, 0x01000000
_HEAD = struct.Struct("iIII")

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
        mask = _DELETE | _MOVED_FROM if removals else _CREATE | _CLOSE_WRITE | _MOVED_TO
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
        heard = False
        while True:
            try:
                events = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return heard
            heard = True
            self._tell(events)
            if len(events) < 1 << 15:
                return heard

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
                self._watches[watch](os.fsdecode(events[at - length : at].rstrip(b"\0")))

    def close(self) -> None:
        """End every watch. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
            self._watches.clear()


class Trigger:
    """The right to read a queue's trigger: one idle worker has it, by a lock on the FIFO."""

    __slots__ = ("_fd", "_held")

    def __init__(self, files: QueueDir) -> None:
        self._fd = files.trigger
        self._held = False

    def acquire(self) -> int:
        """The descriptor to listen on; -1 while another worker does, or where there is no trigger."""
        if self._fd < 0:
            return -1
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP}:
                return -1
            raise
        self._held = True
        return self._fd

    def release(self) -> None:
        """Let another worker listen."""
        if self._held:
            self._held = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def drain(self) -> None:
        """Read what was written; one wake-up does for all of it."""
        try:
            while len(os.read(self._fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass


class Waiter:
    """One `wait`: what may end it early."""

    __slots__ = ("_loop", "_timer", "_triggers", "event", "queues")

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = frozenset(queues)
        self.event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # By the descriptor that is listened on.
        self._triggers: dict[int, Trigger] = {}
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, files: QueueDir) -> None:
        """Listen to a queue's trigger, unless another idle worker does, or this one does already."""
        if files.trigger < 0 or files.trigger in self._triggers:
            return
        trigger = Trigger(files)
        fd = trigger.acquire()
        if fd >= 0:
            self._triggers[fd] = trigger
            self._loop.add_reader(fd, self._pulled, trigger)

    def forget(self, files: QueueDir) -> None:
        """A queue was deleted: its descriptors are about to be closed."""
        trigger = self._triggers.pop(files.trigger, None)
        if trigger is not None:
            self._loop.remove_reader(files.trigger)
            self.event.set()

    def _pulled(self, trigger: Trigger) -> None:
        trigger.drain()
        self.event.set()

    def hear(self) -> None:
        """Inotify told something: the listener of the trigger goes first, the others look a little later."""
        if self._triggers:
            self.event.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(random.uniform(0.002, 0.02), self.event.set)

    def close(self) -> None:
        """Listen no more."""
        for fd, trigger in self._triggers.items():
            self._loop.remove_reader(fd)
            trigger.release()
        self._triggers.clear()
        if self._timer is not None:
            self._timer.cancel()
