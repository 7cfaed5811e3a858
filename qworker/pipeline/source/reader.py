"""The batch read: the driver divides the work, and each task reads its part page by page as record batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from qworker.backend import Backend
from qworker.backend.offers import heads_of
from qworker.backend.registry import open_backend
from qworker.kit.directory.missing import is_missing
from qworker.message import Query, State, StoredMessage
from qworker.pipeline.source.filters import Condition, condition, filter_rows, selected_values
from qworker.pipeline.source.options import ReadOptions
from qworker.pipeline.source.rows import events_batch, messages_batch
from qworker.pipeline.spark.one_line import one_line_errors
from qworker.pipeline.spark.schema import PLACE

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

__all__ = ["HEADS", "EventsReader", "FilteredMessagesReader", "MessagesPart", "MessagesReader", "batches", "open_store"]

# The columns of finished messages that some stores list without opening the messages.
HEADS = frozenset({"id", "queue", "state", "finished_at", PLACE})
_FINISHED = frozenset({State.DONE, State.FAILED})
# Events in one record batch.
_EVENTS = 5000


class MessagesPart(InputPartition):
    """A part of a state of a queue."""

    def __init__(self, queue: str, state: State, part: str) -> None:
        super().__init__((queue, state.value, part))
        self.queue = queue
        self.state = state
        self.part = part


@one_line_errors
class MessagesReader(DataSourceReader):
    """The reader of the table `messages`.

    Args:
        options: The options of the query.
        names: The columns, in order.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._conditions: tuple[Condition, ...] = ()

    def partitions(self) -> list[MessagesPart]:
        """Divide the work, on the driver."""
        return asyncio.run(self._divide())

    async def _divide(self) -> list[MessagesPart]:
        options = self._options
        async with open_store(options.url) as backend:
            queues = options.queues or await backend.queues()
            return [
                MessagesPart(queue, State(state), part)
                for queue in selected_values(self._conditions, "queue", queues)
                for state in selected_values(self._conditions, "state", options.states)
                for part in await backend.parts(queue, State(state), options.partitions)
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part, in a task."""
        if isinstance(partition, MessagesPart):
            yield from batches(lambda: self._pages(partition))

    async def _pages(self, part: MessagesPart) -> AsyncIterator[pa.RecordBatch]:
        async with open_store(self._options.url) as backend:
            async for page in self._found(backend, part):
                yield filter_rows(messages_batch(page, self._names), self._conditions)

    def _found(self, backend: Backend, part: MessagesPart) -> AsyncIterator[list[StoredMessage]]:
        quick = heads_of(backend) if part.state in _FINISHED and HEADS.issuperset(self._names) else None
        if quick is not None:
            return quick.heads(part.queue, part.state, part.part)
        return backend.browse(part.queue, Query(part.state, part=part.part))


class FilteredMessagesReader(MessagesReader):
    """A reader of `messages` for Spark releases that push filters down. Other releases refuse its method."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Accept the filters that are understood, and return the others."""
        for one in filters:
            taken = condition(one)
            if taken is None or taken.column not in self._names:
                yield one
            else:
                self._conditions += (taken,)


class _LogPart(InputPartition):
    """One log of the history; its value is the log's name."""


@one_line_errors
class EventsReader(DataSourceReader):
    """The reader of the table `events`: the history after the positions of the option `after`.

    Args:
        options: The options of the query.
        names: The columns, in order.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)

    def partitions(self) -> list[InputPartition]:
        """List the logs of the history, on the driver."""
        return asyncio.run(self._divide())

    async def _divide(self) -> list[InputPartition]:
        async with open_store(self._options.url) as backend:
            return [_LogPart(part) for part in await backend.history.logs()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part, in a task."""
        # Without a log, Spark reads one partition of its own: None in Spark 4.0.
        if isinstance(partition, _LogPart):
            yield from batches(lambda: self._pages(partition.value))

    async def _pages(self, part: str) -> AsyncIterator[pa.RecordBatch]:
        options = self._options
        position = options.after.get(part)
        async with open_store(options.url) as backend:
            while True:
                found, position = await backend.history.read(part, position, _EVENTS)
                if not found:
                    return
                if options.queues:
                    found = [event for event in found if event.queue in options.queues]
                yield events_batch(found, self._names, part, position)


@asynccontextmanager
async def open_store(url: str) -> AsyncGenerator[Backend]:
    """Open a store for the length of a block."""
    backend = open_backend(url)
    try:
        if not is_missing(backend.directory):
            await backend.open()
        yield backend
    finally:
        await backend.aclose()


def batches(make: Callable[[], AsyncIterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Iterate over an asynchronous iterator without an event loop. It is closed also if the iteration ends early."""
    with asyncio.Runner() as runner:
        source = make()
        try:
            while (batch := runner.run(_next(source))) is not None:
                yield batch
        finally:
            runner.run(_close(source))


async def _next(source: AsyncIterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return await anext(source, None)


async def _close(source: AsyncIterator[pa.RecordBatch]) -> None:
    closing = getattr(source, "aclose", None)
    if closing is not None:
        await closing()
