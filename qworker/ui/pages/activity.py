"""What happened: a search in the history, the newest events first."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request

from qworker.duration import parse_moment
from qworker.errors import UsageError
from qworker.history.event import KINDS
from qworker.history.query import EventFilter
from qworker.history.search import FoundEvents, search_back
from qworker.ui.access import Access
from qworker.ui.audit import ActionRecord, read_newest
from qworker.ui.looks import Look
from qworker.ui.pages.rows import EVENT_COLOURS, queue_names
from qworker.ui.pages.source import Source
from qworker.ui.paths import path_of
from qworker.ui.watch import Seen

__all__ = ["EVENT_FILTERS", "activity", "find_actions", "find_events"]

# The fields of a URL that choose events.
EVENT_FILTERS = ("queue", "id", "task", "event", "worker", "error", "since", "until")
_MOST_EVENTS, _MOST_ACTIONS = 100, 50
# Seconds after which a search ends.
_SECONDS = 2.0


async def activity(source: Source, request: Request) -> dict[str, Any]:
    """Return a page of events.

    Raises:
        UsageError: The filter or the cursor is not valid.
        Busy: Another search of the same user runs.
        BackendError: The history cannot be read.
    """
    asked = request.query_params
    seen = await source.watch.see()
    backend = await source.watch.backend()
    found = await find_events(source, asked, request.state.access, _MOST_EVENTS)
    return {
        "seen": seen,
        "found": found,
        "fields": {field: asked.get(field, "") for field in EVENT_FILTERS},
        "is_filtered": any(asked.get(field) for field in EVENT_FILTERS),
        "is_continued": bool(asked.get("cursor")),
        "kinds": KINDS,
        "colours": EVENT_COLOURS,
        "queues": queue_names(seen),
        "is_kept": backend.history.enabled,
        "link": partial(_link, request),
        "actions": await find_actions(source, seen, asked),
    }


async def find_actions(source: Source, seen: Seen, asked: QueryParams) -> Look[list[ActionRecord]]:
    """Return what people did with the dashboard lately, in one queue or in all, the newest first."""
    wanted = asked.get("queue")
    queues = [name for name in queue_names(seen) if not wanted or name == wanted]

    async def read() -> list[ActionRecord]:
        return await read_newest(await source.watch.backend(), queues, _MOST_ACTIONS)

    return await source.watch.looks.look(("actions", wanted), read)


async def find_events(source: Source, asked: QueryParams, access: Access, limit: int) -> FoundEvents:
    """Return the newest events for the fields of a URL.

    Raises:
        UsageError: The filter or the cursor is not valid.
        Busy: Another search of the same user runs.
        BackendError: The history cannot be read.
    """
    wanted, cursor = _filter_of(asked), asked.get("cursor") or None
    async with source.scans.next(access.name):
        backend = await source.watch.backend()
        return await search_back(
            backend.history, wanted, limit=limit, cursor=cursor, seconds=_SECONDS, clock=source.clock
        )


def _filter_of(asked: QueryParams) -> EventFilter:
    kind = asked.get("event")
    if kind and kind not in KINDS:
        raise UsageError(f"event must be one of {', '.join(KINDS)} (got {kind!r})")
    given = {name: asked.get(name) or None for name in ("queue", "id", "task", "worker", "error")}
    since, until = asked.get("since"), asked.get("until")
    return EventFilter(
        **given,
        # A long task has thousands of these.
        kinds=frozenset({kind} if kind else {*KINDS} - {"extended"}),
        since=parse_moment(since) if since else None,
        until=parse_moment(until) if until else None,
    )


def _link(request: Request, **changes: str) -> str:
    kept = {field: value for field, value in request.query_params.items() if field in EVENT_FILTERS}
    return path_of(request.scope, "activity", **{**kept, **changes})
