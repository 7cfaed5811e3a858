"""`reconcile`: check that every row of a table has exactly one message, and that every message has finished."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from qworker.pipeline.inputs import read_snapshot
from qworker.pipeline.jobs import bulk_calls
from qworker.pipeline.jobs.match_keys import KeyMatch, message_key, source_key
from qworker.pipeline.spark.paths import absolute_path
from qworker.pipeline.timelines import MESSAGE_COLUMNS, build_timelines, timeline_points

__all__ = ["VERDICTS", "ReconcileResult", "Row", "reconcile"]

# The verdicts of a key, from bad to good. `unknown`: its messages have no row in the table.
VERDICTS = ("never enqueued", "lost", "failed", "open", "done", "unknown")
# The ends of messages. The first one that a key has is its verdict.
_ENDS = ("done", "open", "failed", "lost")
_SHOWN = 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One key that should be checked.

    Attributes:
        key: The key.
        verdict: Its verdict.
        rows: The number of rows that have it.
        messages: The number of messages that have it.
        ids: The ids of the first and the last message.
    """

    key: str
    verdict: str
    rows: int
    messages: int
    ids: list[str]


class ReconcileResult(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a table with a queue, in numbers of keys.

    Attributes:
        queue: The queue.
        keys: Keys of the table.
        never_enqueued: Keys without a message.
        lost: Keys whose messages are lost.
        failed: Keys whose messages have failed.
        open: Keys whose messages have not finished.
        done: Keys whose messages are done.
        enqueued_twice: Keys of the table that have more than one message.
        unknown: Keys of messages that are not in the table.
        rows_without_key: Rows of the table without a key.
        rows_twice: Rows of the table whose key another row has.
        messages_without_key: Messages without a key, because their content is gone. Their rows count as never enqueued.
        lost_without_key: Lost messages without a key.
        shown: The first keys that were never enqueued, lost or enqueued twice.
    """

    queue: str
    keys: int
    never_enqueued: int
    lost: int
    failed: int
    open: int
    done: int
    enqueued_twice: int
    unknown: int
    rows_without_key: int
    rows_twice: int
    messages_without_key: int
    lost_without_key: int
    shown: list[Row]

    @property
    def agrees(self) -> bool:
        """Whether every key of the table has one message, and none is lost."""
        return not (self.never_enqueued or self.lost or self.lost_without_key or self.enqueued_twice)


def reconcile(
    spark: SparkSession,
    source: DataFrame,
    queue: str,
    *,
    on: Sequence[KeyMatch],
    url: str | None = None,
    archive: str | None = None,
    grace_period: float = 60.0,
    output: str | None = None,
) -> ReconcileResult:
    """Compare a table with a queue's messages and history.

    Args:
        spark: The session.
        source: The table, with one row for each piece of work.
        queue: The queue's name.
        on: The expressions that match a row with a message.
        url: The backend. Without it, no message can be lost: a message without an end is open.
        archive: The path of an archive, for messages that the queue no longer keeps.
        grace_period: Seconds. A message that moved more recently is open, and not lost.
        output: The Parquet path for every key with its verdict. An existing table is replaced.
    """
    known = read_snapshot(spark, url=url, archive=archive, queues=[queue])
    now = time.time()
    # Messages are read before the history: if a message leaves the queue in between, its end is in the history.
    content = known.messages.select(*MESSAGE_COLUMNS, message_key(on).alias("key")).persist()
    found: DataFrame | None = None
    try:
        content.count()
        life = build_timelines(timeline_points(known.events, content, now))
        ends = _ends(life, content, on)
        if url is not None:
            ends = _with_lost(ends, url, queue, now - grace_period)
        found = _verdicts(source.select(source_key(source, on).alias("key")), ends).persist()
        if output is not None:
            found.write.mode("overwrite").parquet(absolute_path(output))
        return _result(found, queue)
    finally:
        content.unpersist()
        if found is not None:
            found.unpersist()


def _result(found: DataFrame, queue: str) -> ReconcileResult:
    keyed = F.col("key").isNotNull()
    known = keyed & (F.col("rows") > 0)
    twice = known & (F.col("messages") > 1)
    names = [verdict.replace(" ", "_") for verdict in VERDICTS]
    row = found.agg(
        F.count_if(known).alias("keys"),
        *(F.count_if(keyed & (F.col("verdict") == v)).alias(n) for v, n in zip(VERDICTS, names, strict=True)),
        F.count_if(twice).alias("enqueued_twice"),
        F.coalesce(F.sum(F.when(~keyed, F.col("rows"))), F.lit(0)).alias("rows_without_key"),
        F.coalesce(F.sum(F.when(known, F.col("rows") - 1)), F.lit(0)).alias("rows_twice"),
        F.coalesce(F.sum(F.when(~keyed, F.col("messages"))), F.lit(0)).alias("messages_without_key"),
        F.coalesce(F.sum(F.when(~keyed, F.col("lost_messages"))), F.lit(0)).alias("lost_without_key"),
    ).collect()[0]
    wrong = found.where(keyed & (F.col("verdict").isin("never enqueued", "lost") | twice))
    shown = wrong.orderBy("verdict", "key").limit(_SHOWN).collect()
    return ReconcileResult(
        queue=queue,
        **row.asDict(),
        shown=[
            Row(
                key=one["key"],
                verdict=one["verdict"],
                rows=one["rows"],
                messages=one["messages"],
                ids=list(one["ids"] or []),
            )
            for one in shown
        ],
    )


def _ends(life: DataFrame, content: DataFrame, on: Sequence[KeyMatch]) -> DataFrame:
    """Return each message: id, key (null if its content is gone), end, present, seen_at."""
    ends = life.select("id", F.col("outcome").alias("end"), "present", "seen_at")
    if [match.message for match in on] == ["id"]:
        return ends.withColumn("key", F.col("id"))
    return ends.join(content.groupBy("id").agg(F.max("key").alias("key")), "id", "left")


def _with_lost(ends: DataFrame, url: str, queue: str, before: float) -> DataFrame:
    """Set the end of messages that are not stored to `lost`."""
    missing = ends.where((F.col("end") == "open") & ~F.col("present") & (F.col("seen_at") < before))
    # A listing can miss messages that move. So each one is searched by its id.
    lost = bulk_calls.find_ids(missing, url, queue).where(~F.col("yes")).select("id", F.lit(True).alias("is_lost"))
    return ends.join(lost, "id", "left").withColumn("end", F.when(F.col("is_lost"), "lost").otherwise(F.col("end")))


def _verdicts(source: DataFrame, ends: DataFrame) -> DataFrame:
    """Join the keys of the table and of the messages.

    Returns:
        key, rows (of the table), messages, lost_messages (of them), ids (the first and the last), verdict (one of
        `VERDICTS`). The row with a null key counts the rows and messages without a key.
    """
    rows = source.groupBy("key").agg(F.count("*").alias("rows"))
    messages = ends.groupBy("key").agg(
        F.count("*").alias("messages"),
        F.count_if(F.col("end") == "lost").alias("lost_messages"),
        F.array_distinct(F.array(F.min("id"), F.max("id"))).alias("ids"),
        # The best end counts: a done message first, then an open one.
        *(F.max(F.col("end") == end).alias(end) for end in _ENDS),
    )
    joined = rows.join(messages, F.equal_null(rows["key"], messages["key"]), "full").select(
        F.coalesce(rows["key"], messages["key"]).alias("key"),
        F.coalesce("rows", F.lit(0)).alias("rows"),
        F.coalesce("messages", F.lit(0)).alias("messages"),
        F.coalesce("lost_messages", F.lit(0)).alias("lost_messages"),
        "ids",
        *_ENDS,
    )
    verdict = F.when(F.col("rows") == 0, "unknown").when(F.col("messages") == 0, "never enqueued")
    for end in _ENDS:
        verdict = verdict.when(F.col(end), end)
    return joined.withColumn("verdict", verdict).select("key", "rows", "messages", "lost_messages", "ids", "verdict")
