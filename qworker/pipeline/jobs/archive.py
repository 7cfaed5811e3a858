"""`archive`: copy finished messages and the history to Parquet: `TARGET/messages` and `TARGET/events`.

A run copies what it finds into staging, drops what the tables already have, and moves the rest into place
(`write_ahead.py`). A message is identified by its id, its state and the time at which it finished, and the history by
its positions. So a run after a crash, or over a queue from which nothing is removed, adds only what is new. Only
messages that are durable in the tables are removed from the queue, and only if they have not changed.

No row passes through the driver. It receives only the names of files, and counts for each queue and day.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from qworker.backend.offers import offers_heads
from qworker.errors import UsageError
from qworker.message import State
from qworker.pipeline.jobs.finished_rows import read_rows
from qworker.pipeline.jobs.listed import is_archived, list_versions, note_archived
from qworker.pipeline.jobs.tables import Table, plan_merge, stage
from qworker.pipeline.jobs.write_ahead import STAGING, PendingChange, apply, positions, recover
from qworker.pipeline.session import register_data_source
from qworker.pipeline.source.reader import HEADS
from qworker.pipeline.spark.runtime import use_current_interpreter
from qworker.pipeline.spark.schema import PLACE, column_names
from qworker.pipeline.spark.storage import Storage, open_storage
from qworker.url import BackendURL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ArchiveResult", "archive", "read_archive"]

_FINISHED = {state.word: state.value for state in (State.DONE, State.FAILED)}


class ArchiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    Attributes:
        target: The archive.
        messages: The number of new rows in `messages`.
        events: The number of new rows in `events`.
        removed: The number of messages that were removed from the queue.
        files: The number of new files.
        replaced: The number of files that they replace.
        recovered: Whether the run completed an earlier one.
    """

    target: str
    messages: int = 0
    events: int = 0
    removed: int = 0
    files: int = 0
    replaced: int = 0
    recovered: bool = False


def archive(  # noqa: PLR0913 - each argument is one option of a run
    spark: SparkSession,
    url: str,
    target: str,
    *,
    queues: Sequence[str] | None = None,
    states: Sequence[str] = tuple(_FINISHED),
    history: bool = True,
    delete: bool = False,
    compact: bool = True,
    say: Callable[[str], None] | None = None,
) -> ArchiveResult:
    """Bring the tables up to date with a store.

    Args:
        spark: Any session.
        url: The store.
        target: A directory, or a URL that Spark can write to. Only one run can work on it at a time.
        queues: The queues. None: all. The history is always that of the whole store.
        states: `done`, `failed` or both.
        history: Whether events are archived too.
        delete: Whether archived messages and events are then removed from the store.
        compact: Whether small files are compacted.
        say: Called with a text for people before each step.

    Raises:
        UsageError: A state is not the state of a finished message, another run works on the target, or Spark's workers
            cannot open the URL.
        BackendError: The store or Spark failed. The next run continues.
    """
    from qworker.pipeline.spark.error_text import raise_qworker_errors

    stored = _stored(states)
    register_data_source(spark)
    folder = open_storage(spark, target)
    run = _ArchiveRun(spark, url, folder, delete=delete, compact=compact, say=say or _silence_logging)
    with raise_qworker_errors(), folder.locked():
        recovered = recover(folder)
        if queues is None or queues:
            run.messages(queues, stored)
        if history:
            run.events()
        run.publish()
        run.delete()
        folder.remove(STAGING)
    return msgspec.structs.replace(run.result, target=target, recovered=recovered)


def read_archive(spark: SparkSession, target: str, table: str = "messages") -> DataFrame:
    """Read a table of an archive, with a column `day`. It is empty if nothing was archived."""
    return Table(spark, open_storage(spark, target), table).rows()


def _stored(states: Sequence[str]) -> list[str]:
    for state in states:
        if state not in _FINISHED:
            raise UsageError(
                f"only finished messages are archived: state must be {' or '.join(_FINISHED)} (got {state!r})"
            )
    return [_FINISHED[state] for state in states]


def _silence_logging(_text: str) -> None:
    """Ignore a text."""


class _ArchiveRun:
    """One run."""

    def __init__(
        self, spark: SparkSession, url: str, folder: Storage, *, delete: bool, compact: bool, say: Callable[[str], None]
    ) -> None:
        self.result = ArchiveResult(target="")
        self._spark = spark
        self._url = url
        self._folder = folder
        self._delete = delete
        self._compact = compact
        self._say = say
        self._intent = PendingChange()
        self._chosen: dict[str, str] = {}
        self._versions: dict[str, str | None] = {}
        # Whether finished messages can be listed without reading them.
        self._has_heads = offers_heads(BackendURL.parse(url).scheme)
        # What names the messages that an update has found.
        self._listed: DataFrame | None = None
        # The rows that were found in a store that cannot list them, in staging.
        self._found: DataFrame | None = None

    def _read(self, table: str, hidden: Sequence[str], **options: str) -> DataFrame:
        names = ",".join([*column_names(table), *hidden])
        reader = self._spark.read.format("qworker").option("url", self._url)
        return reader.options(table=table, columns=names, **options).load()

    def messages(self, queues: Sequence[str] | None, states: Sequence[str]) -> None:
        """Stage the finished messages, and select the new ones."""
        self._say("reading finished messages")
        self._chosen = {"state": ",".join(states)} | ({} if queues is None else {"queue": ",".join(queues)})
        table = Table(self._spark, self._folder, "messages")
        self._versions = asyncio.run(list_versions(self._url, queues, states)) if self._has_heads else {}
        has_table = bool(self._folder.names(table.name))
        if self._has_heads and has_table and not self._delete and is_archived(self._folder, self._versions):
            return
        if not self._has_heads:
            self._copy(table, [PLACE] if self._delete else [])
        elif has_table:
            self._update(table)
        else:
            self._copy(table, [])

    def _update(self, table: Table) -> None:
        """List all finished messages, and read only those that the table does not have."""
        found = self._listed = self._list(table, "found")
        if found is None:
            return
        self._say("writing messages")
        with use_current_interpreter(self._spark):
            rows = read_rows(table.exclude_existing(found), self._url)
            count = 0 if stage(table, "new", rows) is None else self._note(table)
        self.result = msgspec.structs.replace(self.result, messages=count)

    def _list(self, table: Table, step: str) -> DataFrame | None:
        """Stage what names each finished message."""
        reader = self._spark.read.format("qworker").option("url", self._url)
        return stage(table, step, reader.options(columns=",".join(sorted(HEADS)), **self._chosen).load())

    def _copy(self, table: Table, hidden: Sequence[str]) -> None:
        """Read all finished messages, and write those that the table does not have."""
        found = stage(table, "found", self._read("messages", hidden, **self._chosen))
        if found is None:
            return
        if hidden:
            self._found = found
        self._say("writing messages")
        if hidden or table.affected_partitions():
            count = self._add(table, table.exclude_existing(found.drop(PLACE)))
        else:
            # All rows are new.
            self._folder.move(table.staging("found"), table.staging("new"))
            count = self._note(table)
        self.result = msgspec.structs.replace(self.result, messages=count)

    def events(self) -> None:
        """Stage the events that the tables do not have."""
        from pyspark.sql import functions as sql

        self._say("reading the history")
        table = Table(self._spark, self._folder, "events")
        known = msgspec.json.encode(positions(self._folder)).decode()
        hidden = ["part", "position"]
        found = stage(table, "found", self._read("events", hidden, after=known))
        if found is None:
            return
        # Positions are ordered as text. Each row has the position after its page.
        reached = found.groupBy("part").agg(sql.max("position").alias("position")).collect()
        self._intent.positions = {row["part"]: row["position"] for row in reached}
        self.result = msgspec.structs.replace(self.result, events=self._add(table, found.drop(*hidden)))

    def _add(self, table: Table, rows: DataFrame) -> int:
        """Write the new rows of a table to staging, and record the moves. Return the number of rows."""
        return 0 if stage(table, "new", table.repartition_by_size(rows)) is None else self._note(table)

    def _note(self, table: Table) -> int:
        count = table.read(self._folder.path(table.staging("new"))).count()
        moves, removes = plan_merge(table, compact=self._compact)
        self._intent.moves += moves
        self._intent.removes += removes
        return count

    def publish(self) -> None:
        """Move the staged files into the tables."""
        self._say("moving files into place")
        apply(self._folder, self._intent)
        note_archived(self._folder, self._versions)
        files, replaced = len(self._intent.moves), len(self._intent.removes)
        self.result = msgspec.structs.replace(self.result, files=files, replaced=replaced)

    def delete(self) -> None:
        """Remove the archived messages and events from the store, if `delete` was given."""
        from qworker.pipeline.jobs.delete_archived import discard_rows, forget

        if not self._delete:
            return
        self._say("removing archived messages from the queue")
        found = self._archived() if self._has_heads and self._chosen else self._found
        if found is not None:
            with use_current_interpreter(self._spark):
                removed = discard_rows(found, self._url)
            self.result = msgspec.structs.replace(self.result, removed=removed)
        asyncio.run(forget(self._url, positions(self._folder)))

    def _archived(self) -> DataFrame | None:
        """Return what names each finished message that is durable in the tables."""
        table = Table(self._spark, self._folder, "messages")
        if self._listed is not None:
            # It is still true: a message that has changed since then is not removed.
            return table.keep_existing(self._listed, "found")
        found = self._list(table, "stored")
        return None if found is None else table.keep_existing(found, "stored")
