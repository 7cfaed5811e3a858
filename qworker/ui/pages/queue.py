"""A queue: its numbers, its charts, its tasks, and one list of messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request

from qworker.backend.listing import list_messages
from qworker.backend.offers import QueueGlance, glance_at
from qworker.errors import UsageError
from qworker.message import STATE_WORDS, Query, QueueStats, State, StoredMessage
from qworker.sampling import QueueSnapshot
from qworker.ui.access import Access
from qworker.ui.looks import Look
from qworker.ui.pages.charts import charts_of
from qworker.ui.pages.rows import FRESH_S, message_row, numbers_of, status_of
from qworker.ui.pages.source import Source, known_queue
from qworker.ui.problems import problems_of
from qworker.ui.text import DASH, duration, number, rate

__all__ = ["queue"]

# Rows of the list.
_MOST_MESSAGES = 50
# Ready messages above which a list of them shows only the ids that the sampler has seen.
_LISTED = 50_000
# The time from one point of a chart to the next, and how far it reaches, by the names in the URL.
_RANGES = {"1h": 0, "24h": 1, "7d": 2}


async def queue(source: Source, request: Request) -> dict[str, Any]:
    """Return the numbers, charts and one list of messages of a queue.

    Raises:
        NoSuchPage: The queue does not exist.
        UsageError: The state or the range is not known.
    """
    name, asked = request.path_params["queue"], request.query_params
    state, span = asked.get("state", "ready"), asked.get("range", "1h")
    newest, after = asked.get("order") == "newest", asked.get("after") or None
    chosen, level = State.of_word(state), _RANGES.get(span)
    if level is None:
        raise UsageError(f"the range must be one of {', '.join(_RANGES)}")
    seen = await source.watch.see()
    one = known_queue(seen, name)
    now = source.clock.time()
    past = await source.watch.past(name, level)
    recent = past if level == 0 else await source.watch.past(name, 0)
    listed = await _list(source, one, chosen, newest, after)
    problems = problems_of(one, recent, seen.unworked.get(name), now)
    numbers = numbers_of(one, now)
    return {
        "seen": seen,
        **numbers,
        **status_of(one, problems),
        "problems": problems,
        "charts": charts_of(past, level, now),
        "span": span,
        "spans": list(_RANGES),
        "is_paused": await _is_paused(source, one),
        "tasks": _tasks(one),
        "state": state,
        "states": _tabs(numbers["stats"]),
        "newest": newest,
        "after": after,
        **_listing(listed, request.state.access, now),
        "ids": [] if listed is not None else _ids(one, newest),
    }


async def _is_paused(source: Source, one: QueueSnapshot) -> bool:
    """Return whether a queue is paused now. A count of a deep queue is older."""
    look = await source.watch.looks.look(("paused", one.queue), partial(_glance, source, one.queue))
    return look.value is not None and look.value.is_paused


async def _glance(source: Source, queue: str) -> QueueGlance:
    return await glance_at(await source.watch.backend(), queue)


async def _list(
    source: Source, one: QueueSnapshot, state: State, newest: bool, after: str | None
) -> Look[list[StoredMessage]] | None:
    """Return a list of messages. None: the queue is so deep that the list would cost too much."""
    unchanged = None
    if one.counted is not None:
        count = one.counted.count
        # While nothing changes, the sampler keeps its count, and the list stands too.
        unchanged = count if source.clock.time() - one.counted.at <= FRESH_S else None
        if state is State.READY and count.stats.ready > _LISTED and count.first:
            return None
    query = Query(state, after=after, limit=_MOST_MESSAGES + 1, newest=newest)

    async def read() -> list[StoredMessage]:
        return await list_messages(await source.watch.backend(), one.queue, query)

    return await source.watch.looks.look(("list", one.queue, query), read, basis=unchanged)


def _tasks(one: QueueSnapshot) -> list[dict[str, str]]:
    waiting = {} if one.counted is None else one.counted.count.tasks
    names = sorted({*one.tasks, *waiting})
    rows: list[dict[str, str]] = []
    for name in names:
        flow = one.tasks.get(name)
        rows.append(
            {
                "task": name or "(no task)",
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
    return [(word, words[word], None if stats is None else getattr(stats, word)) for word in STATE_WORDS.values()]


def _listing(look: Look[list[StoredMessage]] | None, access: Access, now: float) -> dict[str, Any]:
    if look is None:
        return {"look": None, "messages": [], "following": None, "list_age": None}
    found = look.value or []
    shown = found[:_MOST_MESSAGES]
    rows = [message_row(stored, access, now) for stored in shown]
    following = shown[-1].position if len(found) > _MOST_MESSAGES else None
    age = None if look.at is None or now - look.at <= FRESH_S else now - look.at
    return {"look": look, "messages": rows, "following": following, "list_age": age}


def _ids(one: QueueSnapshot, newest: bool) -> list[str]:
    if one.counted is None:
        return []
    return one.counted.count.last if newest else one.counted.count.first
