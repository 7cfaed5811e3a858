"""Failed messages of all queues, by what failed, and one group of them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from qworker.failures.groups import FailureGroup
from qworker.failures.index import MOST_INDEXED, IndexedGroup
from qworker.message import StoredMessage
from qworker.sampling.errors import ErrorCount
from qworker.ui.looks import Look
from qworker.ui.pages.rows import failed_count, if_old, message_row, queue_names
from qworker.ui.pages.source import NoSuchPage, Source, known_queue
from qworker.ui.watch import Seen

__all__ = ["FoundFailures", "FoundGroup", "GroupRow", "failures", "find_failures", "find_group", "group"]

# Rows of one page: groups, and errors of the last hour.
_MOST_GROUPS, _MOST_ERRORS = 100, 20


class GroupRow(msgspec.Struct):
    """One group in all queues.

    Attributes:
        group: The group. None: all further messages.
        count: The number of its messages.
        first_at: Unix seconds at which the first one failed.
        last_at: Unix seconds at which the last one failed.
        last_hour: The number of those that failed in the last hour.
        last_day: The number of those that failed in the last day.
        queues: The number of its messages in each queue.
    """

    group: FailureGroup | None
    count: int = 0
    first_at: float | None = None
    last_at: float | None = None
    last_hour: int = 0
    last_day: int = 0
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


class FoundFailures(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of failed messages of all queues, the largest first, and the errors of the last time.

    Attributes:
        sampled_at: Unix seconds: no queue was read before. None: none was read yet.
        groups: The groups.
        more: The number of smaller groups that are left out.
        reading: The queues that are being read.
        problems: Why a queue cannot be read.
        newest_only: The queues of which only the newest failed messages are counted.
        errors: The errors that workers have recorded lately, the most frequent first.
        errors_s: Seconds for which errors were counted, at most an hour.
    """

    sampled_at: float | None = None
    groups: list[GroupRow]
    more: int = 0
    reading: list[str] = []
    problems: dict[str, str] = {}
    newest_only: list[str] = []
    errors: list[ErrorCount] = []
    errors_s: float = 0.0


class FoundGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group in one queue.

    Attributes:
        look: When the groups were read, and why they cannot be read.
        group: The group. None: it is being read, or cannot be.
        newest: The newest messages of it.
    """

    look: Look[list[IndexedGroup]]
    group: IndexedGroup | None
    newest: list[StoredMessage]


async def failures(source: Source, _request: Request) -> dict[str, Any]:
    """Return the groups of failed messages of all queues."""
    seen, now = await source.watch.see(), source.clock.time()
    found = await find_failures(source, seen)
    return {"seen": seen, "found": found, "most": MOST_INDEXED, "read_at": if_old(found.sampled_at, now)}


async def find_failures(source: Source, seen: Seen) -> FoundFailures:
    """Return the groups of failed messages of all queues."""
    queues = [name for name in queue_names(seen) if failed_count(seen.queue(name))]
    looks = dict(zip(queues, await asyncio.gather(*map(source.watch.failures, queues)), strict=True))
    errors_s, errors = source.watch.errors()
    rows: dict[str, GroupRow] = {}
    for queue, look in looks.items():
        for counts in look.value or ():
            key = "" if counts.group is None else counts.group.key
            rows.setdefault(key, GroupRow(counts.group)).add(queue, counts, source.clock.time())
    return FoundFailures(
        sampled_at=min((look.at for look in looks.values() if look.at is not None), default=None),
        groups=sorted(rows.values(), key=lambda row: -row.count)[:_MOST_GROUPS],
        more=max(0, len(rows) - _MOST_GROUPS),
        reading=[queue for queue, look in looks.items() if look.at is None],
        problems={queue: look.problem for queue, look in looks.items() if look.problem},
        newest_only=[queue for queue in queues if failed_count(seen.queue(queue)) > MOST_INDEXED],
        errors=errors[:_MOST_ERRORS],
        errors_s=errors_s,
    )


async def group(source: Source, request: Request) -> dict[str, Any]:
    """Return the messages of one group in one queue.

    Raises:
        NoSuchPage: It has none.
    """
    queue, key = request.path_params["queue"], request.path_params["key"]
    seen = await source.watch.see()
    found = await find_group(source, seen, queue, key)
    rows = [message_row(stored, request.state.access, source.clock.time()) for stored in found.newest]
    last = found.newest[0].error if found.newest else None
    return {"seen": seen, "queue": queue, "look": found.look, "found": found.group, "messages": rows, "last": last}


async def find_group(source: Source, seen: Seen, queue: str, key: str) -> FoundGroup:
    """Return the newest messages of one group in one queue.

    Raises:
        NoSuchPage: It has none.
    """
    known_queue(seen, queue)
    look = await source.watch.failures(queue)
    found = next((one for one in look.value or () if one.group is not None and one.group.key == key), None)
    if look.value is not None and found is None:
        raise NoSuchPage(f"{queue} has no failed message of this group any more")
    newest = (await source.watch.newest_of(queue, key)).value or []
    return FoundGroup(look=look, group=found, newest=newest)
