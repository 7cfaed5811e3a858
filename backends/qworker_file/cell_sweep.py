"""The removal of expired cells, and of groups that are empty: a little in each round of the reaper."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice

from qworker.clock import Clock
from qworker.kit.files import list_names, remove_empty
from qworker.kit.opening import open_directory
from qworker_file.cell_file import CELLS, has_expired, name_of, remove_if_expired
from qworker_file.layout import QueueDir

__all__ = ["CellSweeper"]

# Seconds between the beginnings of two passes over all cells, and seconds of work in one round.
_PASS, _ROUND = 30.0, 0.005
# Cells between two looks at the time.
_SLICE = 100


class CellSweeper:
    """The sweeper of one queue. While a pass is not finished, it keeps its place in a group.

    Args:
        files: The queue.
        clock: The store's clock.
    """

    def __init__(self, files: QueueDir, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._began_at = float("-inf")
        # The groups of this pass that are left, as names of directories; and the group that is swept now.
        self._groups: list[str] = []
        self._group = ""
        self._fd = -1
        self._open_files = ExitStack()
        self._entries: Iterator[os.DirEntry[str]] = iter(())
        self._has_live = False

    async def sweep(self) -> None:
        """Do the work of one round. A queue without cells is looked at once per pass.

        Raises:
            OSError: The store failed.
        """
        if self._fd < 0 and not self._groups:
            now = self._clock.monotonic()
            if now - self._began_at < _PASS:
                return
            self._began_at = now
            self._groups = await self._list_groups()
        ends = time.perf_counter() + _ROUND
        while self._open_next():
            await self._sweep_some()
            if time.perf_counter() > ends:
                return

    def close(self) -> None:
        """Leave the group that is swept now. Idempotent."""
        self._fd = -1
        self._open_files.close()

    async def _list_groups(self) -> list[str]:
        try:
            cells = open_directory(CELLS, self._files.base)
        except FileNotFoundError:
            return []
        try:
            return [name for name in await list_names(cells) if name_of(name) is not None]
        finally:
            os.close(cells)

    def _open_next(self) -> bool:
        """Open the next group, unless one is open. False: the pass is finished."""
        while self._fd < 0 and self._groups:
            self._group = self._groups.pop()
            fd = self._open(self._group)
            if fd is not None:
                self._fd, self._has_live = fd, False
                self._open_files.callback(os.close, fd)
                self._entries = self._open_files.enter_context(os.scandir(fd))
        return self._fd >= 0

    def _open(self, group: str) -> int | None:
        try:
            cells = open_directory(CELLS, self._files.base)
        except FileNotFoundError:
            return None
        try:
            return open_directory(group, cells)
        except (FileNotFoundError, NotADirectoryError):
            return None
        finally:
            os.close(cells)

    async def _sweep_some(self) -> None:
        fd, now = self._fd, self._clock.time()
        names = [entry.name for entry in islice(self._entries, _SLICE)]
        if not names:
            self.close()
            if not self._has_live:
                self._remove_group()
            return
        expired = [name for name in names if has_expired(name, fd, now)]
        self._has_live |= len(expired) < len(names)
        if expired:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The reaper waits for no process, which can be frozen. The next pass removes them.
                return
            try:
                for name in expired:
                    # It may have been put again.
                    remove_if_expired(name, fd, now)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def _remove_group(self) -> None:
        try:
            cells = open_directory(CELLS, self._files.base)
        except FileNotFoundError:
            return
        try:
            remove_empty(self._group, cells)
        finally:
            os.close(cells)
