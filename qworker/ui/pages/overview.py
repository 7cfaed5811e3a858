"""The overview: the queues of a store, those with problems first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from qworker.errors import UsageError
from qworker.message import QueueStats
from qworker.sampling import QueueSnapshot
from qworker.ui.pages.rows import NO_HISTORY, numbers_of, status_of
from qworker.ui.pages.source import Source
from qworker.ui.problems import problems_of
from qworker.ui.text import DASH, number, rate
from qworker.ui.watch import Seen

__all__ = ["overview"]

# Rows of one page.
_MOST_QUEUES = 100


class _Cell(msgspec.Struct, frozen=True):
    """A number in the table of queues.

    Attributes:
        text: The number.
        is_failed: Whether there are failed messages, to which it leads.
    """

    text: str
    is_failed: bool = False

    @property
    def is_nil(self) -> bool:
        """Whether it says nothing, and is shown faint."""
        return self.text in {"0", DASH}


async def overview(source: Source, request: Request) -> dict[str, Any]:
    """Return the problems and a page of the queues, those with problems first."""
    wanted, page = request.query_params.get("name", ""), _page_number(request.query_params.get("page", "0"))
    seen = await source.watch.see()
    now = source.clock.time()
    found = [one for one in seen.queues if wanted.lower() in one.queue.lower()]
    # The past is read for the rows of one page. So the order is by what the last sample says alone.
    found.sort(key=partial(_trouble, seen, now))
    shown = found[page * _MOST_QUEUES : (page + 1) * _MOST_QUEUES]
    rows = [await _row(source, seen, one, now) for one in shown]
    # A stable sort: the past of these rows is known now.
    rows.sort(key=lambda row: not row["problems"])
    return {
        "seen": seen,
        "wanted": wanted,
        "page": page,
        "pages": max(1, -(-len(found) // _MOST_QUEUES)),
        "total": len(seen.queues),
        "totals": _totals(seen.queues),
        "rows": rows,
        "no_history": None if seen.has_history else NO_HISTORY,
        "problems": [problem for row in rows for problem in row["problems"]],
    }


def _page_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise UsageError("page must be a number from 0")
    return int(text)


def _totals(every: Sequence[QueueSnapshot]) -> list[tuple[str, str]]:
    """Return the numbers of the whole store."""
    stats = [one.counted.count.stats for one in every if one.counted is not None]
    flows = [one.flow for one in every if one.flow is not None]
    done = [(rate(sum(flow.acked for flow in flows)), "done/s")] if flows else []
    words = {"ready": "waiting", "leased": "running", "delayed": "delayed", "failed": "failed"}
    # A sum without a queue that is being counted would be wrong.
    is_known = all(one.counted is not None or one.problem is not None for one in every)
    counts = [
        (number(sum(getattr(one, name) for one in stats) if is_known else None), word) for name, word in words.items()
    ]
    return [(number(len(every)), "queues" if len(every) != 1 else "queue"), *counts, *done]


async def _row(source: Source, seen: Seen, one: QueueSnapshot, now: float) -> dict[str, Any]:
    past = await source.watch.past(one.queue, 0)
    problems = problems_of(one, past, seen.unworked.get(one.queue), now)
    numbers = numbers_of(one, now)
    spark = source.drawings.spark(one.queue, past, now)
    return {**numbers, "cells": _cells(numbers), "problems": problems, "spark": spark, **status_of(one, problems)}


def _cells(numbers: dict[str, Any]) -> list[_Cell]:
    """Return the numbers of a row after its sparkline."""
    stats: QueueStats | None = numbers["stats"]
    leased, delayed, failed = (None, None, None) if stats is None else (stats.leased, stats.delayed, stats.failed)
    return [
        _Cell(number(leased)),
        _Cell(number(delayed)),
        _Cell(number(failed), is_failed=bool(failed)),
        _Cell(numbers["growth"] or DASH),
        *(_Cell(numbers[name]) for name in ("acked", "failures", "wait", "oldest", "workers")),
    ]


def _trouble(seen: Seen, now: float, one: QueueSnapshot) -> tuple[bool, int, str]:
    """Return the place of a queue in the overview: first those with problems, then those with the most waiting."""
    problems = problems_of(one, (), seen.unworked.get(one.queue), now)
    return not problems, 0 if one.counted is None else -one.counted.count.stats.ready, one.queue
