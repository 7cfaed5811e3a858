"""Finished messages by the rows that name them: read them in the tasks, page by page, if they have not changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc

from qworker.backend.offers import heads_of
from qworker.errors import QueueNotFound
from qworker.message import FinishedMessage, State
from qworker.pipeline.source.reader import batches, open_store
from qworker.pipeline.source.rows import messages_batch
from qworker.pipeline.spark.runtime import map_in_arrow
from qworker.pipeline.spark.schema import MESSAGES, PLACE, column_names

# The stubs of pyarrow leave the types of elements open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["by_queue", "named_rows", "read_rows"]


def named_rows(found: DataFrame) -> DataFrame:
    """Return the columns of rows that name their messages."""
    return found.select("queue", "state", "id", "finished_at", PLACE)


def read_rows(found: DataFrame, url: str) -> DataFrame:
    """Return the rows of the table `messages` for the messages that some rows name. A changed message has none."""
    return map_in_arrow(named_rows(found), partial(_read, url, column_names("messages")), MESSAGES)


def _read(url: str, names: Sequence[str], pages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the messages of some pages, in a task."""
    yield from batches(lambda: _read_pages(url, names, pages))


async def _read_pages(url: str, names: Sequence[str], pages: Iterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
    async with open_store(url) as backend:
        quick = heads_of(backend)
        assert quick is not None, "a store that lists heads"
        for page in pages:
            for queue, found in by_queue(page).items():
                try:
                    async for messages in quick.read_finished(queue, found):
                        yield messages_batch(messages, names)
                except QueueNotFound:
                    # The queue was deleted in the meantime, with its messages.
                    continue


def by_queue(page: pa.RecordBatch) -> dict[str, list[FinishedMessage]]:
    """Return the messages that the rows of a page name, by queue."""
    found: dict[str, list[FinishedMessage]] = {}
    times = pc.cast(page.column("finished_at"), pa.int64()).to_pylist()
    columns = [page.column(name).to_pylist() for name in ("queue", "state", "id", PLACE)]
    for queue, state, message_id, place, time in zip(*columns, times, strict=True):
        seconds = None if time is None else cast("int", time) / 1e6
        one = FinishedMessage(id=cast("str", message_id), state=State(state), finished_at=seconds, location=place)
        found.setdefault(cast("str", queue), []).append(one)
    return found
