"""Writers of `df.write` and `df.writeStream` in the format `qworker`, exactly once (docs/pipeline/writing.md).

Every task stages its rows where no worker leases them, and sends their number to the driver. No row passes through the
driver. The driver's commit decides which attempts count, and publishes them. `qworker.bulk` handles all crashes in
between.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from qworker.bulk import StagedPartition
from qworker.errors import NotSupported, UsageError
from qworker.pipeline.source.call_encoder import CALL, CallMaker
from qworker.pipeline.source.row_reader import check_columns
from qworker.pipeline.source.write_partition import PartWriter, TaskResult, WriteOptions, bulk_writer
from qworker.pipeline.spark.compat import StreamWriterBase, record_batches
from qworker.pipeline.spark.one_line import one_line_errors

__all__ = ["QworkerStreamWriter", "QworkerWriter", "batch_writer", "stream_writer"]

# Spark's property with the id of a task's stream.
_QUERY = "sql.streaming.queryId"


@one_line_errors
class QworkerWriter(DataSourceArrowWriter):
    """The writer of a batch."""

    def __init__(
        self, options: WriteOptions, schema: StructType, maker: CallMaker | None, *, is_table: bool = False
    ) -> None:
        self._writer = PartWriter(options, schema.names, maker, is_table=is_table)
        self._load = options.load or f"write-{self._writer.run}"
        self._settled = asyncio.run(self._is_settled())

    async def _is_settled(self) -> bool:
        """Return whether an earlier run sealed this load, so that nothing must be staged."""
        if self._writer.options.load is None:
            return False
        async with bulk_writer(self._writer.options, self._load) as writer:
            return await writer.done(0) is not None or await writer.sealed(0) is not None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage one partition, on an executor."""
        return TaskResult(None if self._settled else self._writer.stage(iterator, self._load))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish, on the driver."""
        asyncio.run(self._commit(_parts(messages)))

    async def _commit(self, parts: list[StagedPartition]) -> None:
        if not self._settled:
            await self._writer.finish(self._load, 0, parts)
            return
        async with bulk_writer(self._writer.options, self._load) as writer:
            manifest = await writer.sealed(0)
            if manifest is not None:
                await self._writer.publish(writer, manifest)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what was staged, on the driver."""
        asyncio.run(self._writer.abort(self._load, 0, {self._writer.run}))


@one_line_errors
class QworkerStreamWriter(StreamWriterBase):
    """The writer of a stream. Each micro-batch is published once, however often Spark repeats it."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._writer = PartWriter(options, schema.names)
        self._schema = schema

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage one partition, on an executor."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY)
        batches = record_batches(iterator, self._schema)
        return TaskResult(self._writer.stage(batches, self._load(query)), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish the batch, on the driver."""
        parts = _parts(messages)
        if parts:
            asyncio.run(self._writer.finish(self._load(_query(messages)), batchId, parts))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Remove what is known to be staged, on the driver. The rest is removed after 36 hours."""
        runs = {part.run for part in _parts(messages)}
        if runs:
            asyncio.run(self._writer.abort(self._load(_query(messages)), batchId, runs))

    def _load(self, query: str | None) -> str:
        """Return the name of a stream's load.

        A stream with a new checkpoint needs a new name: its batches start from 0.
        """
        if query is None:
            raise UsageError("Spark does not give the id of the stream: use foreachBatch, and one load for each batch")
        return f"{self._writer.options.load or 'stream'}.{hashlib.sha256(query.encode()).hexdigest()[:16]}"


def batch_writer(
    given: Mapping[str, object],
    schema: StructType,
    overwrite: bool,
    maker: CallMaker | None = None,
    *,
    is_table: bool = False,
) -> DataSourceWriter:
    """Make the writer of `df.write.format("qworker")`, and of `load`, which makes calls of rows with `maker`.

    With `is_table`, also make that of `INSERT INTO`, whose rows have all columns of the table.

    Raises:
        UsageError: An option or a column is wrong.
    """
    return QworkerWriter(
        _checked(given, schema, overwrite, made=maker is not None, is_table=is_table), schema, maker, is_table=is_table
    )


def stream_writer(given: Mapping[str, object], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """Make the writer of `df.writeStream.format("qworker")`.

    Raises:
        UsageError: An option or a column is wrong.
    """
    options = _checked(given, schema, overwrite)
    if options.load is not None and len(options.load) > 40:
        raise UsageError(
            f"the name of a stream's load must have at most 40 characters ({options.load!r} has {len(options.load)})"
        )
    return QworkerStreamWriter(options, schema)


def _checked(
    given: Mapping[str, object], schema: StructType, overwrite: bool, *, made: bool = False, is_table: bool = False
) -> WriteOptions:
    if overwrite:
        raise NotSupported(
            '.mode("overwrite") and INSERT OVERWRITE cannot be used: write with .mode("append") or INSERT INTO, '
            "and delete messages with `qworker purge` before"
        )
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if made:
        types.pop(CALL, None)
        types["body"] = "binary"
    check_columns(types, is_table=is_table)
    return WriteOptions.parse(given)


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[StagedPartition]:
    return [message.part for message in messages if isinstance(message, TaskResult) and message.part is not None]


def _query(messages: Sequence[WriterCommitMessage | None]) -> str | None:
    return next((message.query for message in messages if isinstance(message, TaskResult)), None)
