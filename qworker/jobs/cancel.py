"""Cancel jobs, in four steps of which each can be repeated by any process.

1. Put the cell `cancels/<id>`: who cancels.
2. `Backend.cancel`: one atomic step moves the message to failed.
3. Store what follows from it: the result `cancelled`, and what the app does after a failure.
4. Delete the cell.

If the canceller dies, a worker finds the cell and goes on (`finish_cancels`). A canceller that does not know the task
leaves the cell, with the token, and so the rest of step 3, to a worker that knows it.

Step 2 compares the version of the cell, in the same atomic step. So a process that has read the cell before a requeue
does not cancel the requeued message again: before the requeue, its caller finishes the cancels (`finish_all_cancels`),
which deletes each cell or stores the token in it. If a cell is put after that and before the requeue, its cancel is
under way and has reported nothing, so it may also come after the requeue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from qworker.backend import Backend
from qworker.cell import Cell, CellOp
from qworker.errors import NotSupported, QueueNotFound, UsageError
from qworker.failure_text import CANCELLED, cancelled_text
from qworker.jobs.look import find_messages
from qworker.jobs.records import CANCELS, StoredResult, put_result, rank_of
from qworker.jobs.source import JobSource
from qworker.message import Cancelled, Selection, State, StoredMessage

__all__ = ["CancelCounts", "Was", "cancel_jobs", "finish_all_cancels", "finish_cancels", "list_cancels"]

# Calls log to the logging of the application.
_log = logging.getLogger("qworker")

Was: TypeAlias = Literal["waiting", "running", "finished"]

_WAS: dict[State, Was] = {
    State.READY: "waiting",
    State.DELAYED: "waiting",
    State.LEASED: "running",
    State.DONE: "finished",
    State.FAILED: "finished",
}


class CancelCounts(msgspec.Struct, frozen=True):
    """What was found of the jobs that were to be cancelled.

    Attributes:
        waiting: Number of jobs that waited, and will not run.
        running: Number of jobs that ran. Their handlers are stopped.
        finished: Number of jobs that had ended before. They are not changed.
    """

    waiting: int = 0
    running: int = 0
    finished: int = 0


class _Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of the cell.

    Attributes:
        by: Who cancels the job.
        at: Unix seconds at which it was asked for, for people.
        token: The token of the last delivery, once step 2 is done.
    """

    by: str = ""
    at: float = 0.0
    token: int | None = None


async def cancel_jobs(
    backend: Backend, source: JobSource, queue: str, ids: Sequence[str], by: str = ""
) -> dict[str, Was]:
    """Cancel jobs of one queue.

    Returns:
        What each was before.

    Raises:
        NotSupported: The store can neither cancel nor remove messages.
    """
    if "cancel" in backend.deviations or "cells" in backend.deviations:
        return await _remove(backend, source, queue, ids)
    if not ids:
        return {}
    return await _cancel(backend, source, queue, await _put_requests(backend, queue, ids, by))


async def finish_cancels(backend: Backend, source: JobSource, queue: str, cells: Sequence[Cell]) -> None:
    """Do what is left of the steps that other processes have begun. `cells` are those of their first step."""
    left: dict[str, Cell] = {}
    for cell in cells:
        request = _read(cell)
        if request.token is None:
            left[cell.name] = cell
        else:
            found = await find_messages(backend, queue, [cell.name], source.task)
            cancelled = Cancelled(cell.name, State.FAILED, request.token, already=True)
            await _follow(backend, source, queue, cell, cancelled, found.get(cell.name))
    if left:
        await _cancel(backend, source, queue, left)


async def finish_all_cancels(backend: Backend, source: JobSource, queue: str) -> None:
    """Finish what was begun in a queue, before failed messages are requeued: no worker cancels them a second time."""
    if {"cells", "cancel"} & backend.deviations.keys():
        return
    async for page in list_cancels(backend, queue):
        await finish_cancels(backend, source, queue, page)


async def list_cancels(backend: Backend, queue: str) -> AsyncGenerator[list[Cell]]:
    """Yield the cells of cancels that were begun and not finished, page by page."""
    after = ""
    while True:
        (reply,) = await backend.cells(queue, [CellOp("list", Cell(CANCELS, after))])
        if reply.cells:
            yield reply.cells
            after = reply.cells[-1].name
        if reply.empty or not reply.cells:
            return


async def _put_requests(backend: Backend, queue: str, ids: Sequence[str], by: str) -> dict[str, Cell]:
    """Carry out the first step, and return the cells.

    A canceller continues what another one has begun: if it replaced that cell, the other one would be refused.
    """
    request = msgspec.json.encode(_Request(by, time.time()))
    cells: dict[str, Cell] = {}
    seen = dict.fromkeys(ids, "")
    while seen:
        replies = await backend.cells(queue, [CellOp("put", Cell(CANCELS, one, request), seen[one]) for one in seen])
        stored = {one: reply.cell for one, reply in zip(seen, replies, strict=True)}
        begun = {one: cell for one, cell in stored.items() if cell is not None and _read(cell).token is None}
        cells |= begun
        # Step 2 of an earlier cancel is done, and the message may have been requeued since.
        seen = {one: "" if cell is None else cell.version for one, cell in stored.items() if one not in begun}
    return cells


async def _cancel(backend: Backend, source: JobSource, queue: str, cells: Mapping[str, Cell]) -> dict[str, Was]:
    """Carry out the steps after the first one."""
    # Before the second step: a store that keeps no failed messages has none afterwards.
    found = await find_messages(backend, queue, list(cells), source.task)
    by_name: dict[str, list[str]] = {}
    for one, cell in cells.items():
        by_name.setdefault(_read(cell).by, []).append(one)
    results: dict[str, Cancelled] = {}
    for by, ids in by_name.items():
        try:
            only = {one: cells[one] for one in ids}
            results |= {one.id: one for one in await backend.cancel(queue, Selection(ids=ids), by, only)}
        except QueueNotFound:
            break
    was: dict[str, Was] = {}
    for one, cell in cells.items():
        result = results.get(one)
        was[one] = "finished" if result is None else _WAS[result.state]
        if result is not None and (was[one] != "finished" or result.already):
            await _follow(backend, source, queue, cell, result, found.get(one))
        else:
            await backend.cells(queue, [CellOp("delete", cell, cell.version)])
    return was


async def _follow(
    backend: Backend, source: JobSource, queue: str, cell: Cell, cancelled: Cancelled, stored: StoredMessage | None
) -> None:
    """Carry out the third and the fourth step for one message."""
    request = _read(cell)
    ops: list[CellOp] = []
    is_known = True
    if stored is not None:
        opened = source.open(stored.message)
        text = cancelled_text(request.by)
        if opened.task is not None:
            await _report(backend, source, opened.task, stored, text)
        is_known = opened.task is None or opened.task in source.app.registered_tasks
        if isinstance(opened.result, (int, float)):
            result = StoredResult("cancelled", text=text, code=CANCELLED, finished_at=time.time())
            # One more than twice the token: a late result of the same delivery does not replace it.
            ops.append(put_result(cancelled.id, rank_of(cancelled.token) + 1, result, opened.result))
    if is_known:
        ops.append(CellOp("delete", cell, cell.version))
    elif request.token is None:
        kept = msgspec.json.encode(msgspec.structs.replace(request, token=cancelled.token))
        ops.append(CellOp("put", Cell(CANCELS, cell.name, kept), cell.version))
    if ops:
        await backend.cells(queue, ops)


async def _report(backend: Backend, source: JobSource, task: str, stored: StoredMessage, text: str) -> None:
    """Enqueue the call of `on_failure`, if the task has one.

    Raises:
        BackendError: It is not stored.
    """
    try:
        report = source.app._failure_report(  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            task, stored.message, CANCELLED, text
        )
    except Exception:  # noqa: BLE001 - code of the app has raised it
        # A repair would fail again, for ever.
        _log.exception("job %s: the call of on_failure cannot be made", stored.message.id)
        return
    try:
        if report is not None:
            await backend.publish(report[0], (report[1],))
    except UsageError:
        # It can never be stored: it is too large.
        _log.exception("job %s: the call of on_failure cannot be stored", stored.message.id)


async def _remove(backend: Backend, source: JobSource, queue: str, ids: Sequence[str]) -> dict[str, Was]:
    """Remove the messages, on a store that cannot move them to failed whatever worker holds them."""
    found = await find_messages(backend, queue, ids, source.task)
    was: dict[str, Was] = {one: _WAS[found[one].state] if one in found else "finished" for one in ids}
    chosen = [one for one in ids if was[one] != "finished"]
    if not chosen:
        return was
    try:
        await backend.remove(queue, Selection(ids=chosen))
    except NotSupported as error:
        raise NotSupported(f"a job of this store cannot be cancelled: {error}") from error
    return was


def _read(cell: Cell) -> _Request:
    try:
        return msgspec.json.decode(cell.value, type=_Request)
    except msgspec.MsgspecError:
        # Written by a newer release. What it says of the message is in the store.
        return _Request()
