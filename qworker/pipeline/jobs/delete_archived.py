"""Remove archived messages from a store: in the tasks, page by page, and only messages that have not changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.message import FinishedMessage, Selection
from qworker.pipeline.jobs.finished_rows import by_queue, named_rows
from qworker.pipeline.source.reader import open_store
from qworker.pipeline.spark.runtime import map_in_arrow

# The stubs of pyarrow leave the types of elements open.
# pyright: reportUnknownMemberType=false

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["discard_rows", "forget"]


def discard_rows(found: DataFrame, url: str) -> int:
    """Remove the messages of some rows. Return how many were still stored."""
    counts = (
        map_in_arrow(named_rows(found), partial(_discard, url), "removed bigint").groupBy().sum("removed").collect()
    )
    return int(counts[0][0] or 0)


def _discard(url: str, pages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Remove the messages of some pages, in a task."""
    removed = asyncio.run(_discard_pages(url, pages))
    yield pa.RecordBatch.from_arrays([pa.array([removed], pa.int64())], names=["removed"])


async def _discard_pages(url: str, pages: Iterator[pa.RecordBatch]) -> int:
    removed = 0
    async with open_store(url) as backend:
        for page in pages:
            for queue, found in by_queue(page).items():
                removed += await _discard_found(backend, queue, found)
    return removed


async def _discard_found(backend: Backend, queue: str, found: list[FinishedMessage]) -> int:
    try:
        return await backend.remove(queue, Selection(unchanged=found))
    except QueueNotFound:
        # The queue was deleted in the meantime, with its messages.
        return 0


async def forget(url: str, positions: Mapping[str, str]) -> None:
    """Allow the store to remove the archived events."""
    async with open_store(url) as backend:
        for log in await backend.history.logs():
            if log in positions:
                await backend.history.delete_before(log, positions[log])
