"""The input of the commands that analyze messages: a queue, an archive, or both, in the schemas MESSAGES and EVENTS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from qworker.backend.registry import schemes
from qworker.errors import UsageError
from qworker.pipeline.spark.paths import absolute_path
from qworker.pipeline.spark.schema import EVENTS, MESSAGES, column_names
from qworker.pipeline.spark.structs import struct

__all__ = ["QueueSnapshot", "is_queue_url", "read_archived", "read_live", "read_snapshot", "read_table"]


class QueueSnapshot(NamedTuple):
    """The events and messages of some queues, in the schemas EVENTS and MESSAGES."""

    events: DataFrame
    messages: DataFrame


def is_queue_url(place: str) -> bool:
    """Return whether a text is the URL of a backend.

    Otherwise it is the path of an archive, also `s3a://...` and so on.
    """
    scheme, colon, _ = place.partition(":")
    return bool(colon) and scheme in schemes()


def read_snapshot(
    spark: SparkSession,
    *,
    url: str | None = None,
    archive: str | None = None,
    queues: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> QueueSnapshot:
    """Read the history and the messages of a store, of an archive, or of both.

    Args:
        spark: The session, with the data source registered.
        url: A store, whose queues are read as they are now.
        archive: The path of an archive.
        queues: The queues. Empty: all.
        columns: The columns of the messages. Empty: all.

    Raises:
        UsageError: Neither is given, or the archive does not exist.
    """
    events: list[DataFrame] = []
    messages: list[DataFrame] = []
    if archive is not None:
        events.append(read_archived(spark, archive, "events", queues))
        stored = read_archived(spark, archive, "messages", queues)
        messages.append(stored.select(*columns) if columns else stored)
    if url is not None:
        events.append(read_live(spark, url, "events", queues))
        messages.append(read_live(spark, url, "messages", queues, columns=columns))
    if not events:
        raise UsageError("give the URL of the queues, or the path of an archive")
    return QueueSnapshot(events=reduce(DataFrame.unionByName, events), messages=reduce(DataFrame.unionByName, messages))


def read_live(
    spark: SparkSession,
    url: str,
    table: str,
    queues: Sequence[str] = (),
    *,
    states: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> DataFrame:
    """Read a table of a store.

    Args:
        spark: The session.
        url: The store.
        table: `messages` or `events`.
        queues: The queues. Empty: all.
        states: The states of the messages. Empty: all.
        columns: The columns. Empty: all.
    """
    options = {"url": url, "table": table}
    for name, words in (("queue", queues), ("state", states), ("columns", columns)):
        if words:
            options[name] = ",".join(words)
    return spark.read.format("qworker").options(**options).load()


def read_archived(spark: SparkSession, archive: str, table: str, queues: Sequence[str] = ()) -> DataFrame:
    """Read a table of an archive.

    Raises:
        UsageError: The directory does not exist.
    """
    archive = absolute_path(archive)
    if archive.startswith("file://") and not os.path.isdir(archive.removeprefix("file://")):
        raise UsageError(
            f"{archive.removeprefix('file://')}: the archive does not exist: create it with `qworker pipeline archive`"
        )
    schema = {"messages": MESSAGES, "events": EVENTS}[table]
    found = read_table(spark, f"{archive.rstrip('/')}/{table}", schema).select(*column_names(table))
    return found.where(F.col("queue").isin(*queues)) if queues else found


def read_table(spark: SparkSession, path: str, schema: str) -> DataFrame:
    """Read a Parquet table. It has no rows if it does not exist.

    The schema is given and not inferred, because the name of a queue can look like a number.
    """
    try:
        return spark.read.schema(struct(schema)).parquet(path)
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return spark.createDataFrame([], struct(schema))
