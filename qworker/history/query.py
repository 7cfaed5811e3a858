"""Read the history of a store: the newest events of all logs together, and the events that follow them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator

import msgspec

from qworker.history.event import Event
from qworker.history.store import HistoryStore, sort_by_time

__all__ = ["EventFilter", "follow", "read_newest"]

_PAGE = 1000


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter of events. None means any.

    Attributes:
        queue: The queue.
        id: The id of the message.
        kinds: The kinds of events.
        since: Unix seconds: it happened then or later.
        until: Unix seconds: it happened then or earlier.
        task: The name of the task.
        worker: A part of the name of the worker.
        error: A text that the reason contains, in any case.
    """

    queue: str | None = None
    id: str | None = None
    kinds: frozenset[str] | None = None
    since: float | None = None
    until: float | None = None
    task: str | None = None
    worker: str | None = None
    error: str | None = None

    def needles(self) -> list[bytes]:
        """Return what the stored form of each record with a matching event contains."""
        return [msgspec.json.encode(text) for text in (self.queue, self.id, self.task) if text is not None]

    def has(self, event: Event) -> bool:
        """Return whether an event passes the filter."""
        return (
            (self.queue is None or event.queue == self.queue)
            and (self.id is None or event.id == self.id)
            and (self.kinds is None or event.kind in self.kinds)
            and (self.since is None or event.at >= self.since)
            and (self.until is None or event.at <= self.until)
            and (self.task is None or event.task == self.task)
            and (self.worker is None or self.worker in event.worker)
            and (self.error is None or self.error.casefold() in (event.error or "").casefold())
        )


async def read_newest(
    history: HistoryStore, wanted: EventFilter, count: int
) -> tuple[list[Event], dict[str, str | None]]:
    """Return the last `count` events by time, and the end of each log for `follow`.

    All of the history is read, in bounded memory.
    """
    kept: list[tuple[float, int, Event]] = []
    numbers = itertools.count()
    ends: dict[str, str | None] = {}
    for log in await history.logs():
        after: str | None = None
        while True:
            page, after = await history.read(log, after, _PAGE)
            if not page:
                break
            for event in filter(wanted.has, page):
                row = (event.at, next(numbers), event)
                if len(kept) < count:
                    heapq.heappush(kept, row)
                elif kept and row > kept[0]:
                    heapq.heapreplace(kept, row)
        ends[log] = after
    return [event for _, _, event in sorted(kept)], ends


async def follow(history: HistoryStore, wanted: EventFilter, ends: dict[str, str | None]) -> AsyncIterator[list[Event]]:
    """Yield the events after `ends`, by time, once for each search. If a search finds nothing, the list is empty.

    Args:
        history: The history to search.
        wanted: The filter of the events.
        ends: The position in each log, which this function moves. A log that is not in it is read from its beginning.
    """
    while True:
        found: list[Event] = []
        for log in await history.logs():
            after = ends.get(log)
            while True:
                page, after = await history.read(log, after, _PAGE)
                ends[log] = after
                if not page:
                    break
                found += filter(wanted.has, page)
        yield sort_by_time(found)
