"""The plans of a replay from an archive: the action for each message, written before anything is done.

All plans are in one table next to the archive, which only grows. It has a row for each message of a plan, and a row
that says that the plan is carried out. If a replay dies while it writes its plan, the written rows are the plan. The
other messages are in the next plan.
"""

from __future__ import annotations

import time

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from qworker.errors import UsageError
from qworker.pipeline.inputs import read_archived, read_live, read_table
from qworker.pipeline.spark.error_text import to_qworker_error
from qworker.pipeline.spark.paths import absolute_path
from qworker.pipeline.timelines import build_timelines, timeline_points

__all__ = ["ENQUEUE", "REQUEUE", "ReplayPlans", "select_archived", "select_matching"]

# The acts. All other values are reasons why a message is skipped.
REQUEUE = "requeue"
ENQUEUE = "enqueue"
_PENDING = "skip: pending"
_DONE_SINCE = "skip: done since"
_REPLAYED = "skip: replayed before"

_SCHEMA = (
    "queue string, job string, run int, id string, task string, error string, finished_at timestamp, "
    "act string, at timestamp"
)
_FINISHED = "finished"


class ReplayPlans:
    """The plans of one replay, for one queue of an archive."""

    def __init__(self, spark: SparkSession, archive: str, queue: str, name: str) -> None:
        self.spark = spark
        self.archive = archive
        self.queue = queue
        self.name = name
        self._path = f"{absolute_path(archive).rstrip('/')}/replays"

    def _rows(self) -> DataFrame:
        found = read_table(self.spark, self._path, _SCHEMA)
        return found.where((F.col("queue") == self.queue) & (F.col("job") == self.name))

    def pending_plan(self) -> int | None:
        """Return the number of the plan that is not carried out; None if there is none."""
        runs = self._rows().groupBy("run").agg(F.max(F.col("act") == _FINISHED).alias("finished"))
        row = runs.where(~F.col("finished")).agg(F.min("run")).collect()[0]
        return None if row[0] is None else int(row[0])

    def read_plan(self, run: int) -> DataFrame:
        """Return the rows of a plan: id, task, error, act."""
        rows = self._rows().where((F.col("run") == run) & (F.col("act") != _FINISHED))
        return rows.select("id", "task", "error", "act").dropDuplicates(["id"])

    def already_planned(self) -> DataFrame:
        """Return the messages in the plans of this replay, and their last end that a plan has seen: id, taken_at."""
        return self._rows().where(F.col("id").isNotNull()).groupBy("id").agg(F.max("finished_at").alias("taken_at"))

    def write(self, chosen: DataFrame) -> int:
        """Write the next plan, and return its number.

        Pending messages are in the plan too: they were replayed otherwise, and this name must not replay them when they
        are done.
        """
        row = self._rows().agg(F.max("run")).collect()[0]
        run = 1 if row[0] is None else int(row[0]) + 1
        self._append(chosen.where(F.col("act").isin(REQUEUE, ENQUEUE, _PENDING)), run)
        return run

    def finish(self, run: int) -> None:
        """Record that a plan is carried out."""
        nothing = [F.lit(None).cast("string").alias(name) for name in ("id", "task", "error")]
        when = F.lit(None).cast("timestamp").alias("finished_at")
        self._append(self.spark.range(1).select(*nothing, when, F.lit(_FINISHED).alias("act")), run)

    def _append(self, rows: DataFrame, run: int) -> None:
        rows.select(
            F.lit(self.queue).alias("queue"),
            F.lit(self.name).alias("job"),
            F.lit(run).alias("run"),
            "id",
            "task",
            "error",
            "finished_at",
            "act",
            F.timestamp_seconds(F.lit(time.time())).alias("at"),
        ).write.mode("append").parquet(self._path)

    def bodies(self, planned: DataFrame) -> DataFrame:
        """Return what is enqueued for the messages of a plan: body, priority and key, in a stable order."""
        newest = _newest(read_archived(self.spark, self.archive, "messages", [self.queue]))
        found = newest.join(planned.select("id"), "id", "left_semi")
        return found.orderBy("id").select("body", "priority", "key")


def select_matching(messages: DataFrame, predicate: str) -> DataFrame:
    """Return the messages that an SQL predicate selects.

    Raises:
        UsageError: It is not a predicate over the columns of a message.
    """
    try:
        return messages.where(predicate)
    except AnalysisException as error:
        raise UsageError(f"the predicate {predicate!r} is not valid: {to_qworker_error(error)}") from error


def _newest(messages: DataFrame) -> DataFrame:
    """Return each message once, as it was at its last end."""
    latest = Window.partitionBy("id").orderBy(F.desc("finished_at"), "state")
    return messages.withColumn("nth", F.row_number().over(latest)).where("nth = 1").drop("nth")


def select_archived(plans: ReplayPlans, url: str, predicate: str, state: str) -> DataFrame:
    """Decide the action for each archived message that a predicate selects.

    Args:
        plans: The replay's plans, which contain what it has replayed before.
        url: The store, which contains the present state of the messages, and their history.
        predicate: SQL over the columns of MESSAGES.
        state: The state in which a message was archived last: `fail` or `done`.

    Returns:
        id, task, error, finished_at, act.
    """
    spark, queue = plans.spark, [plans.queue]
    messages = read_archived(spark, plans.archive, "messages", queue)
    chosen = select_matching(_newest(messages).where(F.col("state") == state), predicate)
    events = read_archived(spark, plans.archive, "events", queue).unionByName(read_live(spark, url, "events", queue))
    outcomes = build_timelines(timeline_points(events, messages, time.time())).select("id", "outcome")
    now = read_live(spark, url, "messages", queue, columns=("id", "state")).groupBy("id")
    places = now.agg(
        F.max(F.col("state").isin("ready", "leased", "delayed")).alias("pends"),
        F.max(F.col("state") == "fail").alias("fails"),
    )
    known = chosen.select("id", "task", "error", "finished_at")
    for other in (outcomes, places, plans.already_planned()):
        known = known.join(other, "id", "left")
    act = (
        # A message that has failed again since then is replayed again.
        F.when(F.col("finished_at") <= F.col("taken_at"), _REPLAYED)
        .when(F.col("pends"), _PENDING)
        .when(F.col("fails"), REQUEUE)
        .when((F.col("outcome") == "done") & F.lit(state == "fail"), _DONE_SINCE)
        .otherwise(ENQUEUE)
    )
    return known.select("id", "task", "error", "finished_at", act.alias("act"))
