"""Remove archived messages from a store: in the tasks, page by page, and only messages that have not changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from qworker.backend import Backend
from qworker.backend.offers import offers_heads
from qworker.errors import QueueNotFound
from qworker.message import FinishedMessage, Selection
from qworker.pipeline.jobs.finished_rows import by_queue, named_rows
from qworker.pipeline.source.reader import open_store
from qworker.pipeline.spark.runtime import map_in_arrow
from qworker.url import BackendURL

# The stubs of pyarrow leave the types of elements open.
# pyright: reportUnknownMemberType=false

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["discard_rows", "forget"]

# Threads of a task that remove files: where a file system discards blocks at once, each removal waits for the disk.
# Stores that cannot list finished messages use one, because the locks of some belong to the process.
_THREADS = 8
# Rows for which one thread is enough.
_FEW = 200


def discard_rows(found: DataFrame, url: str) -> int:
    """Remove the messages of some rows. Return how many were still stored."""
    counts = (
        map_in_arrow(named_rows(found), partial(_discard, url), "removed bigint").groupBy().sum("removed").collect()
    )
    return int(counts[0][0] or 0)


def _discard(url: str, pages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Remove the messages of some pages, in a task."""
    removed = 0
    threads = _THREADS if offers_heads(BackendURL.parse(url).scheme) else 1
    with ThreadPoolExecutor(threads) as pool:
        for page in pages:
            removed += sum(pool.map(partial(_discard_slice, url), _slices(page, threads)))
    yield pa.RecordBatch.from_arrays([pa.array([removed], pa.int64())], names=["removed"])


def _slices(page: pa.RecordBatch, count: int) -> list[pa.RecordBatch]:
    rows = max(_FEW, -(-page.num_rows // count))
    return [page.slice(start, rows) for start in range(0, page.num_rows, rows)]


def _discard_slice(url: str, page: pa.RecordBatch) -> int:
    """Remove the messages of some rows, in a thread with its own store. Return how many were still stored."""
    return asyncio.run(_discard_rows(url, page))


async def _discard_rows(url: str, page: pa.RecordBatch) -> int:
    async with open_store(url) as backend:
        return sum([await _discard_found(backend, queue, found) for queue, found in by_queue(page).items()])


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
