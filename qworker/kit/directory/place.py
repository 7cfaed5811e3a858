"""Where a directory is: whether its path still leads to it, and whether another one may be used in its place.

Developers remove and replace directories while workers run. A worker then uses the directory that has the path now, or
creates it. But below a mount point on which nothing is mounted, that would be a directory on another disk.
"""

from __future__ import annotations

import errno
import os

from qworker.kit.mounts import find_mount

__all__ = ["Place"]


class Place:
    """The place of an open directory.

    Args:
        path: Its absolute path.
        directory: Its descriptor.
    """

    def __init__(self, path: str, directory: int) -> None:
        self._path = path
        self._identity = _identity_of(directory)
        # The parent by the path without links: the path may be a link that is replaced.
        real = os.path.realpath(path)
        self._parent = os.path.dirname(real)
        self._parent_identity = _path_identity(self._parent)
        self._mount = find_mount(real)

    def is_current(self) -> bool:
        """Return whether the path leads to the directory."""
        return _path_identity(self._path) == self._identity

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
