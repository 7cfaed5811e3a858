"""The overview: the queues of a store, those with problems first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from markupsafe import Markup
from starlette.requests import Request

from qworker.charts import sparkline
from qworker.errors import UsageError
from qworker.sampling import QueueSnapshot, RingSample
from qworker.ui.pages.rows import numbers_of, status_of
from qworker.ui.pages.source import Source
from qworker.ui.problems import problems_of
from qworker.ui.watch import Seen

__all__ = ["overview"]

# Rows of one page.
_MOST_QUEUES = 100
# Points of a sparkline: an hour, each point for a minute.
_SPARK_POINTS, _SPARK_STEP = 60, 60.0


async def overview(source: Source, request: Request) -> dict[str, Any]:
    """Return the problems and a page of the queues, those with problems first."""
    wanted, page = request.query_params.get("name", ""), _page_number(request.query_params.get("page", "0"))
    seen = await source.watch.see()
    now = source.clock.time()
    every = [] if seen.snapshot is None else seen.snapshot.queues
    found = [one for one in every if wanted.lower() in one.queue.lower()]
    # The past is read for the rows of one page. So the order is by what the last sample says alone.
    found.sort(key=partial(_trouble, seen, now))
    shown = found[page * _MOST_QUEUES : (page + 1) * _MOST_QUEUES]
    rows = [await _row(source, seen, one, now) for one in shown]
    return {
        "seen": seen,
        "wanted": wanted,
        "page": page,
        "pages": max(1, -(-len(found) // _MOST_QUEUES)),
        "total": len(every),
        "rows": rows,
        "problems": [problem for row in rows for problem in row["problems"]],
        "has_flow": not every or any(one.flow is not None for one in every),
    }


def _page_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise UsageError("page must be a number from 0")
    return int(text)


async def _row(source: Source, seen: Seen, one: QueueSnapshot, now: float) -> dict[str, Any]:
    past = await source.watch.past(one.queue, 0)
    problems = problems_of(one, past, seen.unworked.get(one.queue), now)
    return {**numbers_of(one, now), "problems": problems, "spark": _spark(past, now), **status_of(one, problems)}


def _trouble(seen: Seen, now: float, one: QueueSnapshot) -> tuple[bool, int, str]:
    """Return the place of a queue in the overview: first those with problems, then those with the most waiting."""
    problems = problems_of(one, (), seen.unworked.get(one.queue), now)
    return not problems, 0 if one.counted is None else -one.counted.count.stats.ready, one.queue


def _spark(past: Sequence[RingSample], now: float) -> Markup | None:
    """Draw the waiting messages of the last hour. A minute without a sample is a gap."""
    end = now // _SPARK_STEP + 1
    values: list[float | None] = [None] * _SPARK_POINTS
    for sample in past:
        place = int(sample.at // _SPARK_STEP - end + _SPARK_POINTS)
        if 0 <= place < _SPARK_POINTS:
            values[place] = max(values[place] or 0.0, float(sample.ready))
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return sparkline(f"waiting in the last hour: now {known[-1]:,.0f}, at most {max(known):,.0f}", values)
