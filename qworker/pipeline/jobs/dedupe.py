"""`dedupe`: find and remove messages that wait for the same work as another one.

The oldest pending message stays. It is the same one in every run, so two runs at the same time never remove each
other's message. Only ready and delayed messages are removed, never leased ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from qworker.pipeline.inputs import read_snapshot
from qworker.pipeline.jobs import bulk_calls
from qworker.pipeline.jobs.match_keys import KeyMatch, message_key

__all__ = ["DedupeResult", "DuplicateGroup", "dedupe", "find_duplicates"]

_SHOWN = 20


class DuplicateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Messages for the same work.

    Attributes:
        key: The key that they have in common.
        kept: The id of the message that stays; None if one is done.
        surplus: The number of the other messages.
    """

    key: str
    kept: str | None
    surplus: int


class DedupeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `dedupe`.

    Attributes:
        queue: The queue.
        keys: The number of keys with more than one message.
        surplus: The number of messages that are not needed.
        removed: The number of removed messages; 0 without `delete`.
        groups: The keys with the most surplus messages.
    """

    queue: str
    keys: int
    surplus: int
    removed: int
    groups: list[DuplicateGroup]


def dedupe(
    spark: SparkSession,
    url: str,
    queue: str,
    *,
    on: Sequence[KeyMatch] = (),
    include_done: bool = False,
    archive: str | None = None,
    delete: bool = False,
) -> DedupeResult:
    """Find messages of one queue that wait for the same work, and remove all but the oldest.

    Args:
        spark: The session.
        url: The backend.
        queue: The queue.
        on: What makes two messages the same (the source's side is ignored). Nothing: the same call or body.
        include_done: Whether a message is also surplus if a done message of the queue has done the same work.
        archive: Whether a message is also surplus if a done message of this archive has done the same work.
        delete: Whether to remove the surplus messages.
    """
    found = find_duplicates(
        spark, url, queue, on=on, done=include_done or archive is not None, archive=archive
    ).persist()
    try:
        counted = found.agg(F.count_distinct("same"), F.count("*")).collect()[0]
        groups = (
            found.groupBy("same")
            .agg(F.max("kept").alias("kept"), F.count("*").alias("surplus"))
            .orderBy(F.desc("surplus"), "same")
            .limit(_SHOWN)
            .collect()
        )
        removed = bulk_calls.remove_ids(found, url, queue) if delete and counted[1] else 0
    finally:
        found.unpersist()
    return DedupeResult(
        queue=queue,
        keys=counted[0],
        surplus=counted[1],
        removed=removed,
        groups=[DuplicateGroup(key=row["same"][:200], kept=row["kept"], surplus=row["surplus"]) for row in groups],
    )


def find_duplicates(
    spark: SparkSession,
    url: str,
    queue: str,
    *,
    on: Sequence[KeyMatch] = (),
    done: bool = False,
    archive: str | None = None,
) -> DataFrame:
    """Return the surplus messages: id, same (their key), kept (the id of the one that stays; null if one is done)."""
    messages = read_snapshot(spark, url=url, archive=archive, queues=[queue]).messages
    # The body of an envelope also has the headers of its trace, which differ.
    alike = message_key(on) if on else F.coalesce(_call(), F.base64("body"))
    keyed = messages.select("id", "state", "enqueued_at", alike.alias("same")).where("same is not null")
    waits = F.col("state").isin("ready", "delayed")
    finished = F.max(F.when(F.col("state") == "done", F.lit(True))) if done else F.max(F.lit(None).cast("boolean"))
    group = Window.partitionBy("same")
    # A message that moved in the meantime can be in two states, and is one message.
    pending = F.when(waits | (F.col("state") == "leased"), F.struct("enqueued_at", "id"))
    ranked = keyed.withColumn("oldest", F.min(pending).over(group)["id"]).withColumn("is_done", finished.over(group))
    settled = F.coalesce("is_done", F.lit(False))
    return (
        ranked.where(waits & (settled | (F.col("id") != F.col("oldest"))))
        .select("id", "same", F.when(~settled, F.col("oldest")).alias("kept"))
        .dropDuplicates(["id"])
    )


def _call() -> Column:
    return F.when(F.col("task").isNotNull(), F.to_json(F.struct("task", "args", "kwargs")))
