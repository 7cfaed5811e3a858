"""An index of the failed messages of a queue, for displays: each message is read once, and its group is kept.

A store that lists finished messages faster than it reads them is listed, and what is new is read. Any other store is
read from the newest message back to the first one that is known.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec

from qworker.backend import Backend
from qworker.backend.offers import OffersHeads, heads_of
from qworker.failures.groups import FailureGroup, GroupCounts, GroupedFailures, finished_message, group_of
from qworker.message import FinishedMessage, Query, State, StoredMessage

__all__ = ["MOST_INDEXED", "FailureIndex", "IndexedGroup"]

# Messages of a queue that are indexed, the newest ones.
MOST_INDEXED = 200_000
# Groups with a count of their own.
_MOST_GROUPS = 1_000
# The newest messages of a group, which can be read.
_NEWEST = 50
# Messages that are listed, and that are read, before other tasks of the loop run.
_SLICE, _BURST = 1_000, 20
_MINUTE = 60.0


class IndexedGroup(GroupCounts, kw_only=True):
    """The messages of a group in one queue.

    Attributes:
        minutes: How many failed in each minute since the epoch. 0: the store does not know it.
        newest: The newest ones, the last one first.
    """

    minutes: Counter[int] = msgspec.field(default_factory=Counter[int])
    newest: list[FinishedMessage] = msgspec.field(default_factory=list[FinishedMessage])

    def add(self, stored: StoredMessage) -> None:
        """Count a message. `newest` is in order after `cut`."""
        super().add(stored)
        self.minutes[_minute(stored)] += 1
        self.newest.append(finished_message(stored))
        if len(self.newest) > 4 * _NEWEST:
            self.cut()

    def cut(self) -> None:
        """Keep the newest messages only."""
        self.newest = heapq.nlargest(_NEWEST, self.newest, key=lambda one: one.finished_at or 0.0)

    def count_since(self, at: float) -> int:
        """Return how many failed since a moment in Unix seconds, to the minute."""
        return sum(count for minute, count in self.minutes.items() if minute >= at // _MINUTE)


class FailureIndex:
    """The index of one queue. One task at a time uses it.

    Args:
        backend: The open backend.
        queue: The queue.

    Attributes:
        groups: What the last refresh has found, the largest group first.
    """

    def __init__(self, backend: Backend, queue: str) -> None:
        self._backend = backend
        self._queue = queue
        self._heads = heads_of(backend)
        self._version: str | None = None
        # The group of each message, by a hash of its id and time. 64 bits do not collide among so few messages.
        self._known: dict[int, FailureGroup | None] = {}
        self._tally = _new_tally()
        # The minute before which messages are left out. None: it is not known yet.
        self._oldest: int | None = None
        self.groups: list[IndexedGroup] = []

    async def refresh(self) -> list[IndexedGroup]:
        """Read what is new, and return the groups.

        Raises:
            QueueNotFound: The queue does not exist.
            BackendError: The store failed.
        """
        if self._heads is None:
            await self._read_back()
            return self._keep_groups()
        version = await self._heads.heads_version(self._queue, State.FAILED)
        if version is None or version != self._version:
            await self._list_all(self._heads)
            self._version = version
            self._keep_groups()
        return self.groups

    def _keep_groups(self) -> list[IndexedGroup]:
        self.groups = self._tally.largest()
        for one in self.groups:
            one.cut()
        return self.groups

    async def read_newest(self, key: str) -> list[StoredMessage]:
        """Return the newest messages of a group, the last one first.

        Raises:
            QueueNotFound: The queue does not exist.
            BackendError: The store failed.
        """
        wanted = next(
            (one.newest for one in self.groups if one.group is not None and one.group.key == key),
            list[FinishedMessage](),
        )
        if self._heads is not None:
            return [one async for page in self._heads.read_finished(self._queue, wanted) for one in page]
        stored = {one.message.id: one for one in await self._backend.find(self._queue, [one.id for one in wanted])}
        return [stored[one.id] for one in wanted if one.matches(stored.get(one.id))]

    # -- a store that is listed ----------------------------------------------------------------------------------------

    async def _list_all(self, heads: OffersHeads) -> None:
        if self._oldest is None:
            minutes = Counter[int]()
            async for page in self._pages(heads):
                minutes.update(map(_minute, page))
            self._oldest = _oldest_of(minutes)
        known, tally, minutes = dict[int, FailureGroup | None](), _new_tally(), Counter[int]()
        async for page in self._pages(heads):
            minutes.update(map(_minute, page))
            recent = {_key(one): one for one in page if _minute(one) >= self._oldest}
            await self._read_groups(heads, [one for key, one in recent.items() if key not in self._known])
            for key, one in recent.items():
                # Otherwise it was requeued or removed before it could be read.
                if key in self._known:
                    self._known[key] = known[key] = tally.add(self._known[key], one)
        self._known, self._tally, self._oldest = known, tally, _oldest_of(minutes)

    async def _pages(self, heads: OffersHeads) -> AsyncIterator[list[StoredMessage]]:
        for part in await self._backend.parts(self._queue, State.FAILED, 1):
            async for page in heads.heads(self._queue, State.FAILED, part):
                for begin in range(0, len(page), _SLICE):
                    yield page[begin : begin + _SLICE]
                    await asyncio.sleep(0)

    async def _read_groups(self, heads: OffersHeads, new: list[StoredMessage]) -> None:
        for begin in range(0, len(new), _BURST):
            began = time.monotonic()
            some = [finished_message(one) for one in new[begin : begin + _BURST]]
            async for page in heads.read_finished(self._queue, some):
                self._known.update((_key(one), group_of(one)) for one in page)
            # Reading many messages takes seconds. It leaves half of the time to the other tasks of the loop.
            await asyncio.sleep(time.monotonic() - began)

    # -- a store that is read ------------------------------------------------------------------------------------------

    async def _read_back(self) -> None:
        stored = (await self._backend.stats(self._queue)).failed
        # If fewer messages are stored than are known, some were requeued or removed. Then all are read again.
        if len(self._known) > min(stored, MOST_INDEXED + MOST_INDEXED // 10):
            self._known, self._tally = {}, _new_tally()
        known, tally = self._known, self._tally
        # If this is cancelled or fails, older messages may be missing.
        self._known, self._tally = {}, _new_tally()
        async for page in self._backend.browse(self._queue, Query(State.FAILED, limit=MOST_INDEXED, newest=True)):
            new = {key: one for one in page if (key := _key(one)) not in known}
            began = time.monotonic()
            for number, (key, one) in enumerate(new.items()):
                known[key] = tally.add(group_of(one), one)
                if number % _BURST == _BURST - 1:
                    await asyncio.sleep(time.monotonic() - began)
                    began = time.monotonic()
            if len(new) < len(page):
                break
        self._known, self._tally = known, tally


def _new_tally() -> GroupedFailures[IndexedGroup]:
    return GroupedFailures(IndexedGroup, _MOST_GROUPS)


def _minute(stored: StoredMessage) -> int:
    return int((stored.finished_at or 0.0) // _MINUTE)


def _key(stored: StoredMessage) -> int:
    return hash((stored.message.id, stored.finished_at))


def _oldest_of(minutes: Counter[int]) -> int:
    """Return the minute of the oldest message that is indexed."""
    left = MOST_INDEXED
    for minute in sorted(minutes, reverse=True):
        left -= minutes[minute]
        if left <= 0:
            return minute
    return 0
