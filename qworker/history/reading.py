"""Looking through the history of a store: the newest events of all parts together, and what comes after them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator

import msgspec

from qworker.backend import Backend
from qworker.history.event import Event
from qworker.history.store import in_order

__all__ = ["Wanted", "follow", "newest"]

_PAGE = 1000


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which events; None: any."""

    queue: str | None = None
    id: str | None = None
    kinds: frozenset[str] | None = None
    # Unix seconds.
    since: float | None = None

    def has(self, event: Event) -> bool:
        """Whether it is one of them."""
        return (
            (self.queue is None or event.queue == self.queue)
            and (self.id is None or event.id == self.id)
            and (self.kinds is None or event.kind in self.kinds)
            and (self.since is None or event.at >= self.since)
        )


async def newest(backend: Backend, wanted: Wanted, count: int) -> tuple[list[Event], dict[str, str | None]]:
    """The last `count` events by time, and the end of each part for `follow`.

    All of the history is read, in bounded memory.
    """
    kept: list[tuple[float, int, Event]] = []
    numbers = itertools.count()
    ends: dict[str, str | None] = {}
    for part in await backend.history_parts():
        after: str | None = None
        while True:
            page, after = await backend.read_history(part, after, _PAGE)
            if not page:
                break
            for event in filter(wanted.has, page):
                row = (event.at, next(numbers), event)
                if len(kept) < count:
                    heapq.heappush(kept, row)
                elif kept and row > kept[0]:
                    heapq.heapreplace(kept, row)
        ends[part] = after
    return [event for _, _, event in sorted(kept)], ends


async def follow(backend: Backend, wanted: Wanted, ends: dict[str, str | None]) -> AsyncIterator[list[Event]]:
    """What is told after `ends`, by time, once a look; a look that finds nothing gives an empty list.

    Args:
        backend: where.
        wanted: which events.
        ends: where each part was left off; it moves on. Parts that are not in it are read from their beginning.
    """
    while True:
        found: list[Event] = []
        for part in await backend.history_parts():
            after = ends.get(part)
            while True:
                page, after = await backend.read_history(part, after, _PAGE)
                ends[part] = after
                if not page:
                    break
                found += filter(wanted.has, page)
        yield in_order(found)
