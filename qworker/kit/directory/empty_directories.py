"""Directories of queues that are known to be empty. To look at them costs one `stat`, and no descriptor stays open."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from qworker.kit.opening import open_directory

__all__ = ["EmptyDirectories"]

# Two changes within one clock tick of the kernel leave the same mtime, so an mtime younger than that proves nothing.
_TICK_NS = 50_000_000
# Directories that are remembered at most: about 20 MB.
_MOST = 100_000


class EmptyDirectories:
    """The empty directories below a root on a local file system.

    Args:
        root: The descriptor of the root.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        # The mtime of each at which it was empty.
        self._seen: dict[str, int] = {}

    def are_empty(self, queue: str, parts: Mapping[str, str]) -> bool:
        """Return whether directories of a queue are empty. False if it is not known: to open the queue shows why.

        Args:
            queue: The name of the queue.
            parts: The names of the directories, each with how the names in it begin that count.
        """
        try:
            return all(self._is_empty(f"{queue}/{part}", prefix) for part, prefix in parts.items())
        except OSError:
            return False

    def _is_empty(self, path: str, prefix: str) -> bool:
        mtime = os.stat(path, dir_fd=self._root, follow_symlinks=False).st_mtime_ns
        if self._seen.get(path) == mtime:
            return True
        is_empty = self._has_no_entry(path, prefix)
        if is_empty and time.time_ns() - mtime > _TICK_NS:
            if len(self._seen) >= _MOST:
                self._seen.clear()
            self._seen[path] = mtime
        return is_empty

    def _has_no_entry(self, path: str, prefix: str) -> bool:
        fd = open_directory(path, self._root)
        try:
            with os.scandir(fd) as entries:
                return not any(entry.name.startswith(prefix) for entry in entries)
        finally:
            os.close(fd)
