"""The ready messages of a queue that this process knows, oldest first: one listing serves many leases."""

from __future__ import annotations

import asyncio
import errno
import heapq
import os
import random
import time
from collections.abc import AsyncIterator

from qworker.kit.opening import open_directory
from qworker.kit.store_errors import DAMAGED
from qworker_mq.ids import parse_ticks, to_ticks
from qworker_mq.layout import is_usable_id

__all__ = ["SLICE", "Window", "iterate_names", "read_order"]

# A window of more names than this is cut: memory does not depend on the backlog.
_LIMIT = 50_000
# Seconds after which a long piece of work lets the event loop run.
SLICE = 0.002
# A change less than this before a listing (ns) may have the same time stamp as one after it.
_TICK_NS = 50_000_000
# Seconds after which a listing is repeated whatever the change times are, because a file server has a different clock.
_RESCAN = 1.0
# A listing is repeated early, to find messages that other processes returned, if that costs at most this part of the
# time.
_SHARE = 0.02


def read_order(name: str, directory: int) -> int:
    """Return the time that orders a message in its queue, in ticks: the time in its id, or that of its file."""
    ticks = parse_ticks(name)
    if ticks is not None:
        return ticks
    try:
        return to_ticks(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime)
    except OSError as error:
        # It is gone, or its inode is damaged: an attempt to lease it finds out.
        if error.errno != errno.ENOENT and error.errno not in DAMAGED:
            raise
        return 0


async def iterate_names(directory: int) -> AsyncIterator[str]:
    """Yield the names in a directory, and let the event loop run between slices."""
    # A separate descriptor: listings that share one share its position.
    fd = open_directory(".", directory)
    try:
        with os.scandir(fd) as entries:
            until = time.monotonic() + SLICE
            for number, entry in enumerate(entries, 1):
                yield entry.name
                if number % 64 == 0 and time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + SLICE
    finally:
        os.close(fd)


class Window:
    """The known ready messages of one queue.

    Args:
        directory: Descriptor of `queues/<queue>`.
        peers: Number of other processes that fetch from the same directory. One of the `peers + 1` oldest messages is
            taken at random, so that the processes do not all try the same file.
    """

    def __init__(self, directory: int, peers: int) -> None:
        self._directory = directory
        self._peers = peers
        self._heap: list[tuple[int, str]] = []
        # The newest message that a cut listing kept. A later listing finds the newer ones.
        self._cut: tuple[int, str] | None = None
        self._stamp = -1
        self._listed_at = 0.0
        self._cost = 0.0
        # Whether a change after the last listing is sure to show.
        self.is_stable = False

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, message_id: str) -> None:
        """Add a message that became ready."""
        row = (read_order(message_id, self._directory), message_id)
        if self._cut is None or row < self._cut:
            heapq.heappush(self._heap, row)

    async def take(self) -> str | None:
        """Return the next message to try, which another process may have taken. None: no message is ready."""
        await self.refresh()
        heap = self._heap
        if not heap:
            return None
        if not self._peers:
            return heapq.heappop(heap)[1]
        return await self._take_random()

    async def _take_random(self) -> str | None:
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
        """List the directory if the known messages are used up or old, and it may have changed."""
        now = time.monotonic()
        age = now - self._listed_at
        if self._heap and age < max(_RESCAN, self._cost / _SHARE):
            return
        changed = os.fstat(self._directory).st_mtime_ns
        if self.is_stable and changed == self._stamp and age < _RESCAN:
            return
        await self._list(changed)

    async def _list(self, stamp: int) -> None:
        started = time.monotonic()
        is_stable = time.time_ns() - stamp > _TICK_NS
        # Reversed when it is full, so that the newest message is the one to drop.
        rows: list[tuple[int, str]] = []
        newest_first: list[tuple[int, _Reversed]] | None = None
        async for name in iterate_names(self._directory):
            if not is_usable_id(name):
                continue
            row = (read_order(name, self._directory), name)
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
        self.is_stable = is_stable
        self._listed_at = time.monotonic()
        self._cost = self._listed_at - started

    def _keep(self, rows: list[tuple[int, str]]) -> None:
        # The listing may have missed messages that were added while it ran. Those that it found are not added twice.
        found = set(rows)
        for row in self._heap:
            if row not in found and (self._cut is None or row < self._cut):
                heapq.heappush(rows, row)
        self._heap = rows


class _Reversed:
    """A name that sorts in reverse."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __lt__(self, other: _Reversed) -> bool:
        return other.name < self.name
