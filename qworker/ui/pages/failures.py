"""Failed messages of all queues, by what failed, and one group of them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from qworker.failures.groups import FailureGroup
from qworker.failures.index import MOST_INDEXED, IndexedGroup
from qworker.ui.pages.rows import FRESH_S, failed_count, message_row, queue_names
from qworker.ui.pages.source import NoSuchPage, Source, known_queue

__all__ = ["failures", "group"]

# Rows of one page: groups, and errors of the last hour.
_MOST_GROUPS, _MOST_ERRORS = 100, 20


async def failures(source: Source, _request: Request) -> dict[str, Any]:
    """Return the groups of failed messages of all queues, the largest first."""
    seen = await source.watch.see()
    queues = [name for name in queue_names(seen) if failed_count(seen.queue(name))]
    looks = await asyncio.gather(*map(source.watch.failures, queues))
    errors_s, errors = source.watch.errors()
    now = source.clock.time()
    rows: dict[str, _GroupRow] = {}
    for queue, look in zip(queues, looks, strict=True):
        for counts in look.value or ():
            key = "" if counts.group is None else counts.group.key
            rows.setdefault(key, _GroupRow(counts.group)).add(queue, counts, now)
    return {
        "seen": seen,
        "rows": sorted(rows.values(), key=lambda row: -row.count)[:_MOST_GROUPS],
        "more": max(0, len(rows) - _MOST_GROUPS),
        "reading": [queue for queue, look in zip(queues, looks, strict=True) if look.at is None],
        "problems": {queue: look.problem for queue, look in zip(queues, looks, strict=True) if look.problem},
        "cut": [queue for queue in queues if failed_count(seen.queue(queue)) > MOST_INDEXED],
        "most": MOST_INDEXED,
        "age": max([now - look.at for look in looks if look.at is not None and now - look.at > FRESH_S], default=None),
        "errors": errors[:_MOST_ERRORS],
        "errors_s": errors_s,
        "now": now,
    }


async def group(source: Source, request: Request) -> dict[str, Any]:
    """Return the messages of one group in one queue.

    Raises:
        NoSuchPage: It has none.
    """
    queue, key = request.path_params["queue"], request.path_params["key"]
    seen = await source.watch.see()
    known_queue(seen, queue)
    look = await source.watch.failures(queue)
    found = next((one for one in look.value or () if one.group is not None and one.group.key == key), None)
    if look.value is not None and found is None:
        raise NoSuchPage(f"{queue} has no failed message of this group any more")
    newest = (await source.watch.newest_of(queue, key)).value or []
    rows = [message_row(stored, request.state.access, source.clock.time()) for stored in newest]
    last = newest[0].error if newest else None
    return {"seen": seen, "queue": queue, "look": look, "found": found, "messages": rows, "last": last}


class _GroupRow(msgspec.Struct):
    """One group in all queues."""

    group: FailureGroup | None
    count: int = 0
    first_at: float | None = None
    last_at: float | None = None
    last_hour: int = 0
    last_day: int = 0
    # The number of messages in each queue.
    queues: dict[str, int] = {}

    def add(self, queue: str, counts: IndexedGroup, now: float) -> None:
        """Add what one queue has."""
        self.count += counts.count
        self.last_hour += counts.count_since(now - 3600)
        self.last_day += counts.count_since(now - 86_400)
        self.queues[queue] = counts.count
        times = [at for at in (self.first_at, counts.first_at) if at is not None]
        self.first_at = min(times, default=None)
        self.last_at = max([at for at in (self.last_at, counts.last_at) if at is not None], default=None)
