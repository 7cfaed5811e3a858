"""Make timelines from events and stored messages: one row for each message, from its enqueueing to its end.

Either side may be missing. A protocol whose directory belongs to other programs keeps no history, and a message that is
not kept when it is done leaves only events. If both sides contain the same fact, it counts once: each row has the
earliest, the latest or the number, so that a history that was archived twice changes nothing.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from qworker.failure_text import CHAINED, CODE, MODULE

__all__ = ["ENDS", "MESSAGE_COLUMNS", "RUN_ENDS", "build_timelines", "seconds", "timeline_points"]

# The events that end a message, and those that end a run of its handler.
ENDS = ("acked", "failed")
RUN_ENDS = ("acked", "retried", "failed", "released", "lost", "cancelled")
# The columns of a stored message that a timeline needs.
MESSAGE_COLUMNS = ("queue", "id", "task", "state", "enqueued_at", "finished_at", "error")
_PENDING = ("ready", "leased", "delayed")
_COLUMNS = ("queue", "id", "task", "kind", "at", "enqueued_at", "duration_s", "worker", "error")


def seconds(column: str) -> Column:
    """Convert a timestamp to Unix seconds."""
    return F.col(column).cast("double")


def timeline_points(events: DataFrame, messages: DataFrame, now: float) -> DataFrame:
    """Return all known transitions of messages, one in each row.

    Args:
        events: Rows of the schema EVENTS.
        messages: Rows with at least `MESSAGE_COLUMNS`, of a queue, of an archive, or of both.
        now: When the messages of the queue were read, in Unix seconds.

    Returns:
        queue, id, task, kind (that of an event, or `pending`), at (Unix seconds), enqueued_at, duration_s, worker,
        error.
    """
    told = events.select(
        "queue",
        "id",
        "task",
        F.col("event").alias("kind"),
        seconds("at").alias("at"),
        seconds("enqueued_at").alias("enqueued_at"),
        F.col("duration_s").cast("double").alias("duration_s"),
        "worker",
        "error",
    )
    kind = (
        F.when(F.col("state") == "done", "acked")
        .when(F.col("state") == "fail", "failed")
        .when(F.col("state").isin(*_PENDING), "pending")
    )
    stored = messages.select(
        "queue",
        "id",
        "task",
        kind.alias("kind"),
        F.when(kind == "pending", F.lit(now)).otherwise(seconds("finished_at")).alias("at"),
        seconds("enqueued_at").alias("enqueued_at"),
        F.lit(None).cast("double").alias("duration_s"),
        F.lit(None).cast("string").alias("worker"),
        first_line("error").alias("error"),
    )
    return told.select(*_COLUMNS).unionByName(stored.select(*_COLUMNS))


def first_line(column: str) -> Column:
    """Return an error in one line, as events have it (see `failure.summary`)."""
    text = F.regexp_replace(F.col(column), f"^{CODE.pattern}", "")
    plain = F.regexp_extract(text, r"^\s*([^\r\n]*)", 1)
    raised_last = F.element_at(F.split(text, CHAINED.pattern), -1)
    # The error of a group has a margin before it, as its frames have.
    lines = F.transform(F.split(raised_last, "\n"), lambda line: F.regexp_replace(line, r"^  \| (?=\S)", ""))
    said = F.filter(lines, lambda line: line.rlike(r"^\S") & ~line.startswith("Traceback (most recent call last):"))
    error = F.regexp_replace(F.get(said, 0), f"^{MODULE.pattern}", "")
    is_traceback = text.rlike(r"^\n*(?:  \+ Exception Group )?Traceback \(most recent call last\):")
    return F.substring(F.when(is_traceback, F.coalesce(error, plain)).otherwise(plain), 1, 300)


def build_timelines(trace: DataFrame) -> DataFrame:
    """Return one row for each message.

    A requeued message is open again: it is open if anything happened to it after its last end.

    Args:
        trace: The rows of `timeline_points`.

    Returns:
        queue, id, task, enqueued_at, begun_at (of the first run), seen_at (of the latest known event), ended_at,
        outcome (`done`, `failed` or `open`), error (of the failure), present (whether it was pending when the queue was
        read). Times are in Unix seconds, and null if they are not known.
    """

    def of(*kinds: str) -> Column:
        return F.col("kind").isin(*kinds)

    at = F.col("at")
    found = trace.groupBy("queue", "id").agg(
        F.max("task").alias("task"),
        F.min(F.coalesce("enqueued_at", F.when(of("enqueued"), at))).alias("enqueued_at"),
        F.min(F.when(of("leased"), at)).alias("begun_at"),
        F.max(F.when(of("leased", "pending"), at)).alias("active_at"),
        F.max(at).alias("seen_at"),
        F.max(F.when(of(*ENDS), at)).alias("ended_at"),
        F.max_by("kind", F.when(of(*ENDS), at)).alias("end"),
        F.max_by("error", F.when(of("failed"), at)).alias("error"),
        (F.count_if(of("pending")) > 0).alias("present"),
    )
    ended = F.col("ended_at").isNotNull() & ~F.coalesce(F.col("active_at") > F.col("ended_at"), F.lit(False))
    outcome = F.when(ended & (F.col("end") == "acked"), "done").when(ended, "failed").otherwise("open")
    return found.withColumn("outcome", outcome).select(
        "queue",
        "id",
        "task",
        "enqueued_at",
        "begun_at",
        "seen_at",
        F.when(ended, F.col("ended_at")).alias("ended_at"),
        "outcome",
        F.when(outcome == "failed", F.col("error")).alias("error"),
        "present",
    )
