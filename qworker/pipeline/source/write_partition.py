"""The options of a write, and the steps of its tasks and of its commit, for batches and streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from qworker import bulk
from qworker.backend.registry import open_backend
from qworker.bulk import BulkWriter, Manifest, StagedPartition, check_load
from qworker.errors import BackendError, InvalidArguments, PublishUncertain, UsageError
from qworker.message import Draft
from qworker.names import check_existing_queue
from qworker.pipeline.source.call_encoder import CallMaker
from qworker.pipeline.source.options import check_path, checked_url
from qworker.pipeline.source.rejects import RejectsFile, RejectsTable
from qworker.pipeline.source.row_reader import RowReader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["PartWriter", "TaskResult", "WriteOptions", "bulk_writer"]

_KNOWN = ("url", "queue", "load", "staging_dir", "rejects")
# Options of a stream that are for Spark itself.
_SPARKS = frozenset({"checkpointlocation", "asyncprogresstrackingenabled", "asyncprogresstrackingcheckpointintervalms"})


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a write.

    Attributes:
        url: The backend.
        queue: The queue.
        load: The name of the load. None: a new name, so that the write cannot be run again.
        staging_dir: A folder that all processes see, for stores that cannot keep staged messages themselves.
        rejects: The table of the rejected rows. None: the first one fails the write.
    """

    url: str
    queue: str
    load: str | None = None
    staging_dir: str | None = None
    rejects: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> WriteOptions:
        """Read Spark's options.

        Raises:
            UsageError: An option is unknown, missing or not valid.
        """
        texts = {name.lower(): str(value) for name, value in given.items() if name.lower() not in _SPARKS}
        check_path(texts, "save")
        for name in texts:
            if name not in _KNOWN:
                raise UsageError(
                    f"unknown option {name!r} for writing in the format qworker. Options: {', '.join(_KNOWN)}"
                )
        url = checked_url(texts)
        if "queue" not in texts:
            raise UsageError('no queue is given: pass .option("queue", "NAME")')
        load = texts.get("load")
        return cls(
            url=url,
            queue=check_existing_queue(texts["queue"]),
            load=None if load is None else check_load(load),
            staging_dir=texts.get("staging_dir"),
            rejects=texts.get("rejects"),
        )


@asynccontextmanager
async def bulk_writer(options: WriteOptions, load: str) -> AsyncGenerator[BulkWriter]:
    """Open the writer of a load, for the length of a block."""
    backend = open_backend(options.url)
    try:
        # Opened first: a remote store knows only then whether it takes ids.
        await backend.open()
        yield bulk.open(
            backend, options.queue, load, None if options.staging_dir is None else Path(options.staging_dir)
        )
    finally:
        await backend.aclose()


@dataclass
class TaskResult(WriterCommitMessage):
    """The result of a task, which it sends to the driver.

    Attributes:
        part: The partition that the task staged. None: the load was done or sealed before the task started.
        query: The id of the stream.
    """

    part: StagedPartition | None
    query: str | None = None


class PartWriter:
    """The steps of a write, for batches and streams.

    Args:
        options: The options of the write.
        names: The columns of the DataFrame.
        maker: Makes calls of the rows. None: the rows are calls.
        is_table: Whether the rows have the columns of a table of Spark SQL. Most of them cannot be written.
    """

    def __init__(
        self, options: WriteOptions, names: Sequence[str], maker: CallMaker | None = None, *, is_table: bool = False
    ) -> None:
        self._is_table = is_table
        self.options = options
        self._names = tuple(names)
        self._maker = maker
        self.run = secrets.token_hex(8)

    def stage(self, iterator: Iterator[pa.RecordBatch], load: str) -> StagedPartition:
        """Stage one partition.

        Raises:
            InvalidArguments: A row is not valid, and there is no table for rejected rows.
        """
        context = TaskContext.get()
        assert context is not None
        part = context.partitionId()
        # Unique, because attempts of an earlier driver have the same numbers.
        attempt = f"{context.taskAttemptId()}-{secrets.token_hex(4)}"
        with ExitStack() as stack:
            rejects: RejectsFile | None = None
            if self.options.rejects is not None:
                rejects = RejectsTable(self.options.rejects, load).file(self.run, part, attempt)
                stack.enter_context(rejects)
            drafts = self._drafts(iterator, part, rejects)
            staged = asyncio.run(self._stage(load, part, attempt, drafts))
        return staged if rejects is None else msgspec.structs.replace(staged, rejected=rejects.count)

    async def _stage(self, load: str, part: int, attempt: str, drafts: Iterator[list[Draft]]) -> StagedPartition:
        async with bulk_writer(self.options, load) as writer:
            return await writer.stage(self.run, part, attempt, drafts)

    def _drafts(
        self, iterator: Iterator[pa.RecordBatch], part: int, rejects: RejectsFile | None
    ) -> Iterator[list[Draft]]:
        most = open_backend(self.options.url).max_body
        reader = RowReader(self._names, self._maker, max_body=most, is_table=self._is_table)
        row = 0
        for batch in iterator:
            drafts, bad = reader.read(batch)
            if bad and rejects is None:
                number, reason = bad[0]
                raise InvalidArguments(
                    f"row {row + number} of partition {part} cannot be enqueued: {reason}: "
                    "correct the row, or name a table for such rows (`rejects`)"
                )
            if bad and rejects is not None:
                rejects.write(batch, bad)
            row += batch.num_rows
            if drafts:
                yield drafts

    def publish_rejects(self, manifest: Manifest, load: str) -> None:
        """Publish the rejects of a seal."""
        if self.options.rejects is not None:
            RejectsTable(self.options.rejects, load).publish(manifest)

    def discard_rejects(self, runs: set[str], load: str) -> None:
        """Remove the rejects of runs that do not count."""
        if self.options.rejects is not None:
            RejectsTable(self.options.rejects, load).discard(runs)

    async def finish(self, load: str, step: int, parts: Sequence[StagedPartition]) -> None:
        """Seal and publish a step. If it was sealed before, publish that seal."""
        async with bulk_writer(self.options, load) as writer:
            manifest = await writer.seal(step, parts)
            others = {part.run for part in parts} - (set[str]() if manifest is None else manifest.runs)
            for run in others:
                await writer.discard(run)
            self.discard_rejects(others, load)
            if manifest is not None:
                await self.publish(writer, manifest)
            if self.options.load is None:
                # No process can run a load without a name again.
                await writer.forget()

    async def publish(self, writer: BulkWriter, manifest: Manifest) -> None:
        """Publish a seal, and its rejects.

        Raises:
            PublishUncertain: Not all of it was published. The error says how to continue.
        """
        try:
            # This comes before the mark: after it, no run publishes rejects.
            self.publish_rejects(manifest, writer.name)
            await writer.publish(manifest)
        except (BackendError, OSError) as error:
            raise PublishUncertain(
                f"the load {writer.name} may be incomplete: "
                f"run the same load again (load={writer.name}) to finish it: {error}"
            ) from error

    async def abort(self, load: str, step: int, runs: set[str]) -> None:
        """Remove what runs staged, unless it is sealed. A commit that failed continues when the load is run again."""
        async with bulk_writer(self.options, load) as writer:
            if await writer.sealed(step) is None:
                for run in runs:
                    await writer.discard(run)
                self.discard_rejects(runs, load)
