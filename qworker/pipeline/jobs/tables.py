"""The Parquet tables of an archive: `TABLE/queue=Q/day=YYYY-MM-DD/*.parquet`, days in UTC."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qworker.pipeline.jobs.write_ahead import STAGING
from qworker.pipeline.spark.runtime import parallelism
from qworker.pipeline.spark.schema import TABLES, column_names
from qworker.pipeline.spark.storage import Storage
from qworker.pipeline.spark.structs import struct

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["Table", "plan_merge", "stage"]

# The approximate number of bytes that a task writes into one file. A smaller file is compacted.
_FILE = 32 << 20
_SMALL = 8 << 20
# Partitions that a task writes at the same time. It sorts its rows by partition only if there are more.
_OPEN_FILES = 8
_DAY_US = 86_400_000_000
# The key of a row of `messages`, together with the queue and the day.
_KEY = ("id", "state")
# The columns that give a row its day: the first one that is not null.
_TIMES = {"messages": ("finished_at", "enqueued_at"), "events": ("at",)}


class Table:
    """One table of an archive.

    Args:
        spark: Any session.
        folder: The archive.
        name: `messages` or `events`.
    """

    def __init__(self, spark: SparkSession, folder: Storage, name: str) -> None:
        self.spark = spark
        self.folder = folder
        self.name = name

    def staging(self, step: str) -> str:
        """Return where a run keeps the files of one step."""
        return f"{STAGING}/{self.name}/{step}"

    def rows(self) -> DataFrame:
        """Return the table, with its column `day`."""
        names = [*column_names(self.name), "day"]
        if not self.folder.names(self.name):
            return self.spark.createDataFrame([], self.schema()).select(*names)
        return self.read(self.folder.path(self.name)).select(*names)

    def schema(self, more: str = "") -> StructType:
        """Return the columns of a folder of partitions. They are not inferred: a name like `007` is not a number."""
        return struct(f"{TABLES[self.name]}{more}, day date")

    def read(self, path: str, *partitions: str, more: str = "") -> DataFrame:
        """Read a folder of partitions, or some of them."""
        reader = self.spark.read.schema(self.schema(more)).option("basePath", path)
        return reader.parquet(*([f"{path}/{one}" for one in partitions] or [path]))

    def files(self, where: str) -> dict[str, list[str]]:
        """Return the files in each partition of a folder, by `queue=Q/day=D`."""
        found: dict[str, list[str]] = {}
        for queue in self.folder.names(where):
            for day in self.folder.names(f"{where}/{queue}"):
                names = self.folder.names(f"{where}/{queue}/{day}")
                found[f"{queue}/{day}"] = [name for name in names if name.endswith(".parquet")]
        return {partition: names for partition, names in found.items() if names}

    def affected_partitions(self, step: str = "found") -> list[str]:
        """Return the partitions of the rows of a step that already have rows in the table."""
        known = self.files(self.name)
        return [partition for partition in self.files(self.staging(step)) if partition in known]

    def exclude_existing(self, found: DataFrame, step: str = "found") -> DataFrame:
        """Return the rows of a step that the table does not have. Only their days are read."""
        touched = self.affected_partitions(step)
        return found if not touched else self._compared(found, touched, "left_anti")

    def keep_existing(self, found: DataFrame, step: str) -> DataFrame:
        """Return the rows of a step that the table has. Only their days are read."""
        touched = self.affected_partitions(step)
        return found.limit(0) if not touched else self._compared(found, touched, "left_semi")

    def _compared(self, found: DataFrame, touched: Sequence[str], how: str) -> DataFrame:
        there = self.read(self.folder.path(self.name), *touched).select("queue", "day", "finished_at", *_KEY)
        there = there.withColumnsRenamed({name: f"known_{name}" for name in there.columns})
        same = found["finished_at"].eqNullSafe(there["known_finished_at"])
        for name in ("queue", "day", *_KEY):
            same &= found[name] == there[f"known_{name}"]
        return found.join(there, same, how)

    def repartition_by_size(self, rows: DataFrame) -> DataFrame:
        """Divide rows into as many tasks as give their files a good size."""
        partitions = self.files(self.staging("found"))
        size = sum(
            self.folder.size(f"{self.staging('found')}/{partition}/{name}")
            for partition, names in partitions.items()
            for name in names
        )
        tasks = max(1, -(-size // _FILE))
        if len(partitions) > tasks:
            # One file in each partition.
            return rows.repartition(min(len(partitions), 4 * tasks), "queue", "day")
        return rows.coalesce(max(tasks, min(parallelism(self.spark), size // _SMALL)))


def stage(table: Table, step: str, rows: DataFrame) -> DataFrame | None:
    """Write rows to staging by queue and day, and read them from there. Return None if there are no rows."""
    where = table.staging(step)
    if "day" not in rows.columns:
        rows = rows.withColumn("day", _day(table.name, rows))
    with _setting(table.spark, "spark.sql.maxConcurrentOutputFileWriters", str(_OPEN_FILES)):
        rows.write.partitionBy("queue", "day").parquet(table.folder.path(where))
    if not table.files(where):
        return None
    more = "".join(f", {name} string" for name in rows.columns if name not in {*column_names(table.name), "day"})
    return table.read(table.folder.path(where), more=more)


@contextmanager
def _setting(spark: SparkSession, name: str, value: str) -> Generator[None]:
    """Change a setting of a session for the length of a block."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def _day(table: str, rows: DataFrame) -> Column:
    from pyspark.sql import functions as sql

    # Not `to_date`, which uses the session's time zone.
    # Rows that only name messages do not have all of them.
    time = sql.coalesce(*[rows[name] for name in _TIMES[table] if name in rows.columns])
    return sql.date_from_unix_date(sql.floor(sql.unix_micros(time) / _DAY_US).cast("int"))


def plan_merge(table: Table, *, compact: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the moves from staging into the table, and the files that they replace there.

    With `compact`, the small files of each partition with new files are first compacted in staging.
    """
    moves: list[tuple[str, str]] = []
    removes: list[str] = []
    new, there = table.staging("new"), table.files(table.name)
    for partition, names in table.files(new).items():
        fresh = [f"{new}/{partition}/{name}" for name in names]
        old = [f"{table.name}/{partition}/{name}" for name in there.get(partition, ())]
        small = [name for name in (*fresh, *old) if table.folder.size(name) < _SMALL]
        if compact and len(small) > 1:
            fresh = [name for name in fresh if name not in small] + _together(table, partition, small)
            removes += [name for name in old if name in small]
        moves += [(name, f"{table.name}/{partition}/{name.rpartition('/')[2]}") for name in fresh]
    return moves, removes


def _together(table: Table, partition: str, names: Sequence[str]) -> list[str]:
    """Compact files in staging. Return the names of the new ones."""
    where = f"{table.staging('together')}/{partition}"
    inside = ", ".join(_columns_in_files(table.name))
    rows = table.spark.read.schema(struct(inside)).parquet(*[table.folder.path(name) for name in names])
    rows.coalesce(1).write.parquet(table.folder.path(where))
    return [f"{where}/{name}" for name in table.folder.names(where) if name.endswith(".parquet")]


def _columns_in_files(table: str) -> Iterator[str]:
    """Return the columns in the files. The queue and the day are in the names of folders."""
    return (column for column in TABLES[table].split(", ") if not column.startswith("queue "))
