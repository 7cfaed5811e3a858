"""Waiting for the end of a job, and for its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from qworker.backend import Backend
from qworker.cell import Cell, CellWatch
from qworker.errors import JobGone, NotSupported
from qworker.failure_text import CANCELLED, code_of, summary, without_code
from qworker.jobs.handler_wait import handler_waits
from qworker.jobs.look import find_message
from qworker.jobs.records import (
    PROGRESS,
    RESULTS,
    AwaitedJob,
    Progress,
    StoredResult,
    get_cell,
    read_progress,
    read_result,
)
from qworker.jobs.source import JobSource
from qworker.message import State, StoredMessage

__all__ = ["follow_progress", "wait_for_result"]

# Seconds between two looks for the message itself. The store looks at the cells, about once a second.
_FIND = 5.0


class _Waiter:
    """Looks at one job."""

    def __init__(self, backend: Backend, source: JobSource, queue: str, message_id: str) -> None:
        self._backend = backend
        self._source = source
        self._queue = queue
        self._id = message_id
        self._version = ""
        # The version of a result from before the message was enqueued again, or requeued.
        self._stale: str | None = None

    async def result(self) -> StoredResult | None:
        """Return the end of the job from its cell."""
        (reply,) = await self._backend.cells(self._queue, [get_cell(RESULTS, self._id)])
        self._version = "" if reply.cell is None else reply.cell.version
        return None if self._version == self._stale else read_result(reply.cell)

    async def waits_again(self) -> bool:
        """Return whether the message has not started, so that the result is of an earlier one with its id."""
        found = await find_message(self._backend, self._queue, self._id, self._source.task)
        if found is None or found.state not in {State.READY, State.DELAYED}:
            return False
        self._stale = self._version
        return True

    async def stored_end(self) -> StoredResult | None:
        """Return the end of a job that has no cell, or None if its message still waits or runs.

        Raises:
            JobGone: Neither the message nor its result is stored.
            UsageError: The results of its task are not kept.
        """
        found = await find_message(self._backend, self._queue, self._id, self._source.task)
        if found is not None and found.state not in {State.FAILED, State.DONE}:
            self._source.check_kept(self._source.open(found.message))
            return None
        # The result is stored before the message ends, so it is there now if there is one.
        record = await self.result()
        if record is not None:
            return record
        if found is None:
            raise JobGone(
                f"job {self._id} is not stored in queue {self._queue}: its result has expired, or it was removed"
            )
        self._source.check_kept(self._source.open(found.message))
        if found.state is State.DONE:
            raise JobGone(f"job {self._id} is done, and its result has expired")
        return failed_result(found)

    async def sleep(self, seconds: float) -> None:
        """Wait until the cell may have changed."""
        watch = CellWatch(self._queue, RESULTS, self._id, self._version)
        await self._backend.wait((), seconds, cells=(watch,))


def failed_result(stored: StoredMessage) -> StoredResult:
    """Return the end of a message that failed, from the message itself."""
    error = stored.error or ""
    if code_of(error) == CANCELLED:
        return StoredResult("cancelled", text=error, code=CANCELLED, finished_at=stored.finished_at)
    kind = summary(error).partition(":")[0]
    return StoredResult(
        "failed",
        error_type=kind if kind.isidentifier() else "",
        text=without_code(error),
        code=code_of(error) or "error",
        finished_at=stored.finished_at,
    )


def _check_cells(backend: Backend, what: str) -> None:
    reason = backend.deviations.get("cells")
    if reason is not None:
        scheme = backend.describe().partition(":")[0]
        raise NotSupported(f"{scheme}: does not support {what} ({reason}): use file: or redis:")


async def wait_for_result(
    backend: Backend, source: JobSource, queue: str, message_id: str, timeout: float | None
) -> StoredResult:
    """Wait for the end of a job.

    Raises:
        TimeoutError: It has not come within `timeout` seconds.
        JobGone: Neither the message nor its result is stored.
        UsageError: The results of its task are not kept.
        NotSupported: The store has no place for results.
    """
    _check_cells(backend, "results")
    waiter = _Waiter(backend, source, queue, message_id)
    record = await waiter.result()
    if record is not None and not await waiter.waits_again():
        return record
    now = asyncio.get_running_loop().time
    end = None if timeout is None else now() + timeout
    with handler_waits(AwaitedJob(queue, message_id)):
        next_find = now()
        while True:
            if now() >= next_find:
                record = await waiter.stored_end()
                if record is not None:
                    return record
                next_find = now() + _FIND
            if end is not None and now() >= end:
                raise TimeoutError(f"job {message_id} has not ended within {timeout:g} seconds")
            await waiter.sleep(max(0.0, min(next_find, end or next_find) - now()))
            record = await waiter.result()
            if record is not None:
                return record


async def follow_progress(backend: Backend, source: JobSource, queue: str, message_id: str) -> AsyncGenerator[Progress]:
    """Yield each new progress of a job until it has ended. Progress that is replaced quickly is left out."""
    _check_cells(backend, "progress")
    now = asyncio.get_running_loop().time
    last: Cell | None = None
    shown: Progress | None = None
    next_find = now()
    while True:
        replies = await backend.cells(queue, [get_cell(PROGRESS, message_id), get_cell(RESULTS, message_id)])
        cell, ended = replies[0].cell, replies[1].cell is not None
        progress = read_progress(cell)
        if progress is not None and progress.progress != shown:
            shown = progress.progress
            yield shown
        # Its settlement deletes the progress of a job without a result.
        if cell is None and last is not None:
            next_find = now()
        last = cell
        if now() >= next_find or ended:
            found = await find_message(backend, queue, message_id, source.task)
            if found is None or found.state in {State.FAILED, State.DONE}:
                # The last progress is stored with the end, which may have come after the look above.
                (reply,) = await backend.cells(queue, [get_cell(PROGRESS, message_id)])
                progress = read_progress(reply.cell)
                if progress is not None and progress.progress != shown:
                    yield progress.progress
                return
            next_find = now() + _FIND
        version = "" if cell is None else cell.version
        result_version = "" if replies[1].cell is None else replies[1].cell.version
        watches = (
            CellWatch(queue, PROGRESS, message_id, version),
            CellWatch(queue, RESULTS, message_id, result_version),
        )
        # Only here: between two values the caller's code runs.
        with handler_waits(AwaitedJob(queue, message_id)):
            await backend.wait((), max(0.0, next_find - now()), cells=watches)
