"""Writing: `df.write.format("qworker")` and `df.writeStream.format("qworker")`, exactly once per row; docs/pipeline/writing.md.

Every task stages its rows where nobody leases them, and tells the driver how many; no row goes through the driver. The driver's commit
says which attempts count, and publishes them. What happens when anything dies in between is `qworker.bulk`'s matter.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from qworker.bulk import StagedPartition
from qworker.errors import NotSupported, UsageError
from qworker.pipeline.calls import CALL, CallMaker
from qworker.pipeline.drafts import check_columns
from qworker.pipeline.partitions import PartWriter, TaskResult, WriteOptions, bulk_writer

__all__ = ["QworkerStreamWriter", "QworkerWriter", "batch_writer", "stream_writer"]

# Where Spark tells a task which stream it works for.
_QUERY = "sql.streaming.queryId"


class QworkerWriter(DataSourceArrowWriter):
    """One run of a batch load."""

    def __init__(self, options: WriteOptions, schema: StructType, maker: CallMaker | None) -> None:
        self._writer = PartWriter(options, schema.names, maker)
        self._load = options.load or f"write-{self._writer.run}"
        self._settled = asyncio.run(self._is_settled())

    async def _is_settled(self) -> bool:
        """Whether what this load enqueues was decided by an earlier run: then nothing needs to be staged."""
        if self._writer.options.load is None:
            return False
        async with bulk_writer(self._writer.options, self._load) as writer:
            return await writer.done(0) is not None or await writer.sealed(0) is not None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """On an executor: stage one partition, which comes in record batches."""
        return TaskResult(None if self._settled else self._writer.stage(iterator, self._load))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: publish."""
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
        """On the driver: leave nothing."""
        asyncio.run(self._writer.abort(self._load, 0, {self._writer.run}))


class QworkerStreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of a stream: each is published once, however often Spark repeats it."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._writer = PartWriter(options, schema.names)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """On an executor: stage one partition."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY)
        return TaskResult(self._writer.stage(iterator, self._load(query)), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """On the driver: publish the batch."""
        parts = _parts(messages)
        if parts:
            asyncio.run(self._writer.finish(self._load(_query(messages)), batchId, parts))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """On the driver: leave nothing of what is known; the rest goes after 36 hours."""
        runs = {part.run for part in _parts(messages)}
        if runs:
            asyncio.run(self._writer.abort(self._load(_query(messages)), batchId, runs))

    def _load(self, query: str | None) -> str:
        """A name for each stream: a new one, without the checkpoint of the old one, counts its batches from 0 again."""
        if query is None:
            raise UsageError("Spark does not give the id of the stream: use foreachBatch, and one load for each batch")
        return f"{self._writer.options.load or 'stream'}.{hashlib.sha256(query.encode()).hexdigest()[:16]}"


def batch_writer(
    given: Mapping[str, object], schema: StructType, overwrite: bool, maker: CallMaker | None = None
) -> DataSourceWriter:
    """What `df.write.format("qworker")` uses, and `load`, whose rows `maker` makes calls of.

    Raises:
        UsageError: an option or a column is wrong.
    """
    return QworkerWriter(_checked(given, schema, overwrite, made=maker is not None), schema, maker)


def stream_writer(given: Mapping[str, object], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """What `df.writeStream.format("qworker")` uses.

    Raises:
        UsageError: an option or a column is wrong.
    """
    options = _checked(given, schema, overwrite)
    if options.load is not None and len(options.load) > 40:
        raise UsageError(
            f"the name of a stream's load must have at most 40 characters ({options.load!r} has {len(options.load)})"
        )
    return QworkerStreamWriter(options, schema)


def _checked(given: Mapping[str, object], schema: StructType, overwrite: bool, *, made: bool = False) -> WriteOptions:
    if overwrite:
        raise NotSupported('only .mode("append") is supported')
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if made:
        types.pop(CALL, None)
        types["body"] = "binary"
    check_columns(types)
    return WriteOptions.parse(given)


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[StagedPartition]:
    return [message.part for message in messages if isinstance(message, TaskResult) and message.part is not None]


def _query(messages: Sequence[WriterCommitMessage | None]) -> str | None:
    return next((message.query for message in messages if isinstance(message, TaskResult)), None)
