"""Tables in the pipeline's schemas, made by hand: what an archive would have of messages whose lives a test knows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qworker.pipeline.spark.schema import EVENTS, MESSAGES, column_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TIMES = {"at", "enqueued_at", "due_at", "expires_at", "finished_at"}


def frame(spark: SparkSession, table: str, rows: Sequence[dict[str, Any]]) -> DataFrame:
    """Rows in the schema of `messages` or `events`; what they do not name is null, and times are Unix seconds."""
    names = column_names(table)
    values = [tuple(_value(name, row.get(name)) for name in names) for row in rows]
    return spark.createDataFrame(values, {"messages": MESSAGES, "events": EVENTS}[table])


def _value(name: str, value: Any) -> Any:
    return datetime.fromtimestamp(value, UTC) if name in _TIMES and value is not None else value


def write_archive(
    spark: SparkSession, path: Path, *, events: Sequence[dict[str, Any]] = (), messages: Sequence[dict[str, Any]] = ()
) -> str:
    """Add rows to an archive, laid out as `archive` does, and return its path."""
    for table, rows, time in (("events", events, "at"), ("messages", messages, "finished_at")):
        if rows:
            made = frame(spark, table, rows)
            by_day = made.withColumn("day", made[time].cast("date"))
            by_day.coalesce(1).write.mode("append").partitionBy("queue", "day").parquet(f"{path}/{table}")
    return str(path)
