"""A sorted window of the oldest names of a queue, so that no directory is listed per message.

A listing keeps the smallest names only: memory does not depend on the backlog. The window is `complete` when nothing
was left out and every later change is known, by inotify or by our own doing; otherwise it is listed again once it is
used up.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Container
from itertools import islice

from qworker.kit.files import DIRECTORY

__all__ = ["Window"]

# Names kept. About 6 MB; a backlog of a million is listed twenty times, which is some microseconds per message.
SIZE = 50_000
# Names taken in one run apart from others, and how far from them it may start.
_RUN, _APART = 256, 1024
# Directory entries read between two turns of the loop; about 1 ms.
_SLICE = 1000
# Two changes within a clock tick of the kernel leave the same mtime: a younger one proves nothing.
_TICK_NS = 50_000_000


class Window:
    """The smallest names of a directory, in order.

    Args:
        directory: Its descriptor.
        local: Whether this machine's kernel gives the directory its times.
        skip: Names that each listing leaves out.
    """

    __slots__ = (
        "_added_meanwhile",
        "_directory",
        "_head",
        "_listing",
        "_local",
        "_missed",
        "_names",
        "_run",
        "_skip",
        "bound",
        "listed_at",
        "seen_mtime",
        "stale",
    )

    def __init__(self, directory: int, *, local: bool, skip: Container[str] = frozenset()) -> None:
        self._directory = directory
        self._skip = skip
        self._local = local
        self._names: list[str] = []
        self._head = 0
        # Names taken out of the window, the next one last.
        self._run: list[str] = []
        # The largest name kept when larger ones were left out.
        self.bound: str | None = None
        # Nothing is known: list before believing that it is empty.
        self.stale = True
        # The loop's time of the last listing, and the directory's mtime before it; 0 when that proves nothing.
        self.listed_at = float("-inf")
        self.seen_mtime = 0
        self._listing = asyncio.Lock()
        # While a listing runs: what was added meanwhile, and whether more was added than was reported.
        self._added_meanwhile: list[str] | None = None
        self._missed = False

    def __len__(self) -> int:
        return len(self._names) - self._head + len(self._run)

    def first(self) -> str | None:
        """Return the next name, which stays."""
        if self._run:
            return self._run[-1]
        return self._names[self._head] if self._head < len(self._names) else None

    def peek(self, count: int) -> list[str]:
        """Return the names that are probably taken next, which stay."""
        return self._run[: -count - 1 : -1] if self._run else self._names[self._head : self._head + count]

    def take(self) -> str:
        """Take the next name: the oldest, or the next of a run that keeps apart from those of others (`skip_taken`)."""
        if self._run:
            return self._run.pop()
        name = self._names[self._head]
        self._head += 1
        if self._head >= 1024 and self._head * 2 >= len(self._names):
            del self._names[: self._head]
            self._head = 0
        return name

    def skip_taken(self, name: str, is_there: Callable[[str], bool]) -> None:
        """Find out how far another worker is that had taken `name`, and take a run of names some way apart.

        A peer takes names in their order too, so what it has taken is one stretch: its end is found in a few probes
        instead of by one lost attempt for each name. What is passed over unseen, and is still there, is found by the
        next listing.

        Args:
            name: The last one that `take` gave.
            is_there: Whether a file is still in the directory.
        """
        names = self._names
        del names[: self._head]
        self._head = 0
        if self._run:
            # The run met another worker's: what is left of it goes back to its place.
            rest = self._run[::-1]
            self._run = []
            at = bisect_left(names, rest[0])
            names[at:at] = rest
        at = bisect_left(names, name)
        if at >= len(names) or is_there(names[at]):
            # One file only, which may have been removed: not a stretch.
            return
        step = 1
        while at + step < len(names) and not is_there(names[at + step]):
            step *= 2
        # The last probe that found nothing was half a step earlier; between the probes nothing is known.
        taken = step // 2 + 1
        if taken > 2:
            self.bound = names[-1]
        del names[at : at + taken]
        self._take_run(at)

    def _take_run(self, at: int) -> None:
        """Take a run from beyond the frontier, so far off that the peer needs a while to get there."""
        names = self._names
        rest = len(names) - at
        if rest < 4:
            return
        start = at + random.randrange(min(rest // 2, _APART))
        self._run = names[start : start + _RUN][::-1]
        del names[start : start + _RUN]

    def add(self, name: str) -> None:
        """Add a file that was renamed into the directory."""
        if self._added_meanwhile is not None:
            self._added_meanwhile.append(name)
            return
        if self.stale or (self.bound is not None and name > self.bound):
            # The next listing shows it; until then what is known is the oldest.
            return
        names = self._names
        if len(self) >= 2 * SIZE:
            # More was reported than a window holds: drop the newer half, and list when it is needed.
            del names[self._head + SIZE :]
            self.bound = names[-1]
            if name > self.bound:
                return
        if not names or name > names[-1]:
            names.append(name)
            return
        at = bisect_left(names, name, self._head)
        if at >= len(names) or names[at] != name:
            insort(names, name, self._head)

    def mark_incomplete(self) -> None:
        """Note that more was added than was reported: nothing is known beyond the names that are here."""
        self._missed = True
        if self._head < len(self._names):
            self.bound = self._names[-1]
        else:
            self.stale = True

    @property
    def is_exhausted(self) -> bool:
        """Whether a listing may show more than is left."""
        return not self and (self.stale or self.bound is not None)

    def is_unchanged(self) -> bool:
        """Return whether the directory provably has not changed since its last listing."""
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
        fd = os.open(".", DIRECTORY, dir_fd=self._directory)
        try:
            mtime = os.fstat(fd).st_mtime_ns
            settled = self._local and time.time_ns() - mtime > _TICK_NS
            # What is added while this listing runs may be missing in it.
            self._added_meanwhile, self._missed = [], False
            try:
                found, bound = await _smallest(fd, self._skip)
            finally:
                added, self._added_meanwhile = self._added_meanwhile, None
            self._names, self._head, self._run, self.bound, self.stale = found, 0, [], bound, False
            for name in added:
                self.add(name)
            if self._missed:
                self.mark_incomplete()
            self.listed_at = asyncio.get_running_loop().time()
            self.seen_mtime = mtime if settled else 0
        finally:
            os.close(fd)


async def _smallest(directory: int, skip: Container[str]) -> tuple[list[str], str | None]:
    """Return the smallest names, sorted, and the largest of them if there are more.

    Hidden names are left out: they are unfinished files of other programs.
    """
    found: list[str] = []
    bound: str | None = None
    with os.scandir(directory) as entries:
        while chunk := [entry.name for entry in islice(entries, _SLICE)]:
            found += [name for name in chunk if name[0] != "." and name not in skip]
            if len(found) > 4 * SIZE:
                bound = _keep_smallest(found)
            if len(chunk) == _SLICE:
                await asyncio.sleep(0)
    if len(found) > SIZE:
        return found, _keep_smallest(found)
    found.sort()
    return found, bound


def _keep_smallest(names: list[str]) -> str:
    names.sort()
    del names[SIZE:]
    return names[-1]
