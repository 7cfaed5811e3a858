"""A queue: its numbers, its charts, its tasks, and one list of messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request

from qworker.backend.offers import QueueGlance, glance_at
from qworker.errors import UsageError
from qworker.failures.message_filter import CODES
from qworker.message import STATE_WORDS, QueueStats
from qworker.sampling import QueueSnapshot
from qworker.ui.pages.lists import FILTERS, ListQuery, read_list
from qworker.ui.pages.rows import if_old, message_row, numbers_of, status_of
from qworker.ui.pages.source import Source, known_queue
from qworker.ui.paths import path_of
from qworker.ui.problems import problems_of
from qworker.ui.text import DASH, duration, number, rate

__all__ = ["RANGES", "level_of", "queue"]

# Rows of the list.
_MOST_MESSAGES = 50
# The level of the samples, by how far a chart reaches.
RANGES = {"1h": 0, "24h": 1, "7d": 2}
# The fields of the URL that its links keep.
_FIELDS = frozenset({"state", "order", "range", *FILTERS})


async def queue(source: Source, request: Request) -> dict[str, Any]:
    """Return the numbers, charts and one list of messages of a queue.

    Raises:
        NoSuchPage: The queue does not exist.
        UsageError: The state, the range or the filter is not valid.
    """
    name, asked, access = request.path_params["queue"], request.query_params, request.state.access
    wanted, level = ListQuery.of(asked), level_of(asked)
    seen = await source.watch.see()
    one = known_queue(seen, name)
    now = source.clock.time()
    past = await source.watch.past(name, level)
    recent = past if level == 0 else await source.watch.past(name, 0)
    found = await read_list(source, one, wanted, access, _MOST_MESSAGES)
    problems = problems_of(one, recent, seen.unworked.get(name), now)
    numbers = numbers_of(one, now)
    return {
        "seen": seen,
        **numbers,
        **status_of(one, problems),
        "problems": problems,
        **source.drawings.charts(name, past, level, now),
        "span": asked.get("range") or "1h",
        "spans": list(RANGES),
        "is_paused": await _is_paused(source, one),
        "tasks": _tasks(one),
        "states": _tabs(numbers["stats"]),
        "wanted": wanted,
        "state": wanted.state.word,
        "total": None if numbers["stats"] is None else numbers["stats"].count(wanted.state),
        "fields": {field: asked.get(field, "") for field in FILTERS},
        "codes": CODES,
        "found": found,
        "messages": [message_row(stored, access, now) for stored in found.messages],
        "listed_at": if_old(found.at, now),
        "link": partial(_link, request),
        "export": path_of(request.scope, "api", "v1", "queues", name, "export", **_kept(request)),
        # A search is repeated only when its user asks for it.
        "is_live": not wanted.is_search,
    }


async def _is_paused(source: Source, one: QueueSnapshot) -> bool:
    """Return whether a queue is paused now. A count of a deep queue is older."""
    look = await source.watch.looks.look(("paused", one.queue), partial(_glance, source, one.queue))
    return look.value is not None and look.value.is_paused


async def _glance(source: Source, queue: str) -> QueueGlance:
    return await glance_at(await source.watch.backend(), queue)


def level_of(asked: QueryParams) -> int:
    """Return the level of the samples that a page asks for.

    Raises:
        UsageError: There is no such range.
    """
    level = RANGES.get(asked.get("range") or "1h")
    if level is None:
        raise UsageError(f"the range must be one of {', '.join(RANGES)}")
    return level


def _link(request: Request, **changes: str | None) -> str:
    """Return the path of this page with other fields. The list begins at its start again."""
    return path_of(request.scope, "q", request.path_params["queue"], **{**_kept(request), **changes})


def _kept(request: Request) -> dict[str, str]:
    return {field: value for field, value in request.query_params.items() if field in _FIELDS}


def _tasks(one: QueueSnapshot) -> list[dict[str, str]]:
    waiting = {} if one.counted is None else one.counted.count.tasks
    names = sorted({*one.tasks, *waiting})
    rows: list[dict[str, str]] = []
    for name in names:
        flow = one.tasks.get(name)
        rows.append(
            {
                "name": name,
                "waiting": number(waiting.get(name)) if waiting else DASH,
                "acked": rate(flow.acked) if flow else DASH,
                "retries": rate(flow.retried) if flow else DASH,
                "failures": rate(flow.failed) if flow else DASH,
                "run": duration(flow.run.p95) if flow and flow.run else DASH,
            }
        )
    return rows


def _tabs(stats: QueueStats | None) -> list[tuple[str, str, int | None]]:
    """Return the states, each with its heading and count."""
    words = {"ready": "Waiting", "leased": "Running", "delayed": "Delayed", "failed": "Failed", "done": "Done"}
    return [(state.word, words[state.word], None if stats is None else stats.count(state)) for state in STATE_WORDS]
