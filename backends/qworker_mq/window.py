"""The ready messages of a queue that this process knows of, oldest first: a listing is made once, and leased from many times."""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import time
from collections.abc import AsyncIterator

from qworker_mq.ids import at_unix, made_at
from qworker_mq.layout import usable_id

__all__ = ["Window", "listing", "order_of"]

# A window of more names than this is cut: memory does not depend on the backlog.
_LIMIT = 50_000
# Seconds of the event loop that one slice of a listing may take.
_SLICE = 0.002
# A change less than this before a listing (ns) may carry the same time stamp as one after it.
_TICK_NS = 50_000_000
# Seconds after which a listing is repeated whatever the time stamps say: a file server's clock is not ours.
_RESCAN = 1.0
# A listing is repeated early, for what others returned, while that costs at most this part of the time.
_SHARE = 0.02

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def order_of(name: str, directory: int) -> int:
    """Where a message stands in its queue: by the time in its id, or that of its file."""
    made = made_at(name)
    if made is not None:
        return made
    try:
        return at_unix(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime)
    except FileNotFoundError:
        return 0


async def listing(directory: int) -> AsyncIterator[str]:
    """The names in a directory, giving the event loop its turn between slices."""
    # A descriptor of its own: those that share one share its position.
    fd = os.open(".", _DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(fd) as entries:
            until = time.monotonic() + _SLICE
            for number, entry in enumerate(entries, 1):
                yield entry.name
                if number % 64 == 0 and time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + _SLICE
    finally:
        os.close(fd)


class Window:
    """Ready messages of one queue.

    Args:
        directory: descriptor of `queues/<queue>`.
        peers: how many others fetch from the same directory: one of the `peers + 1` oldest is taken, at random, so that they
            do not all go for the same file.
    """

    def __init__(self, directory: int, peers: int) -> None:
        self._directory = directory
        self._peers = peers
        self._heap: list[tuple[int, str]] = []
        # The newest that a cut listing kept; what is newer is found by a later listing.
        self._cut: tuple[int, str] | None = None
        self._stamp = -1
        self._listed_at = 0.0
        self._cost = 0.0
        self._settled = False

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def settled(self) -> bool:
        """Whether a change after the last listing is sure to show."""
        return self._settled

    def add(self, message_id: str) -> None:
        """Know of a message that became ready."""
        row = (order_of(message_id, self._directory), message_id)
        if self._cut is None or row < self._cut:
            heapq.heappush(self._heap, row)

    async def take(self) -> str | None:
        """The next message to try; None when none is ready. It may be gone by now."""
        await self.refresh()
        heap = self._heap
        if not heap:
            return None
        if not self._peers:
            return heapq.heappop(heap)[1]
        return await self._take_fuzzily()

    async def _take_fuzzily(self) -> str | None:
        heap = self._heap
        if len(heap) <= self._peers:
            # The queue is short: contention is likely.
            await asyncio.sleep(random.randrange(10) / 1000)
        rows = [heapq.heappop(heap) for _ in range(min(len(heap), self._peers + 1))]
        if not rows:
            return None
        chosen = rows.pop(random.randrange(len(rows)))
        for row in rows:
            heapq.heappush(heap, row)
        return chosen[1]

    async def refresh(self) -> None:
        """List the directory, if what is known is used up or old and it may have changed."""
        now = time.monotonic()
        age = now - self._listed_at
        if self._heap and age < max(_RESCAN, self._cost / _SHARE):
            return
        changed = os.fstat(self._directory).st_mtime_ns
        if self._settled and changed == self._stamp and age < _RESCAN:
            return
        await self._list(changed)

    async def _list(self, stamp: int) -> None:
        started = time.monotonic()
        settled = time.time_ns() - stamp > _TICK_NS
        # Sorted the other way round once it is full, so that the newest is the one to drop.
        rows: list[tuple[int, str]] = []
        newest_first: list[tuple[int, _Reversed]] | None = None
        async for name in listing(self._directory):
            if not usable_id(name):
                continue
            row = (order_of(name, self._directory), name)
            if newest_first is not None:
                heapq.heappushpop(newest_first, (-row[0], _Reversed(name)))
                continue
            rows.append(row)
            if len(rows) == _LIMIT:
                newest_first = [(-order, _Reversed(kept)) for order, kept in rows]
                heapq.heapify(newest_first)
        self._cut = None
        if newest_first is not None:
            rows = [(-order, kept.name) for order, kept in newest_first]
            self._cut = (-newest_first[0][0], newest_first[0][1].name)
        heapq.heapify(rows)
        self._keep(rows)
        self._stamp = stamp
        self._settled = settled
        self._listed_at = time.monotonic()
        self._cost = self._listed_at - started

    def _keep(self, rows: list[tuple[int, str]]) -> None:
        # What was added while the listing ran may have been missed by it; what the listing found again is known already.
        found = set(rows)
        for row in self._heap:
            if row not in found and (self._cut is None or row < self._cut):
                heapq.heappush(rows, row)
        self._heap = rows


class _Reversed:
    """A name that sorts the other way round."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __lt__(self, other: _Reversed) -> bool:
        return other.name < self.name
