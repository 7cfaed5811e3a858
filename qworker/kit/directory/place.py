"""Where a directory is: whether its path still leads to it, and whether another one may be used in its place.

Developers remove and replace directories while workers run. A worker then uses the directory that has the path now, or
creates it. But below a mount point on which nothing is mounted, that would be a directory on another disk.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from qworker.kit.files import find_identity
from qworker.kit.mounts import find_mount

__all__ = ["Parts", "Place", "PlaceCheck"]

# Seconds between two checks whether a directory was removed or replaced.
_CHECK_EVERY = 1.0


class PlaceCheck:
    """Whether directories were removed or replaced. It is checked once a second, from any thread.

    Args:
        is_in_place: Returns whether they have their names now.
    """

    def __init__(self, is_in_place: Callable[[], bool]) -> None:
        self._is_in_place = is_in_place
        self._checked_at = time.monotonic()
        self._found = False

    def is_replaced(self, *, now: bool = False) -> bool:
        """Return whether one of them was removed or replaced.

        Args:
            now: Whether it is checked now in any case.
        """
        moment = time.monotonic()
        if now or self._found or moment - self._checked_at >= _CHECK_EVERY:
            self._checked_at = moment
            self._found = not self._is_in_place()
        return self._found


class Parts:
    """Open files and directories that belong together, each with its name in another one."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, int, tuple[int, int]]] = []

    def add(self, name: str, parent: int, fd: int) -> int:
        """Add an open one and return its descriptor.

        Args:
            name: Its name.
            parent: The descriptor of the directory in which it has the name.
            fd: Its descriptor.
        """
        self._parts.append((name, parent, _identity_of(fd)))
        return fd

    def are_in_place(self) -> bool:
        """Return whether all of them still have their names."""
        return all(find_identity(name, parent) == identity for name, parent, identity in self._parts)


class Place:
    """The place of an open directory.

    Args:
        path: Its absolute path.
        directory: Its descriptor.
        parts: What must keep its name below the directory.
    """

    def __init__(self, path: str, directory: int, parts: Parts | None = None) -> None:
        self._path = path
        self._parts = parts or Parts()
        self._check = PlaceCheck(self.is_current)
        self._identity = _identity_of(directory)
        # The parent by the path without links: the path may be a link that is replaced.
        real = os.path.realpath(path)
        self._parent = os.path.dirname(real)
        self._parent_identity = _path_identity(self._parent)
        self._mount = find_mount(real)

    def is_current(self) -> bool:
        """Return whether the path leads to the directory, and all parts are in place."""
        return _path_identity(self._path) == self._identity and self._parts.are_in_place()

    def is_replaced(self, *, now: bool = False) -> bool:
        """Return whether the path leads to another directory, or to none: see `PlaceCheck`."""
        return self._check.is_replaced(now=now)

    def check_replaceable(self) -> None:
        """Check that the path may be opened again, or created.

        Raises:
            OSError: It would be in another directory, or on another file system.
        """
        mount, before = find_mount(os.path.realpath(self._path)), self._mount
        if before is not None and (mount is None or mount.point != before.point):
            reason = f"nothing is mounted at {before.point or '/'} now, where the queues were: mount it again"
            raise OSError(errno.ENODEV, reason)
        if mount != before and os.path.isdir(self._path):
            # A file system was mounted there again, and it has the directory.
            return
        if _path_identity(self._parent) != self._parent_identity:
            reason = f"{self._parent} was removed or replaced, in which the queues were: restart the program to use it"
            raise OSError(errno.ENOENT, reason)


def _identity_of(directory: int) -> tuple[int, int]:
    found = os.fstat(directory)
    return found.st_dev, found.st_ino


def _path_identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
