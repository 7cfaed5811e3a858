"""Wake-ups from directories, without a thread: inotify on a descriptor that the event loop reads.

These are only hints. The kernel may refuse watches (their number is limited per user), events may overflow, and a
network file system does not report changes by other hosts. Every user of this module also scans again on a timer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from qworker.kit.linux import (
    CLOSE_WRITE,
    CREATE,
    DELETE,
    IGNORED,
    MOVED_FROM,
    MOVED_TO,
    OVERFLOW,
    add_inotify_watch,
    open_inotify,
    parse_inotify_events,
    remove_inotify_watch,
)

__all__ = ["Inotify", "OnName", "Watcher", "ignore"]

_ARRIVALS, _REMOVALS = CREATE | MOVED_TO, DELETE | MOVED_FROM
# Bytes read at once: a few events, which is what wakes an idle worker, or many.
_FEW, _MANY = 1 << 11, 1 << 16

# Called with a name in a watched directory. None: events were lost.
OnName = Callable[[str | None], None]


def ignore(_name: str | None) -> None:
    """Do nothing with a name: for a watch whose events need only be seen."""


def _add(fd: int, directory: int, mask: int) -> int:
    if fd < 0:
        return -1
    try:
        return add_inotify_watch(fd, directory, mask)
    except OSError:
        return -1


class Inotify:
    """One inotify instance whose events are read by name. `fd` is -1 if the kernel refuses an instance."""

    def __init__(self) -> None:
        try:
            self.fd = open_inotify()
        except OSError:
            self.fd = -1
        self._watches: dict[int, tuple[OnName, OnName]] = {}

    def watch(self, directory: int, on_arrival: OnName, on_removal: OnName | None = None) -> int:
        """Watch a directory. Return the number of the watch, or -1 if the kernel refuses.

        Args:
            directory: The directory's descriptor.
            on_arrival: Called for each name that arrived. If `on_removal` is None, it is also called when a file was
                closed after writing.
            on_removal: Called for each name that left.
        """
        mask = _ARRIVALS | (CLOSE_WRITE if on_removal is None else _REMOVALS)
        watch = _add(self.fd, directory, mask)
        if watch >= 0:
            self._watches[watch] = (on_arrival, on_arrival if on_removal is None else on_removal)
        return watch

    def unwatch(self, watch: int) -> None:
        """End one watch. Idempotent."""
        if self._watches.pop(watch, None) is not None:
            remove_inotify_watch(self.fd, watch)

    def drain(self) -> bool:
        """Report all events that the kernel has kept. Return whether there were any."""
        found, size = False, _FEW
        while self.fd >= 0:
            try:
                events = os.read(self.fd, size)
            except BlockingIOError:
                break
            found = True
            if self._watches:
                self._report(events)
            if len(events) < size // 2:
                break
            size = _MANY
        return found

    def _report(self, events: bytes) -> None:
        for number, mask, name in parse_inotify_events(events):
            if name:
                if number in self._watches:
                    self._watches[number][mask & _REMOVALS != 0](name)
            elif mask & OVERFLOW:
                for on_arrival, _ in tuple(self._watches.values()):
                    on_arrival(None)
            elif mask & IGNORED:
                self._watches.pop(number, None)

    def close(self) -> None:
        """End every watch. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
            self._watches.clear()


class Watcher(Inotify):
    """An inotify instance that the running event loop reads.

    Args:
        on_change: Called at most once in each turn of the loop, however much happened.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        if self.fd >= 0:
            self._loop.add_reader(self.fd, self.drain)

    def add(self, directory: int) -> bool:
        """Watch a directory, given by its descriptor, without its names. Return False if the kernel refuses."""
        return _add(self.fd, directory, _ARRIVALS | CLOSE_WRITE) >= 0

    def drain(self) -> bool:
        """Report all events that the kernel has kept. Return whether there were any."""
        found = super().drain()
        if found:
            self._on_change()
        return found

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
        super().close()
