"""Failed messages of all queues, by what failed, and one group of them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from qworker.failures.groups import FailureGroup, GroupCounts
from qworker.ui.looks import Look
from qworker.ui.pages.rows import failed_count, message_row, queue_names
from qworker.ui.pages.source import NoSuchPage, Source, known_queue
from qworker.ui.reads import MOST_FAILURES, FoundGroup, read_group, read_groups

__all__ = ["failures", "group"]

# Rows of one page.
_MOST_GROUPS = 100


async def failures(source: Source, _request: Request) -> dict[str, Any]:
    """Return the groups of failed messages of all queues, the largest first."""
    seen = await source.watch.see()
    queues = [name for name in queue_names(seen) if failed_count(seen.queue(name))]
    looks = await asyncio.gather(*(_groups(source, queue) for queue in queues))
    rows: dict[str, _GroupRow] = {}
    for queue, look in zip(queues, looks, strict=True):
        for counts in look.value or ():
            key = "" if counts.group is None else counts.group.key
            rows.setdefault(key, _GroupRow(counts.group)).add(queue, counts)
    return {
        "seen": seen,
        "rows": sorted(rows.values(), key=lambda row: -row.count)[:_MOST_GROUPS],
        "more": max(0, len(rows) - _MOST_GROUPS),
        "reading": [queue for queue, look in zip(queues, looks, strict=True) if look.at is None],
        "problems": {queue: look.problem for queue, look in zip(queues, looks, strict=True) if look.problem},
        "cut": [queue for queue in queues if failed_count(seen.queue(queue)) > MOST_FAILURES],
        "most": MOST_FAILURES,
        "now": source.clock.time(),
    }


async def _groups(source: Source, queue: str) -> Look[list[GroupCounts]]:
    async def read() -> list[GroupCounts]:
        return await read_groups(await source.watch.backend(), queue)

    return await source.watch.looks.look(("failures", queue), read)


async def group(source: Source, request: Request) -> dict[str, Any]:
    """Return the messages of one group in one queue.

    Raises:
        NoSuchPage: It has none.
    """
    queue, key = request.path_params["queue"], request.path_params["key"]
    seen = await source.watch.see()
    known_queue(seen, queue)

    async def read() -> FoundGroup:
        return await read_group(await source.watch.backend(), queue, key)

    look = await source.watch.looks.look(("group", queue, key), read)
    found = look.value
    if found is not None and found.group is None:
        raise NoSuchPage(f"{queue} has no failed message of this group any more")
    now = source.clock.time()
    rows = [] if found is None else [message_row(stored, request.state.access, now) for stored in found.newest]
    last = found.newest[0].error if found is not None and found.newest else None
    return {"seen": seen, "queue": queue, "look": look, "found": found, "messages": rows, "last": last}


class _GroupRow(msgspec.Struct):
    """One group in all queues."""

    group: FailureGroup | None
    count: int = 0
    first_at: float | None = None
    last_at: float | None = None
    # The number of messages in each queue.
    queues: dict[str, int] = {}

    def add(self, queue: str, counts: GroupCounts) -> None:
        """Add what one queue has."""
        self.count += counts.count
        self.queues[queue] = counts.count
        times = [at for at in (self.first_at, counts.first_at) if at is not None]
        self.first_at = min(times, default=None)
        self.last_at = max([at for at in (self.last_at, counts.last_at) if at is not None], default=None)
