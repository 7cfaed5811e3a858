"""The history of queues in memory: the events of the newest messages."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Collection, Sequence

from qworker.history.batch import EventBatch
from qworker.history.event import Event
from qworker.history.store import HistoryStore, parse_position

__all__ = ["MemoryHistory"]

_MOST = 50_000
_LOG = "memory"


class MemoryHistory(HistoryStore):
    """One bounded log, shared by every loop of this process."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        # Pairs of a number and a batch. The numbers have no gaps.
        self._batches: deque[tuple[int, EventBatch]] = deque()
        self._next = 1
        self._messages = 0

    def append(self, batches: Sequence[EventBatch]) -> None:
        """Keep events, and drop the oldest."""
        with self._lock:
            for batch in batches:
                self._batches.append((self._next, batch))
                self._next += 1
                self._messages += len(batch.id)
            while self._messages > self._most and len(self._batches) > 1:
                self._messages -= len(self._batches.popleft()[1].id)

    async def logs(self) -> list[str]:
        """Return the one log, if it holds events."""
        return [_LOG] if self._batches else []

    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Read the one log. A position is the number of a batch and how many of its events were returned."""
        number, given = [0, 0] if after is None else parse_position(after, 2)
        with self._lock:
            batches = [(own, batch) for own, batch in self._batches if own >= number and log == _LOG]
        found: list[Event] = []
        for own, batch in batches:
            events = batch.events()
            skip = given if own == number else 0
            some = events[skip : skip + limit - len(found)]
            found += some
            if skip + len(some) < len(events):
                return found, _position(own, skip + len(some))
            after = _position(own + 1, 0)
        return found, after

    async def read_batches(self, log: str, after: str | None, limit: int) -> tuple[list[EventBatch], str | None]:
        """Return the batches themselves."""
        number = 0 if after is None else parse_position(after, 2)[0]
        with self._lock:
            # The newest are searched first, because most callers follow the end of the log.
            newer = itertools.takewhile(lambda one: one[0] >= number and log == _LOG, reversed(self._batches))
            found = list(reversed(list(newer)))[:limit]
        return [batch for _, batch in found], _position(found[-1][0] + 1, 0) if found else after

    async def read_back(
        self, log: str, before: str | None, limit: int, needles: Collection[bytes] = ()
    ) -> tuple[list[EventBatch], str | None]:
        """Return the batches themselves, the newest first."""
        del needles
        end = self._next if before is None else parse_position(before, 2)[0]
        with self._lock:
            older = itertools.dropwhile(lambda one: one[0] >= end or log != _LOG, reversed(self._batches))
            found = list(itertools.islice(older, limit + 1))
        start = _position(found[limit - 1][0], 0) if len(found) > limit else None
        return [batch for _, batch in found[:limit]], start

    async def delete_before(self, log: str, position: str) -> None:
        """Drop the batches that lie completely before the position."""
        number = parse_position(position, 2)[0]
        with self._lock:
            while log == _LOG and self._batches and self._batches[0][0] < number:
                self._messages -= len(self._batches.popleft()[1].id)

    def describe_retention(self) -> str:
        """Return how many messages' events are kept."""
        return f"of the newest {self._most:,} messages"


def _position(number: int, given: int) -> str:
    return f"{number:020d}-{given:06d}"
