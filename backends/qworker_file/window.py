"""A sorted look at the oldest messages of a queue, so that no directory is listed per message.

A listing keeps the smallest names only: memory does not depend on the backlog. The window is `complete` when nothing was left out
and every later change is known, by inotify or by our own doing; otherwise it is listed again once it is used up.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from bisect import bisect_left, insort
from itertools import islice

from qworker.files import DIRECTORY

__all__ = ["Window"]

# Names kept. About 6 MB; a backlog of a million is listed twenty times, which is some microseconds per message.
SIZE = 50_000
# Directory entries read between two turns of the loop; about 1 ms.
_SLICE = 1000
# Two changes within a clock tick of the kernel leave the same mtime: a younger one proves nothing.
_TICK_NS = 50_000_000


class Window:
    """The smallest names of a directory, in order.

    Args:
        directory: its descriptor.
        local: whether this machine's kernel gives the directory its times.
    """

    __slots__ = (
        "_directory",
        "_head",
        "_listing",
        "_local",
        "_missed",
        "_names",
        "_told",
        "bound",
        "listed_at",
        "seen_mtime",
        "stale",
    )

    def __init__(self, directory: int, *, local: bool) -> None:
        self._directory = directory
        self._local = local
        self._names: list[str] = []
        self._head = 0
        # The largest name kept when larger ones were left out.
        self.bound: str | None = None
        # Nothing is known: list before believing that it is empty.
        self.stale = True
        # The loop's time of the last listing, and the directory's mtime before it; 0 when that proves nothing.
        self.listed_at = float("-inf")
        self.seen_mtime = 0
        self._listing = asyncio.Lock()
        # While a listing runs: what was added meanwhile, and whether more was than was told.
        self._told: list[str] | None = None
        self._missed = False

    def __len__(self) -> int:
        return len(self._names) - self._head

    def first(self) -> str | None:
        """The oldest name, which stays."""
        return self._names[self._head] if self._head < len(self._names) else None

    def take(self) -> str:
        """The oldest name, which goes."""
        name = self._names[self._head]
        self._head += 1
        if self._head >= 1024 and self._head * 2 >= len(self._names):
            del self._names[: self._head]
            self._head = 0
        return name

    def take_elsewhere(self, spread: int) -> str:
        """A name near the oldest, at random: for workers that get into one another's way."""
        last = min(len(self._names), self._head + spread) - 1
        return self._names.pop(random.randint(self._head, last))

    def add(self, name: str) -> None:
        """A file was renamed into the directory."""
        if self._told is not None:
            self._told.append(name)
            return
        if self.stale or (self.bound is not None and name > self.bound):
            # The next listing shows it; until then what is known is the oldest.
            return
        names = self._names
        if len(self) >= 2 * SIZE:
            # Told of more than a window holds: forget the newer half, and list when it is needed.
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

    def missed(self) -> None:
        """More was added than was told: nothing is known beyond the names that are here."""
        self._missed = True
        if self:
            self.bound = self._names[-1]
        else:
            self.stale = True

    @property
    def exhausted(self) -> bool:
        """Whether a listing may show more than is left."""
        return self._head >= len(self._names) and (self.stale or self.bound is not None)

    def unchanged(self) -> bool:
        """Whether the directory provably has not changed since its last listing."""
        return self.seen_mtime != 0 and os.fstat(self._directory).st_mtime_ns == self.seen_mtime

    async def list(self) -> None:
        """List the directory; concurrent calls share one listing.

        Raises:
            OSError: it cannot be listed.
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
            self._told, self._missed = [], False
            try:
                found, bound = await _smallest(fd)
            finally:
                told, self._told = self._told, None
            self._names, self._head, self.bound, self.stale = found, 0, bound, False
            for name in told:
                self.add(name)
            if self._missed:
                self.missed()
            self.listed_at = asyncio.get_running_loop().time()
            self.seen_mtime = mtime if settled else 0
        finally:
            os.close(fd)


async def _smallest(directory: int) -> tuple[list[str], str | None]:
    """The smallest names, sorted, and the largest of them when there are more. Hidden ones are somebody's unfinished business."""
    found: list[str] = []
    bound: str | None = None
    with os.scandir(directory) as entries:
        while chunk := [entry.name for entry in islice(entries, _SLICE)]:
            found += [name for name in chunk if name[0] != "."]
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
