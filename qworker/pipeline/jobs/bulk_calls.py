"""Call a backend for many ids, on the executors. The ids do not pass through the driver."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.message import Selection
from qworker.pipeline.spark.runtime import map_in_arrow, use_current_interpreter

__all__ = ["find_ids", "remove_ids", "requeue_ids"]

# Ids in one call: enough to share a commit or a round trip, and little work to repeat if an executor dies.
_BATCH = 500

_Call = Callable[[Backend, str, list[str]], Awaitable[list[bool]]]


def requeue_ids(ids: DataFrame, url: str, queue: str) -> int:
    """Requeue failed messages, and return their number. Other messages are skipped, so it can be repeated."""
    return _total(_each(ids, url, queue, _requeue))


def remove_ids(ids: DataFrame, url: str, queue: str) -> int:
    """Remove messages in any state, and return their number."""
    return _total(_each(ids, url, queue, _remove))


def find_ids(ids: DataFrame, url: str, queue: str) -> DataFrame:
    """Return for each id whether its message is stored, in any state: id, yes.

    Args:
        ids: A column `id`.
        url: The backend.
        queue: The queue.
    """
    return _each(ids, url, queue, _find)


async def _requeue(backend: Backend, queue: str, ids: list[str]) -> list[bool]:
    # The contract returns a number only. Which messages of a batch were requeued does not matter.
    count = await backend.requeue(queue, Selection(ids=ids))
    return [i < count for i in range(len(ids))]


async def _remove(backend: Backend, queue: str, ids: list[str]) -> list[bool]:
    count = await backend.remove(queue, Selection(ids=ids))
    return [i < count for i in range(len(ids))]


async def _find(backend: Backend, queue: str, ids: list[str]) -> list[bool]:
    stored = {found.message.id for found in await backend.find(queue, ids)}
    return [message_id in stored for message_id in ids]


def _total(done: DataFrame) -> int:
    row = done.agg(F.count_if("yes")).collect()[0]
    return int(row[0])


def _each(ids: DataFrame, url: str, queue: str, call: _Call) -> DataFrame:
    """Return the answer of `call` for each id, computed on the executors: id, yes."""

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        arrow: Any = importlib.import_module("pyarrow")
        for batch in batches:
            found: list[str] = batch.column("id").to_pylist()
            told = asyncio.run(_in_batches(url, queue, found, call))
            yield arrow.RecordBatch.from_pydict({"id": found, "yes": told})

    with use_current_interpreter(ids.sparkSession):
        return map_in_arrow(ids.select("id"), work, "id string, yes boolean")


async def _in_batches(url: str, queue: str, ids: list[str], call: _Call) -> list[bool]:
    backend = open_backend(url)
    try:
        await backend.open()
        told: list[bool] = []
        for start in range(0, len(ids), _BATCH):
            told += await call(backend, queue, ids[start : start + _BATCH])
        return told
    finally:
        await backend.aclose()
