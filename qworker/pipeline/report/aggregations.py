"""The numbers of a report. Each is one aggregation of points with a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from qworker.pipeline.report.event_points import normalize_error
from qworker.pipeline.report.model import (
    Depth,
    Failures,
    Percentiles,
    QueueTotals,
    TaskTimes,
    TimeStep,
    WorkerShare,
)

__all__ = [
    "choose_step",
    "counts_by_step",
    "depth_by_step",
    "failures",
    "open_counts",
    "queue_totals",
    "task_times",
    "time_range",
    "workers",
]

# Rows of a table, and lines of a plot: the largest ones. There are more only if programs create queues by the thousand.
_MOST_ROWS = 100
_MOST_LINES = 8
# The largest number of steps of time in a plot.
_MOST_STEPS = 120
_STEPS = (0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
OTHERS = "(others)"


def time_range(found: DataFrame) -> tuple[float, float] | None:
    """Return the times of the first and the last point, or None if there are no points."""
    row = found.agg(F.min("at"), F.max("at")).collect()[0]
    return None if row[0] is None else (float(row[0]), float(row[1]))


def choose_step(span_s: float) -> float:
    """Return the length of a step for a span: a round number of seconds, minutes, hours or days."""
    for step in _STEPS:
        if span_s <= step * _MOST_STEPS:
            return float(step)
    return 86_400.0 * -(-span_s // (86_400.0 * _MOST_STEPS))


def queue_totals(found: DataFrame, open_at_end: DataFrame, span_s: float) -> list[QueueTotals]:
    """Return counts by queue, the busiest first."""
    counted = found.groupBy("queue").agg(
        *(_count(kind).alias(kind) for kind in ("enqueued", "done", "failed")),
        F.count_if(F.col("kind").startswith("run-")).alias("runs"),
        *(_count(f"run-{kind}").alias(kind) for kind in ("retried", "released", "lost")),
    )
    joined = counted.join(open_at_end, "queue", "full").na.fill(0)
    rows = joined.orderBy(F.desc("enqueued"), F.desc("open"), "queue").limit(_MOST_ROWS).collect()
    return [QueueTotals(**row.asDict(), per_second=row["done"] / span_s if span_s > 0 else 0.0) for row in rows]


def open_counts(found: DataFrame) -> DataFrame:
    """Return how many messages of each queue are neither done nor failed, by all points up to the report's end.

    Returns:
        queue, open.
    """
    return found.groupBy("queue").agg(F.sum(_growth()).alias("open"))


def task_times(found: DataFrame) -> list[TaskTimes]:
    """Return waits and runs by task, the busiest first."""
    counted = found.groupBy("queue", "task").agg(
        *(_count(kind).alias(kind) for kind in ("done", "failed", "begun")),
        F.count("run_s").alias("runs"),
        *_percentiles("wait_s"),
        *_percentiles("run_s"),
    )
    rows = counted.orderBy(F.desc("begun"), F.desc("done"), "queue", "task").limit(_MOST_ROWS).collect()
    return [
        TaskTimes(
            queue=row["queue"],
            task=row["task"],
            done=row["done"],
            failed=row["failed"],
            begun=row["begun"],
            runs=row["runs"],
            wait=_percentiles_by_step(row, "wait_s"),
            run=_percentiles_by_step(row, "run_s"),
        )
        for row in rows
    ]


def failures(found: DataFrame) -> list[Failures]:
    """Return kinds of errors by task, the most frequent first."""
    wrong = found.where(F.col("kind").isin("failed", "run-retried"))
    counted = (
        wrong.withColumn("error", F.coalesce("error", F.lit("")))
        .groupBy("queue", "task", normalize_error(F.col("error")).alias("kind_of_error"))
        .agg(F.max("error").alias("example"), _count("failed").alias("failed"), _count("run-retried").alias("retried"))
    )
    order = (F.desc("failed"), F.desc("retried"), "queue", "task", "kind_of_error")
    return [
        Failures(
            queue=row["queue"],
            task=row["task"],
            error=row["kind_of_error"] or "no reason given",
            example=row["example"] or "no reason given",
            failed=row["failed"],
            retried=row["retried"],
        )
        for row in counted.orderBy(*order).limit(_MOST_ROWS).collect()
    ]


def workers(found: DataFrame) -> list[WorkerShare]:
    """Return the work of each worker, the busiest first."""
    counted = (
        found.where("worker is not null")
        .groupBy("worker")
        .agg(
            F.count("*").alias("runs"),
            F.count_if(F.col("kind").isin("run-retried", "run-failed")).alias("failed"),
            F.coalesce(F.sum("run_s"), F.lit(0.0)).alias("busy_s"),
        )
    )
    rows = counted.orderBy(F.desc("runs"), "worker").limit(_MOST_ROWS).collect()
    return [WorkerShare(worker=r["worker"], runs=r["runs"], failed=r["failed"], busy_s=r["busy_s"]) for r in rows]


def counts_by_step(found: DataFrame, since: float, step_s: float, steps: int) -> list[TimeStep]:
    """Return counts and times by step. Steps in which nothing happened are included with zeros."""
    counted = (
        found.groupBy(_step(since, step_s, steps).alias("step"))
        .agg(
            *(_count(kind).alias(kind) for kind in ("enqueued", "done", "failed")),
            _count("run-retried").alias("retried"),
            *_percentiles("wait_s"),
            *_percentiles("run_s"),
        )
        .collect()
    )
    by_step = {row["step"]: row for row in counted}
    made: list[TimeStep] = []
    for i in range(steps):
        row = by_step.get(i)
        counts = {name: row[name] if row else 0 for name in ("enqueued", "done", "failed", "retried")}
        wait, run = (_percentiles_by_step(row, name) if row else None for name in ("wait_s", "run_s"))
        made.append(TimeStep(at=since + i * step_s, **counts, wait=wait, run=run))
    return made


def depth_by_step(found: DataFrame, queues: Sequence[str], since: float, step_s: float, steps: int) -> list[Depth]:
    """Return the open messages at the end of each step, for each of the first `queues`, and for all others together.

    Args:
        found: All points up to the report's end. Messages that were enqueued before `since` are in the first step's
            count.
        queues: The names of the queues, the most important first.
        since: When the first step begins, in Unix seconds.
        step_s: The length of a step in seconds.
        steps: The number of steps.
    """
    shown = list(queues[: _MOST_LINES if len(queues) <= _MOST_LINES else _MOST_LINES - 1])
    line = F.when(F.col("queue").isin(*shown), F.col("queue")).otherwise(OTHERS) if shown else F.lit(OTHERS)
    change = found.groupBy(line.alias("line"), _step(since, step_s, steps).alias("step")).agg(
        F.sum(_growth()).alias("change")
    )
    so_far = Window.partitionBy("line").orderBy("step").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    rows = change.withColumn("depth", F.sum("change").over(so_far)).orderBy("line", "step").collect()
    known: dict[str, dict[int, int]] = {}
    for row in rows:
        known.setdefault(row["line"], {})[row["step"]] = row["depth"]
    names = [*shown, OTHERS] if OTHERS in known else shown
    return [Depth(queue=name, counts=_fill_forward(known.get(name, {}), steps)) for name in names]


def _fill_forward(known: dict[int, int], steps: int) -> list[int]:
    """Return a count for each step: that of the last step in which it changed."""
    counts: list[int] = []
    for i in range(steps):
        counts.append(known.get(i, counts[-1] if counts else 0))
    return counts


# -- columns ----------------------------------------------------------------------------------------------------------


def _count(kind: str) -> Column:
    return F.count_if(F.col("kind") == kind)


def _growth() -> Column:
    """Return by how much a point changes its queue's depth."""
    return F.when(F.col("kind") == "enqueued", 1).when(F.col("kind").isin("done", "failed"), -1).otherwise(0)


def _step(since: float, step_s: float, steps: int) -> Column:
    step = F.floor((F.col("at") - since) / step_s)
    return F.least(F.greatest(step, F.lit(0)), F.lit(steps - 1)).cast("int")


def _percentiles(column: str) -> list[Column]:
    return [
        F.percentile_approx(column, [0.5, 0.9, 0.99], 10_000).alias(f"{column}_spread"),
        F.max(column).alias(f"{column}_max"),
    ]


def _percentiles_by_step(row: Any, column: str) -> Percentiles | None:
    found = row[f"{column}_spread"]
    if not found:
        return None
    return Percentiles(p50=found[0], p90=found[1], p99=found[2], max=row[f"{column}_max"])
