"""Points: a history as rows that can be counted, each with its time.

Every number of a report is an aggregation of them.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from qworker.failure_text import BLANKED
from qworker.pipeline.timelines import RUN_ENDS, build_timelines

__all__ = ["clip", "event_points", "normalize_error"]

_COLUMNS = ("queue", "task", "kind", "at", "wait_s", "run_s", "worker", "error")


def event_points(trace: DataFrame) -> DataFrame:
    """Return one row for each event.

    Args:
        trace: The rows of `timelines.timeline_points`.

    Returns:
        queue, task, kind, at (Unix seconds), wait_s, run_s, worker, error. The kinds are `enqueued`, `begun` (with
        wait_s), `done` and `failed`, at most one of each for a message, and `run-acked`, `run-retried`, `run-failed`,
        `run-released` and `run-lost`, one for each run that finished.
    """
    life = build_timelines(trace)
    # A message that began or finished was enqueued at that time or earlier.
    known = life.withColumn(
        "first_at", F.least(F.coalesce("enqueued_at", "begun_at", "ended_at"), "begun_at", "ended_at")
    )
    each = [
        _points(known.where("first_at is not null"), "enqueued", "first_at"),
        _points(life.where("begun_at is not null"), "begun", "begun_at", wait=F.col("begun_at") - F.col("enqueued_at")),
        _points(life.where("outcome = 'done'"), "done", "ended_at"),
        _points(life.where("outcome = 'failed'"), "failed", "ended_at", error=F.col("error")),
    ]
    # Stored messages contain no runs, and have no worker.
    runs = trace.where(F.col("kind").isin(*RUN_ENDS) & F.col("worker").isNotNull()).select(
        "queue",
        "task",
        F.concat(F.lit("run-"), "kind").alias("kind"),
        "at",
        F.lit(None).cast("double").alias("wait_s"),
        F.col("duration_s").alias("run_s"),
        "worker",
        "error",
    )
    for one in each:
        runs = runs.unionByName(one)
    return runs


def _points(
    life: DataFrame, kind: str, at: str, *, wait: Column | None = None, error: Column | None = None
) -> DataFrame:
    nothing = F.lit(None)
    # The clocks of two machines differ, and a wait is never negative.
    waited = nothing.cast("double") if wait is None else F.greatest(wait, F.lit(0.0))
    return life.select(
        "queue",
        "task",
        F.lit(kind).alias("kind"),
        F.col(at).alias("at"),
        waited.alias("wait_s"),
        nothing.cast("double").alias("run_s"),
        nothing.cast("string").alias("worker"),
        (nothing.cast("string") if error is None else error).alias("error"),
    ).select(*_COLUMNS)


def clip(found: DataFrame, since: float | None, until: float | None) -> DataFrame:
    """Return the points from `since` on and before `until`, in Unix seconds. None: no limit."""
    if since is not None:
        found = found.where(F.col("at") >= since)
    return found if until is None else found.where(F.col("at") < until)


def normalize_error(error: Column) -> Column:
    """Return an error without what differs between messages: quoted text, ids and numbers. See `blank_values`."""
    for pattern, replacement in BLANKED:
        error = F.regexp_replace(error, pattern.pattern, replacement)
    return error
