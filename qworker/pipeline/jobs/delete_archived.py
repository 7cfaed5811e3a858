"""Remove archived messages from a store: in the tasks, page by page, and only messages that have not changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.message import FinishedMessage, Selection, State
from qworker.pipeline.source.reader import open_store
from qworker.pipeline.spark.runtime import map_in_arrow
from qworker.pipeline.spark.schema import PLACE

# The stubs of pyarrow leave the types of elements open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["discard_rows", "forget"]


def discard_rows(found: DataFrame, url: str) -> int:
    """Remove the messages of some rows. Return how many were still stored."""
    rows = found.select("queue", "state", "id", "finished_at", PLACE)
    counts = map_in_arrow(rows, partial(_discard, url), "removed bigint").groupBy().sum("removed").collect()
    return int(counts[0][0] or 0)


def _discard(url: str, pages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Remove the messages of some pages, in a task."""
    removed = asyncio.run(_discard_pages(url, pages))
    yield pa.RecordBatch.from_arrays([pa.array([removed], pa.int64())], names=["removed"])


async def _discard_pages(url: str, pages: Iterator[pa.RecordBatch]) -> int:
    removed = 0
    async with open_store(url) as backend:
        for page in pages:
            for queue, found in _by_queue(page).items():
                removed += await _discard_found(backend, queue, found)
    return removed


async def _discard_found(backend: Backend, queue: str, found: list[FinishedMessage]) -> int:
    try:
        return await backend.remove(queue, Selection(unchanged=found))
    except QueueNotFound:
        # The queue was deleted in the meantime, with its messages.
        return 0


def _by_queue(page: pa.RecordBatch) -> dict[str, list[FinishedMessage]]:
    found: dict[str, list[FinishedMessage]] = {}
    times = pc.cast(page.column("finished_at"), pa.int64()).to_pylist()
    columns = [page.column(name).to_pylist() for name in ("queue", "state", "id", PLACE)]
    for queue, state, message_id, place, time in zip(*columns, times, strict=True):
        seconds = None if time is None else cast("int", time) / 1e6
        one = FinishedMessage(id=cast("str", message_id), state=State(state), finished_at=seconds, location=place)
        found.setdefault(cast("str", queue), []).append(one)
    return found


async def forget(url: str, positions: Mapping[str, str]) -> None:
    """Allow the store to remove the archived events."""
    async with open_store(url) as backend:
        for log in await backend.history.logs():
            if log in positions:
                await backend.history.delete_before(log, positions[log])
