"""`reconcile`: does every row of a table have its message, and only one, and has each of those come to an end?"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from qworker.pipeline import hands
from qworker.pipeline.inputs import evidence
from qworker.pipeline.keys import Match, message_key, source_key
from qworker.pipeline.lives import MESSAGE_COLUMNS, lives, traces
from qworker.pipeline.places import absolute_path

__all__ = ["VERDICTS", "ReconcileResult", "Row", "reconcile"]

# What a key can be, from bad to good; `unknown` are messages whose key is not in the table.
VERDICTS = ("never enqueued", "lost", "failed", "open", "done", "unknown")
# How a message ends, from what counts most to what counts least for its key.
_ENDS = ("done", "open", "failed", "lost")
_SHOWN = 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One key that needs a look."""

    key: str
    verdict: str
    # Rows of the table, and messages, that have it.
    rows: int
    messages: int
    # The first and the last of the messages.
    ids: list[str]


class ReconcileResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a table and a queue compare, counted in keys."""

    queue: str
    keys: int
    # Keys by what became of their messages.
    never_enqueued: int
    lost: int
    failed: int
    open: int
    done: int
    # Keys of the table that have more than one message.
    enqueued_twice: int
    # Keys of messages that are not in the table.
    unknown: int
    # Rows of the table without a key, and rows whose key another one has.
    rows_without_key: int
    rows_twice: int
    # Messages of which nothing is left to take a key from, and those of them that are lost. Their rows count as never enqueued.
    messages_without_key: int
    lost_without_key: int
    # Keys that are never enqueued, lost or enqueued twice; the first ones.
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
    on: Sequence[Match],
    url: str | None = None,
    archive: str | None = None,
    grace_period: float = 60.0,
    output: str | None = None,
) -> ReconcileResult:
    """Compare a table with a queue's messages and history.

    Args:
        spark: the session.
        source: the table: one row for each piece of work.
        queue: the queue's name.
        on: what makes a row and a message the same.
        url: the backend, as it is now. Without it nothing can be said to be lost: what has no end is open.
        archive: what `archive` wrote; needed for what the queue no longer keeps.
        grace_period: what moved less than so many seconds ago is open, and not lost.
        output: where to write every key with its verdict, as Parquet; what is there is replaced.
    """
    known = evidence(spark, url=url, archive=archive, queues=[queue])
    now = time.time()
    # Content before history: what leaves the queue in between has its end in the history, which is read after it.
    content = known.messages.select(*MESSAGE_COLUMNS, message_key(on).alias("key")).persist()
    found: DataFrame | None = None
    try:
        content.count()
        life = lives(traces(known.events, content, now))
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


def _ends(life: DataFrame, content: DataFrame, on: Sequence[Match]) -> DataFrame:
    """Each message: id, key (null where nothing is left to take it from), end, present, seen_at."""
    ends = life.select("id", F.col("outcome").alias("end"), "present", "seen_at")
    if [match.message for match in on] == ["id"]:
        return ends.withColumn("key", F.col("id"))
    return ends.join(content.groupBy("id").agg(F.max("key").alias("key")), "id", "left")


def _with_lost(ends: DataFrame, url: str, queue: str, before: float) -> DataFrame:
    """The same, where the end of what is nowhere is `lost`."""
    missing = ends.where((F.col("end") == "open") & ~F.col("present") & (F.col("seen_at") < before))
    # A listing can miss what moves: only a look for the message itself counts.
    lost = hands.find(missing, url, queue).where(~F.col("yes")).select("id", F.lit(True).alias("is_lost"))
    return ends.join(lost, "id", "left").withColumn("end", F.when(F.col("is_lost"), "lost").otherwise(F.col("end")))


def _verdicts(source: DataFrame, ends: DataFrame) -> DataFrame:
    """Every key of the table and of the messages.

    Returns:
        key, rows (of the table), messages, lost_messages (of them), ids (the first and the last), verdict (one of `VERDICTS`). The row whose key is null has
        what has no key, on either side.
    """
    rows = source.groupBy("key").agg(F.count("*").alias("rows"))
    messages = ends.groupBy("key").agg(
        F.count("*").alias("messages"),
        F.count_if(F.col("end") == "lost").alias("lost_messages"),
        F.array_distinct(F.array(F.min("id"), F.max("id"))).alias("ids"),
        # One that is done settles its key, and one that may still come is no reason to worry.
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
