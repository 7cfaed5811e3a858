"""The inotify watches of the calls that wait for cells. Without such a call there are none, and no inotify instance.

The instance is closed a moment after the last call: a close just after the end of a watch would block the event loop
for milliseconds, until no processor of the kernel uses the watch.
"""

from __future__ import annotations

import asyncio
import os

from qworker.kit.inotify import Watcher, ignore
from qworker.kit.opening import open_directory
from qworker_file.cell_file import CELLS, file_name
from qworker_file.layout import QueueDir

__all__ = ["CellHub", "CellListener"]

# Seconds.
_CLOSE_AFTER = 0.2


class CellListener:
    """One call that waits.

    Attributes:
        woken: Set when one of its cells may have changed.
        places: The directories that it watches, by device and inode, each with a name there.
    """

    __slots__ = ("places", "woken")

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.places: set[tuple[tuple[int, int], str]] = set()


class _Directory:
    """A watched directory, and the listeners of its names."""

    __slots__ = ("names", "watch")

    def __init__(self) -> None:
        self.watch = -1
        self.names: dict[str, set[CellListener]] = {}

    def report(self, name: str | None) -> None:
        """Wake the listeners of a name, or all of them if events were lost."""
        found = self.names.values() if name is None else [self.names.get(name, set[CellListener]())]
        for listeners in found:
            for listener in listeners:
                listener.woken.set()


class CellHub:
    """The watches of one store.

    Attributes:
        is_closed: Whether the store is closed, and all calls end.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._watcher: Watcher | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._directories: dict[tuple[int, int], _Directory] = {}

    def subscribe(self, files: QueueDir, group: str, name: str, listener: CellListener) -> None:
        """Watch a cell, or the directory in which the first missing part of its path will appear.

        It is called again before each look, because parts may have appeared, or have been removed and made again.
        """
        fds = [files.base]
        try:
            for part in (CELLS, file_name(group)):
                fd = _open(part, fds[-1])
                if fd is None:
                    self._watch(fds[-1], part, listener)
                    # It may have appeared before it was watched.
                    fd = _open(part, fds[-1])
                    if fd is None:
                        return
                fds.append(fd)
            self._watch(fds[-1], file_name(name), listener)
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _watch(self, fd: int, name: str, listener: CellListener) -> None:
        self._keep_watcher()
        if self._watcher is None:
            # One instance for all calls: each user may have few.
            self._watcher = Watcher(lambda: ignore(None))
        found = os.fstat(fd)
        key = found.st_dev, found.st_ino
        directory = self._directories.setdefault(key, _Directory())
        directory.names.setdefault(name, set()).add(listener)
        listener.places.add((key, name))
        # If the kernel refuses, the looks are enough. A watch that exists is the same one.
        directory.watch = self._watcher.watch(fd, directory.report, directory.report)

    def forget(self, listener: CellListener) -> None:
        """End the watches that only this listener needs. Idempotent."""
        for key, name in listener.places:
            directory = self._directories[key]
            listeners = directory.names[name]
            listeners.discard(listener)
            if not listeners:
                del directory.names[name]
            if not directory.names:
                del self._directories[key]
                if self._watcher is not None and directory.watch >= 0:
                    self._watcher.unwatch(directory.watch)
        listener.places.clear()
        if not self._directories and self._watcher is not None:
            self._keep_watcher()
            self._closing = asyncio.get_running_loop().call_later(_CLOSE_AFTER, self._close_watcher)

    def close(self) -> None:
        """End all calls. Idempotent."""
        self.is_closed = True
        for directory in self._directories.values():
            directory.report(None)
        self._close_watcher()

    def _keep_watcher(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def _close_watcher(self) -> None:
        self._keep_watcher()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


def _open(name: str, parent: int) -> int | None:
    try:
        return open_directory(name, parent)
    except FileNotFoundError:
        return None
