"""The jobs that run now and have reported progress."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qworker.backend import Backend
from qworker.failures.groups import task_of
from qworker.jobs.kept import used_groups
from qworker.jobs.records import PROGRESS, Progress, get_cell, read_progress
from qworker.message import StoredMessage
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["RunningJob", "read_running"]


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose handler runs and has reported progress."""

    queue: str
    id: str
    # None: the message is raw.
    task: str | None
    progress: Progress
    # Unix seconds at which its handler started. None: it is not known.
    started_at: float | None = None


async def read_running(backend: Backend, queue: str, leases: Sequence[StoredMessage]) -> list[RunningJob]:
    """Return which of the leased messages of a queue have reported progress. Where none has, that is one look."""
    try:
        if not leases or PROGRESS not in await used_groups(backend, queue):
            return []
        replies = await backend.cells(queue, [get_cell(PROGRESS, lease.message.id) for lease in leases])
    except BACKEND_ERRORS:
        # What else is known is shown without progress, such as that of another user's queue.
        return []
    found: list[RunningJob] = []
    for lease, reply in zip(leases, replies, strict=True):
        stored = read_progress(reply.cell)
        if stored is not None:
            job = RunningJob(
                queue=queue,
                id=lease.message.id,
                task=task_of(lease.message),
                progress=stored.progress,
                started_at=stored.started_at,
            )
            found.append(job)
    return found
