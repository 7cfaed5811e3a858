"""An idle worker finds out of many queues those with cells, without opening or asking each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qworker import Tasks
from qworker.backend.offers import queues_with_cells
from qworker.cell import Cell, CellOp
from qworker.jobs.source import JobSource
from qworker.message import Draft
from qworker.worker.cancel_repair import CancelRepair
from qworker_file.backend import FileBackend
from tests.support.worker_state import make_state
from tests.unit.test_jobs import redis, tasks, url

__all__ = ["redis", "tasks", "url"]

NAMES = [f"q{number}" for number in range(60)]


async def fill(tasks: Tasks) -> None:
    backend = await tasks.backend()
    for name in NAMES:
        await backend.create(name)
    await backend.cells("q7", [CellOp("put", Cell("cancels", "x"))])
    await backend.cells("q8", [CellOp("put", Cell("cancels2", "x")), CellOp("put", Cell("cancel", "x"))])


async def test_only_a_queue_with_cells_of_the_group_is_looked_into(tasks, url, monkeypatch):
    await fill(tasks)
    other = Tasks(url)
    backend = await other.backend()
    asked: list[str] = []
    plain = backend.cells

    async def counted(queue: str, ops: Sequence[CellOp]) -> Any:
        asked.append(queue)
        return await plain(queue, ops)

    monkeypatch.setattr(backend, "cells", counted)
    expected = NAMES if "memory" in url else ["q7"]
    assert await queues_with_cells(backend, [*NAMES, "absent"], "cancels") in (expected, [*expected, "absent"])
    repair = CancelRepair(make_state(backend))
    repair._queues.clear()
    repair._queues.extend(NAMES)
    repair._source = JobSource(other, None)
    await repair.round()
    assert asked == expected
    if isinstance(backend, FileBackend):
        assert list(backend._stores.open()._queues) == ["q7"]
        replies = await plain(
            "q9", [CellOp("get", Cell("g", "x")), CellOp("list", Cell("", "")), CellOp("close", Cell("g", ""))]
        )
        assert [(reply.done, reply.empty) for reply in replies] == [(False, False), (True, True), (True, True)]
        assert list(backend._stores.open()._queues) == ["q7"]
    await other.aclose()


async def test_a_cell_of_a_queue_that_is_open_is_found(tasks):
    await fill(tasks)
    backend = await tasks.backend()
    await backend.publish("q9", [Draft(body=b"x")])
    await backend.cells("q9", [CellOp("put", Cell("cancels", "y"))])
    assert {"q7", "q9"} <= set(await queues_with_cells(backend, NAMES, "cancels"))
    await backend.cells("q9", [CellOp("delete", Cell("cancels", "y"))])
    assert await backend.cells("q9", [CellOp("close", Cell("cancels", ""))])
    if "memory" not in backend.describe():
        assert await queues_with_cells(backend, NAMES, "cancels") == ["q7"]
