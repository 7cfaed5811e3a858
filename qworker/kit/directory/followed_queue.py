"""One queue as a backend instance follows it: its open directories, its windows of names, and its watches."""

from __future__ import annotations

import abc
import asyncio
import heapq
import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from qworker.clock import Clock
from qworker.kit.directory.blocked import BlockedFiles, is_about_one_file
from qworker.kit.directory.queue_files import QueueFiles
from qworker.kit.directory.retention import PRUNING, StuckFiles
from qworker.kit.directory.window import Window
from qworker.kit.inotify import Inotify
from qworker.message import Lease

__all__ = ["FollowedQueue"]

Files = TypeVar("Files", bound=QueueFiles)
Held = TypeVar("Held", bound=Lease)

# Seconds between two listings if inotify does not report changes, or not those of other hosts.
_RESCAN_BLIND = 1.0
# Seconds until a file that another process works on or writes to is tried again: the first pause and the longest.
_BUSY_FIRST, _BUSY_LAST = 0.02, 1.0


class FollowedQueue(abc.ABC, Generic[Files, Held]):
    """A queue that is open.

    Args:
        files: The open directories. This object closes them.
        clock: The store's clock.
        inotify: Reports changes.
        windows: The windows of names, in the order in which they are listed again.
        local_disk: True if no other machine uses the directory.
        rescan: Seconds after which a window is listed again although no change was reported.
    """

    def __init__(
        self,
        files: Files,
        clock: Clock,
        inotify: Inotify,
        windows: Sequence[Window],
        *,
        local_disk: bool,
        rescan: float,
    ) -> None:
        self.files = files
        # The leases of this instance, by the names of their items.
        self.own: dict[str, Held] = {}
        # Monotonic seconds of the last check that its directories have not been replaced.
        self.checked_at = time.monotonic()
        # Monotonic seconds.
        self._pruned_at = float("-inf")
        self._stuck = StuckFiles(files.name)
        self._clock = clock
        self._inotify = inotify
        self._windows = windows
        self._rescan = rescan if local_disk else min(rescan, _RESCAN_BLIND)
        # Files that other processes work on, as (the loop's time of the next attempt, name), and the current pause of
        # each.
        self._busy: list[tuple[float, str]] = []
        self._pauses: dict[str, float] = {}
        # Files that cannot be leased, by the descriptor of their directory, and whether there are any.
        self._blocked: dict[int, BlockedFiles] = {}
        self._has_blocked = False
        self._watches: list[int] = []
        self._is_followed = self._is_watched = False

    def follow(self) -> None:
        """Begin to follow the queue.

        The watches are set before the first listing, so that no change is missed between them.
        """
        if self._is_followed:
            return
        self._is_followed = True
        watches = self._watch()
        self._watches = [watch for watch in watches if watch >= 0]
        self._is_watched = len(self._watches) == len(watches)
        if not self._is_watched:
            self._rescan = min(self._rescan, _RESCAN_BLIND)

    @abc.abstractmethod
    def _watch(self) -> list[int]:
        """Watch the directories and return the watches; -1 for one that the kernel refused."""

    def _unwatch(self) -> None:
        for watch in self._watches:
            self._inotify.unwatch(watch)
        self._watches.clear()

    @abc.abstractmethod
    def _offer(self, name: str) -> None:
        """Add a name in the directory of ready messages to those that can be claimed."""

    @abc.abstractmethod
    async def has_work(self) -> bool:
        """Return whether something may be leased.

        Raises:
            OSError: The queue cannot be listed.
        """

    @abc.abstractmethod
    def until_due(self) -> float:
        """Return the seconds until the next delayed message is due; infinite while paused, or if none is known."""

    def until_check(self) -> float:
        """Return the seconds until a busy or blocked file is tried again, or the directories are listed again."""
        now = asyncio.get_running_loop().time()
        pause = min([window.listed_at for window in self._windows]) + self._rescan - now
        if self._busy:
            pause = min(pause, self._busy[0][0] - now)
        if self._has_blocked:
            pause = min([pause, *[blocked.until_due() for blocked in self._blocked.values()]])
        return max(pause, 0.001)

    async def _refresh(self) -> None:
        """Find what was added since the last check. List the directories only if nothing else reports it."""
        self._inotify.drain()
        oldest = asyncio.get_running_loop().time() - self._rescan
        for window in self._windows:
            if window.is_exhausted:
                await window.list()
            elif (not self._is_watched or window.listed_at <= oldest) and not window:
                if window.is_unchanged():
                    window.listed_at = asyncio.get_running_loop().time()
                else:
                    await window.list()

    def _retry_busy(self) -> None:
        if self._busy:
            now = asyncio.get_running_loop().time()
            while self._busy and self._busy[0][0] <= now:
                self._offer(heapq.heappop(self._busy)[1])

    def _try_later(self, name: str) -> None:
        """Try a file again after a pause, which doubles each time."""
        if len(self._pauses) > 10_000:
            # Nearly all of these names are gone by now.
            self._pauses.clear()
        pause = min(self._pauses.get(name, _BUSY_FIRST / 2) * 2, _BUSY_LAST)
        self._pauses[name] = pause
        heapq.heappush(self._busy, (asyncio.get_running_loop().time() + pause, name))

    def _block(self, source: int, name: str, error: OSError, target: int) -> bool:
        """Let a file rest if its error concerns it alone. Return False if the store failed.

        Args:
            source: The descriptor of its directory.
            name: Its name there.
            error: Why it cannot be leased.
            target: The descriptor of the directory to which it was to be moved.
        """
        if not is_about_one_file(error, self.files.tmp, source, target):
            return False
        self._blocked[source].add(name, error)
        self._has_blocked = True
        return True

    def _block_too_large(self, source: int, name: str) -> bool:
        """Let a file rest that is larger than `max_body`. Return False if it is gone."""
        try:
            size = os.stat(name, dir_fd=source, follow_symlinks=False).st_size
        except FileNotFoundError:
            return False
        self._blocked[source].add_too_large(name, size, self.files.max_body or 0)
        self._has_blocked = True
        return True

    def _unblock(self, source: int, name: str) -> None:
        """Forget a file that was blocked and is not any more."""
        self._blocked[source].forget(name)
        self._has_blocked = any(self._blocked.values())

    @property
    def is_needed(self) -> bool:
        """Whether the queue must stay open although no call uses it now."""
        return bool(self.own or self._busy or self._has_blocked)

    def is_pruning_due(self) -> bool:
        """Return whether to prune finished messages now. It is true once in `PRUNING` seconds."""
        now = self._clock.monotonic()
        if now - self._pruned_at < PRUNING:
            return False
        self._pruned_at = now
        return True

    def stuck_in(self, directory: str) -> Callable[[str, OSError], None]:
        """Return what `prune` calls for a file in a directory that cannot be removed."""

        def add(name: str, error: OSError) -> None:
            self._stuck.add(f"{directory}/{name}", error, self.files.tmp)

        return add

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything. Leases that are held end as if the process had died. Idempotent."""

    @abc.abstractmethod
    def close_deleted(self) -> None:
        """Stop following a queue that was deleted, but keep its descriptors: calls that run now use them."""
