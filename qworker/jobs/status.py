"""The status of a job: one look at its message and its cells."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from qworker.backend import Backend
from qworker.cell import CellReply
from qworker.errors import QueueNotFound
from qworker.failure_text import code_of, without_code
from qworker.jobs.look import find_message
from qworker.jobs.records import (
    PROGRESS,
    RESULTS,
    Progress,
    StoredProgress,
    StoredResult,
    get_cell,
    read_progress,
    read_result,
)
from qworker.jobs.source import JobSource
from qworker.message import Query, State, StoredMessage

__all__ = ["JobState", "Status", "browse_jobs", "job_status"]

JobState: TypeAlias = Literal["ready", "delayed", "leased", "parked", "done", "failed", "gone"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a job at one moment.

    Attributes:
        id: The message's id.
        queue: The message's queue.
        task: The task's name. None: it is not known, or the message is raw.
        args: The positional arguments, as the handler gets them. As JSON if this app does not know the task.
        kwargs: The arguments by name.
        state: The state of the message. `done`: the message or its result is kept. `gone`: neither is.
        code: Why a failed job failed: `error`, `timeout`, `poison`, `arguments`, `expired` or `cancelled`.
        tries: Failed attempts so far.
        max_tries: The call's or the task's `max_tries`. None: there is no limit, or this app does not know it.
        enqueued_at: When the call was enqueued.
        due_at: When a delayed job can run.
        started_at: When the handler of the last attempt started. None: it did not, or it is not known.
        finished_at: When a done or failed job ended.
        holder: The worker that runs a leased job.
        progress: The last progress that the handler has reported.
        error: The last error.
    """

    id: str
    queue: str
    task: str | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = {}
    state: JobState = "gone"
    code: str | None = None
    tries: int = 0
    max_tries: int | None = None
    enqueued_at: datetime | None = None
    due_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    holder: str | None = None
    progress: Progress | None = None
    error: str | None = None


async def job_status(backend: Backend, source: JobSource, queue: str, message_id: str) -> Status:
    """Look at a job."""
    found = await find_message(backend, queue, message_id, source.task)
    record, progress = (await _records(backend, queue, [message_id]))[0]
    if found is None and record is not None and record.state in {"done", "too_big", "not_encodable"}:
        # Its end may have come between the two looks.
        found = await find_message(backend, queue, message_id, source.task)
    if found is not None:
        return _of_message(source, found, record, progress)
    return _of_record(source, queue, message_id, record, progress)


async def browse_jobs(
    backend: Backend, source: JobSource, queues: Sequence[str], states: Sequence[State], task: str | None
) -> AsyncGenerator[Status]:
    """Yield the jobs in these states, each at most once while it stays where it is."""
    for queue in queues:
        for state in states:
            try:
                async for page in backend.browse(queue, Query(state)):
                    shown = [one for one in page if task is None or source.open(one.message).task == task]
                    records = await _records(backend, queue, [one.message.id for one in shown])
                    for stored, (record, progress) in zip(shown, records, strict=True):
                        yield _of_message(source, stored, record, progress)
            except QueueNotFound:
                # No worker and no publisher has used it yet.
                break


async def _records(
    backend: Backend, queue: str, ids: Sequence[str]
) -> list[tuple[StoredResult | None, StoredProgress | None]]:
    if "cells" in backend.deviations or not ids:
        return [(None, None)] * len(ids)
    ops = [get_cell(group, one) for one in ids for group in (RESULTS, PROGRESS)]
    replies: list[CellReply] = await backend.cells(queue, ops)
    return [(read_result(replies[n].cell), read_progress(replies[n + 1].cell)) for n in range(0, len(replies), 2)]


def _of_message(
    source: JobSource, stored: StoredMessage, record: StoredResult | None, progress: StoredProgress | None
) -> Status:
    message = stored.message
    opened = source.open(message)
    failed = stored.state is State.FAILED
    over = failed or stored.state is State.DONE
    started_at = record.started_at if over and record is not None else None
    if started_at is None and progress is not None:
        started_at = progress.started_at
    return Status(
        id=message.id,
        queue=message.queue,
        task=opened.task,
        args=opened.args,
        kwargs=opened.kwargs,
        state=_WORDS[stored.state],
        code=_code(stored.error, record) if failed else None,
        tries=message.tries,
        max_tries=opened.max_tries,
        enqueued_at=_moment(message.enqueued_at),
        due_at=_moment(stored.due_at),
        started_at=_moment(started_at),
        finished_at=_moment(stored.finished_at),
        holder=stored.holder,
        progress=None if progress is None else progress.progress,
        error=None if stored.error is None else without_code(stored.error),
    )


def _of_record(
    source: JobSource,
    queue: str,
    message_id: str,
    record: StoredResult | None,
    progress: StoredProgress | None,
) -> Status:
    if record is None:
        return Status(id=message_id, queue=queue, task=source.task)
    failed = record.state in {"failed", "cancelled"}
    return Status(
        id=message_id,
        queue=queue,
        task=source.task,
        state="failed" if failed else "done",
        code=_code(None, record) if failed else None,
        started_at=_moment(record.started_at),
        finished_at=_moment(record.finished_at),
        progress=None if progress is None else progress.progress,
        error=without_code(record.text) if failed else None,
    )


_WORDS: dict[State, JobState] = {
    State.READY: "ready",
    State.LEASED: "leased",
    State.DELAYED: "delayed",
    State.DONE: "done",
    State.FAILED: "failed",
}


def _code(error: str | None, record: StoredResult | None) -> str:
    """Return why a message failed."""
    if record is not None and record.state in {"failed", "cancelled"}:
        return "cancelled" if record.state == "cancelled" else record.code
    return code_of(error) or "error"


def _moment(seconds: float | None) -> datetime | None:
    return None if not seconds else datetime.fromtimestamp(seconds, UTC)
