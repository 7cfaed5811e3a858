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
from qworker.ui.watch import Seen

__all__ = ["FoundFailures", "GroupRow", "failures", "find_failures", "find_group", "group"]

# Rows of one page.
_MOST_GROUPS = 100


class GroupRow(msgspec.Struct):
    """One group in all queues.

    Attributes:
        group: The group. None: all further messages.
        count: The number of its messages.
        first_at: Unix seconds at which the first one failed.
        last_at: Unix seconds at which the last one failed.
        queues: The number of its messages in each queue.
    """

    group: FailureGroup | None
    count: int = 0
    first_at: float | None = None
    last_at: float | None = None
    queues: dict[str, int] = {}

    def add(self, queue: str, counts: GroupCounts) -> None:
        """Add what one queue has."""
        self.count += counts.count
        self.queues[queue] = counts.count
        times = [at for at in (self.first_at, counts.first_at) if at is not None]
        self.first_at = min(times, default=None)
        self.last_at = max([at for at in (self.last_at, counts.last_at) if at is not None], default=None)


class FoundFailures(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of failed messages of all queues, the largest first.

    Attributes:
        sampled_at: Unix seconds: no queue was read before. None: none was read yet.
        groups: The groups.
        more: The number of smaller groups that are left out.
        reading: The queues that are being read.
        problems: Why a queue cannot be read.
        newest_only: The queues of which only the newest failed messages are counted.
    """

    sampled_at: float | None = None
    groups: list[GroupRow]
    more: int = 0
    reading: list[str] = []
    problems: dict[str, str] = {}
    newest_only: list[str] = []


async def failures(source: Source, _request: Request) -> dict[str, Any]:
    """Return the groups of failed messages of all queues."""
    seen = await source.watch.see()
    return {"seen": seen, "found": await find_failures(source, seen), "most": MOST_FAILURES, "now": source.clock.time()}


async def find_failures(source: Source, seen: Seen) -> FoundFailures:
    """Return the groups of failed messages of all queues."""
    queues = [name for name in queue_names(seen) if failed_count(seen.queue(name))]
    looks = dict(zip(queues, await asyncio.gather(*(_groups(source, queue) for queue in queues)), strict=True))
    rows: dict[str, GroupRow] = {}
    for queue, look in looks.items():
        for counts in look.value or ():
            key = "" if counts.group is None else counts.group.key
            rows.setdefault(key, GroupRow(counts.group)).add(queue, counts)
    return FoundFailures(
        sampled_at=min((look.at for look in looks.values() if look.at is not None), default=None),
        groups=sorted(rows.values(), key=lambda row: -row.count)[:_MOST_GROUPS],
        more=max(0, len(rows) - _MOST_GROUPS),
        reading=[queue for queue, look in looks.items() if look.at is None],
        problems={queue: look.problem for queue, look in looks.items() if look.problem},
        newest_only=[queue for queue in queues if failed_count(seen.queue(queue)) > MOST_FAILURES],
    )


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
    look = await find_group(source, seen, queue, key)
    found = look.value
    now = source.clock.time()
    rows = [] if found is None else [message_row(stored, request.state.access, now) for stored in found.newest]
    last = found.newest[0].error if found is not None and found.newest else None
    return {"seen": seen, "queue": queue, "look": look, "found": found, "messages": rows, "last": last}


async def find_group(source: Source, seen: Seen, queue: str, key: str) -> Look[FoundGroup]:
    """Return the newest messages of one group in one queue.

    Raises:
        NoSuchPage: It has none.
    """
    known_queue(seen, queue)

    async def read() -> FoundGroup:
        return await read_group(await source.watch.backend(), queue, key)

    look = await source.watch.looks.look(("group", queue, key), read)
    if look.value is not None and look.value.group is None:
        raise NoSuchPage(f"{queue} has no failed message of this group any more")
    return look
