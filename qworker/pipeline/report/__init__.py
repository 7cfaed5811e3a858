"""`report`: a queue's history in numbers, computed by Spark, as tables, as JSON and as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from qworker.errors import UsageError
from qworker.extras import not_installed
from qworker.pipeline.inputs import is_queue_url, read_snapshot
from qworker.pipeline.report import aggregations
from qworker.pipeline.report.event_points import clip, event_points
from qworker.pipeline.report.model import Report
from qworker.pipeline.timelines import MESSAGE_COLUMNS, timeline_points
from qworker.url import mask

__all__ = ["Report", "page", "report"]


def report(
    spark: SparkSession,
    source: str,
    *,
    queues: Sequence[str] = (),
    since: float | None = None,
    until: float | None = None,
) -> Report:
    """Count and measure the events of a period.

    Args:
        spark: The session.
        source: The path of an archive, or the URL of a store, which is read as it is now.
        queues: The queues. Empty: all.
        since: When the report begins, in Unix seconds. None: at the first known event.
        until: When it ends, in Unix seconds. None: after the last known event.

    Raises:
        UsageError: The period is empty.
    """
    if since is not None and until is not None and since >= until:
        raise UsageError("--since must be before --until")
    now = time.time()
    known = (
        read_snapshot(spark, url=source, queues=queues, columns=MESSAGE_COLUMNS)
        if is_queue_url(source)
        else read_snapshot(spark, archive=source, queues=queues, columns=MESSAGE_COLUMNS)
    )
    trace = timeline_points(known.events, known.messages, now)
    everything = event_points(trace if until is None else _before(trace, until)).persist()
    try:
        return _measured(everything, mask(source), now, since, until)
    finally:
        everything.unpersist()


def page(report: Report) -> str:
    """Return a report as one HTML page.

    Raises:
        MissingExtra: Jinja is not installed. Images of Spark do not have it, and only this function needs it.
    """
    try:
        from qworker.pipeline.report.html import render
    except ModuleNotFoundError as error:
        raise not_installed(error, "the page of a report") from error
    return render(report)


def _before(trace: DataFrame, until: float) -> DataFrame:
    """Return what was known at a moment. For a message that moved later, only its enqueueing is known."""
    later = F.col("at") >= until
    kind, at = (
        F.when(later, "enqueued").otherwise(F.col("kind")),
        F.when(later, F.col("enqueued_at")).otherwise(F.col("at")),
    )
    return trace.withColumns({"kind": kind, "at": at}).where(F.col("at") < until)


def _measured(everything: DataFrame, source: str, now: float, since: float | None, until: float | None) -> Report:
    extent = aggregations.time_range(everything)
    if extent is None:
        return _nothing(source, now, since, until)
    begin = extent[0] if since is None else since
    end = max(extent[1], begin) if until is None else until
    step_s = aggregations.choose_step(end - begin)
    first = begin // step_s * step_s
    steps = max(1, int((end - first) // step_s) + (1 if until is None else int((end - first) % step_s > 0)))
    found = clip(everything, since, None)
    queues = aggregations.queue_totals(found, aggregations.open_counts(everything), end - begin)
    return Report(
        source=source,
        made_at=now,
        since=begin,
        until=end,
        step_s=step_s,
        queues=queues,
        tasks=aggregations.task_times(found),
        failures=aggregations.failures(found),
        workers=aggregations.workers(found),
        moments=aggregations.counts_by_step(found, first, step_s, steps),
        depths=aggregations.depth_by_step(everything, [queue.queue for queue in queues], first, step_s, steps),
    )


def _nothing(source: str, now: float, since: float | None, until: float | None) -> Report:
    """Return the report of an empty history."""
    end = now if until is None else until
    begin = end if since is None else since
    return Report(
        source=source,
        made_at=now,
        since=begin,
        until=max(begin, end),
        step_s=aggregations.choose_step(max(0.0, end - begin)),
        queues=[],
        tasks=[],
        failures=[],
        workers=[],
        moments=[],
        depths=[],
    )
