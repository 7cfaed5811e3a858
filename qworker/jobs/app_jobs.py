"""The jobs of an app: one by its id, or all in a state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from qworker.jobs.iterate import iterate_sync
from qworker.jobs.job import Job
from qworker.jobs.source import JobApp, JobSource
from qworker.jobs.status import Status, browse_jobs
from qworker.message import State
from qworker.names import check_existing_queue, to_message_id
from qworker.validation import check_text

__all__ = ["iterate_jobs", "job_of", "jobs_of"]


def job_of(app: JobApp, message_id: str, queue: str, returns: Any) -> Job[Any]:
    """Return the job of an id. See `Tasks.job`."""
    check_existing_queue(check_text("queue", queue))
    return Job(to_message_id(check_text("id", message_id)), queue, None, JobSource(app, None, returns=returns))


async def jobs_of(
    app: JobApp, queues: Sequence[str], state: str | None, task: str | None, queue: str | None
) -> AsyncGenerator[Status]:
    """Yield the status of each job. See `Tasks.jobs`."""
    states = list(State) if state is None else [State.of_word(state)]
    source = JobSource(app, None)
    async for status in browse_jobs(
        await app.backend(), source, list(queues) if queue is None else [queue], states, task
    ):
        yield status


def iterate_jobs(app: JobApp, statuses: AsyncGenerator[Status]) -> Generator[Status]:
    """Yield the same from code without an event loop."""
    return iterate_sync(app, statuses, "async for status in tasks.jobs(...)")
