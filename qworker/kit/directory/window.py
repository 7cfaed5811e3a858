"""A sorted window of the oldest names of a queue, so that no directory is listed per message.

A listing keeps only the smallest names, so memory does not depend on the backlog. The window is `complete` if nothing
was left out and every later change is known, by inotify or because this process made it. Otherwise it is listed again
when it is used up.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Container
from itertools import islice

from qworker.kit.opening import open_directory

__all__ = ["Window"]

# Names kept: about 6 MB. A backlog of a million is listed twenty times, which costs some microseconds per message.
SIZE = 50_000
# Names taken in one run away from those of other workers, and how far from them the run may start.
_RUN, _APART = 256, 1024
# Directory entries read between two turns of the loop; about 1 ms of work.
_SLICE = 1000
# Two changes within one clock tick of the kernel leave the same mtime, so an mtime younger than that proves nothing.
_TICK_NS = 50_000_000


class Window:
    """The smallest names of a directory, in order.

    Args:
        directory: Its descriptor.
        local: True if this machine's kernel sets the times of the directory.
        skip: Names that each listing leaves out.
        is_ordered: Returns whether a name has its place in the order of names. Others are kept apart. None: all have.

    Attributes:
        unordered: Names that have no place in the order.
    """

    __slots__ = (
        "_added_meanwhile",
        "_ahead",
        "_directory",
        "_head",
        "_is_ordered",
        "_listing",
        "_local",
        "_missed",
        "_names",
        "_run",
        "_skip",
        "_urgent",
        "bound",
        "listed_at",
        "seen_mtime",
        "stale",
        "unordered",
    )

    def __init__(
        self,
        directory: int,
        *,
        local: bool,
        skip: Container[str] = frozenset(),
        is_ordered: Callable[[str], bool] | None = None,
    ) -> None:
        self._directory = directory
        self._skip = skip
        self._is_ordered = is_ordered
        self.unordered: set[str] = set()
        self._local = local
        self._names: list[str] = []
        self._head = 0
        # Names taken out of the window, the next one last.
        self._run: list[str] = []
        # Names with a higher priority than the run, in order, and the last one that was taken of them.
        self._urgent: list[str] = []
        self._ahead = ""
        # The largest name kept when larger ones were left out.
        self.bound: str | None = None
        # Nothing is known yet: list before concluding that it is empty.
        self.stale = True
        # The loop's time of the last listing, and the directory's mtime before it; 0 if the mtime proves nothing.
        self.listed_at = float("-inf")
        self.seen_mtime = 0
        self._listing = asyncio.Lock()
        # While a listing runs: the names that were added, and whether more was added than was reported.
        self._added_meanwhile: list[str] | None = None
        self._missed = False

    def __len__(self) -> int:
        return len(self._names) - self._head + len(self._run) + len(self._urgent)

    def first(self) -> str | None:
        """Return the next name without taking it."""
        if self._urgent:
            return self._urgent[0]
        if self._run:
            return self._run[-1]
        return self._names[self._head] if self._head < len(self._names) else None

    def peek(self, count: int) -> list[str]:
        """Return the names that will probably be taken next, without taking them."""
        return self._run[: -count - 1 : -1] if self._run else self._names[self._head : self._head + count]

    def take(self) -> str:
        """Take the next name: the oldest, or the next one of a run away from those of other workers (`skip_taken`)."""
        if self._urgent:
            self._ahead = self._urgent.pop(0)
            return self._ahead
        if self._run:
            return self._run.pop()
        name = self._names[self._head]
        self._head += 1
        if self._head >= 1024 and self._head * 2 >= len(self._names):
            del self._names[: self._head]
            self._head = 0
        return name

    def skip_taken(self, name: str, is_there: Callable[[str], bool]) -> None:
        """Find how far another worker is that took `name`, and take a run of names at a distance from it.

        The other worker also takes names in order, so what it has taken is one stretch. A few probes find the end of
        it, instead of one lost attempt for each name. A file that is skipped without a check and still exists is found
        by the next listing.

        Args:
            name: The last name that `take` returned.
            is_there: Returns whether a file is still in the directory.
        """
        if name == self._ahead:
            # Each worker takes these before its run.
            return
        names = self._names
        del names[: self._head]
        self._head = 0
        if self._run:
            # The run met another worker's run: the names that are left go back to their places.
            rest = self._run[::-1]
            self._run = []
            at = bisect_left(names, rest[0])
            names[at:at] = rest
        at = bisect_left(names, name)
        if at >= len(names) or is_there(names[at]):
            # Only one file is gone, which may have been removed: this is not a stretch.
            return
        step = 1
        while at + step < len(names) and not is_there(names[at + step]):
            step *= 2
        # The last probe that found no file was half a step earlier. Between the probes nothing is known.
        taken = step // 2 + 1
        if taken > 2:
            self.bound = names[-1]
        del names[at : at + taken]
        self._take_run(at)

    def _take_run(self, at: int) -> None:
        """Take a run far enough beyond the frontier that the other worker needs some time to reach it."""
        names = self._names
        # A run has one priority, which is the first character: the next priority waits for the end of this one.
        ends = bisect_left(names, chr(ord(names[at][0]) + 1), at) if at < len(names) else at
        rest = ends - at
        if rest < 4:
            return
        start = at + random.randrange(min(rest // 2, _APART))
        ends = min(ends, start + _RUN)
        self._run = names[start:ends][::-1]
        del names[start:ends]

    def add(self, name: str) -> None:
        """Add a file that was renamed into the directory."""
        if self._added_meanwhile is not None:
            self._added_meanwhile.append(name)
            return
        if self.stale or (self.bound is not None and name > self.bound):
            # The next listing shows it. Until then the known names are the oldest ones.
            return
        if not self._keep_apart([name]):
            return
        names = self._names
        if len(self) >= 2 * SIZE:
            # More was reported than a window holds: drop the newer half, and list the directory when it is needed.
            # Names of any kind can be the most: those of the run and those ahead of it go back to their places.
            names[:] = sorted([*names[self._head :], *self._run, *self._urgent])
            del names[SIZE:]
            self._head, self._run, self._urgent = 0, [], []
            self.bound = names[-1]
            if name > self.bound:
                return
        if self._run and name[0] < self._run[-1][0]:
            _insert(self._urgent, name, 0)
        elif not names or name > names[-1]:
            names.append(name)
        else:
            _insert(names, name, self._head)

    def _keep_apart(self, names: list[str]) -> list[str]:
        """Return the names that have a place in the order. Keep the others apart: as many as a window holds."""
        is_ordered = self._is_ordered
        if is_ordered is None:
            return names
        ordered = [name for name in names if is_ordered(name)]
        if len(ordered) < len(names):
            room = max(0, SIZE - len(self.unordered))
            self.unordered.update([name for name in names if not is_ordered(name)][:room])
        return ordered

    def mark_incomplete(self) -> None:
        """Record that more was added than was reported: nothing is known beyond the names in the window."""
        self._missed = True
        if self._head < len(self._names):
            self.bound = self._names[-1]
        else:
            self.stale = True

    @property
    def is_exhausted(self) -> bool:
        """True if a listing may show more names than are left."""
        return not self and (self.stale or self.bound is not None)

    def is_unchanged(self) -> bool:
        """Return whether the directory has provably not changed since its last listing."""
        return self.seen_mtime != 0 and os.fstat(self._directory).st_mtime_ns == self.seen_mtime

    async def list(self) -> None:
        """List the directory; concurrent calls share one listing.

        Raises:
            OSError: It cannot be listed.
        """
        if self._listing.locked():
            async with self._listing:
                return
        async with self._listing:
            await self._list()

    async def _list(self) -> None:
        fd = open_directory(".", self._directory)
        try:
            mtime = os.fstat(fd).st_mtime_ns
            settled = self._local and time.time_ns() - mtime > _TICK_NS
            # Names that are added while this listing runs may be missing from it.
            self._added_meanwhile, self._missed = [], False
            try:
                found, bound = await _smallest(fd, self._skip, self._keep_apart)
            finally:
                added, self._added_meanwhile = self._added_meanwhile, None
            self._names, self._head, self.bound, self.stale = found, 0, bound, False
            self._run, self._urgent = [], []
            for name in added:
                self.add(name)
            if self._missed:
                self.mark_incomplete()
            self.listed_at = asyncio.get_running_loop().time()
            self.seen_mtime = mtime if settled else 0
        finally:
            os.close(fd)


async def _smallest(
    directory: int, skip: Container[str], keep_apart: Callable[[list[str]], list[str]]
) -> tuple[list[str], str | None]:
    """Return the smallest names, sorted, and the largest of them if there are more.

    Hidden names are left out: they are unfinished files of other programs.
    """
    found: list[str] = []
    bound: str | None = None
    with os.scandir(directory) as entries:
        while chunk := [entry.name for entry in islice(entries, _SLICE)]:
            found += keep_apart([name for name in chunk if name[0] != "." and name not in skip])
            if len(found) > 4 * SIZE:
                bound = _keep_smallest(found)
            if len(chunk) == _SLICE:
                await asyncio.sleep(0)
    if len(found) > SIZE:
        return found, _keep_smallest(found)
    found.sort()
    return found, bound


def _insert(names: list[str], name: str, start: int) -> None:
    """Insert a name into a sorted list, from an index on, unless it is there."""
    at = bisect_left(names, name, start)
    if at >= len(names) or names[at] != name:
        names.insert(at, name)


def _keep_smallest(names: list[str]) -> str:
    names.sort()
    del names[SIZE:]
    return names[-1]
