"""The jobs of an app: one by its id, or all in a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any

from qworker.errors import UsageError
from qworker.jobs.cancel import CancelCounts, cancel_jobs
from qworker.jobs.iterate import iterate_sync
from qworker.jobs.job import Job
from qworker.jobs.source import JobApp, JobSource
from qworker.jobs.status import Status, browse_jobs
from qworker.message import State
from qworker.names import check_existing_queue, to_message_id
from qworker.validation import check_text

__all__ = ["cancel_many", "iterate_jobs", "job_of", "jobs_of", "unfinished_states"]

# Jobs that are cancelled at a time.
_BATCH = 100


def job_of(app: JobApp, message_id: str, queue: str, returns: Any) -> Job[Any]:
    """Return the job of an id. See `Tasks.job`."""
    check_existing_queue(check_text("queue", queue))
    return Job(to_message_id(check_text("id", message_id)), queue, None, JobSource(app, None, returns=returns))


async def jobs_of(
    app: JobApp, queues: Sequence[str], states: Sequence[State], task: str | None, queue: str | None
) -> AsyncGenerator[Status]:
    """Yield the status of each job. See `Tasks.jobs`."""
    source = JobSource(app, None)
    async for status in browse_jobs(
        await app.backend(), source, list(queues) if queue is None else [queue], states, task
    ):
        yield status


async def cancel_many(
    app: JobApp, jobs: Iterable[Job[Any]] | None, statuses: AsyncGenerator[Status], by: str
) -> CancelCounts:
    """Cancel jobs, in batches. See `Tasks.cancel`.

    Args:
        app: The app.
        jobs: The jobs. None: those of `statuses`.
        statuses: The jobs that match, if they are not given.
        by: Who cancels them.
    """
    counts: Counter[str] = Counter()
    async for queue, ids in _batches(jobs, statuses):
        was = await cancel_jobs(await app.backend(), JobSource(app, None), queue, ids, by)
        counts.update(was.values())
    return CancelCounts(**counts)


async def _batches(
    jobs: Iterable[Job[Any]] | None, statuses: AsyncGenerator[Status]
) -> AsyncGenerator[tuple[str, list[str]]]:
    """Yield ids, a batch of one queue at a time."""
    queue, ids = "", dict[str, None]()
    async for one in statuses if jobs is None else _each(jobs):
        if ids and (one.queue != queue or len(ids) >= _BATCH):
            yield queue, list(ids)
            ids.clear()
        queue = one.queue
        ids[one.id] = None
    if ids:
        yield queue, list(ids)


async def _each(jobs: Iterable[Job[Any]]) -> AsyncGenerator[Job[Any]]:
    for job in jobs:
        yield job


def unfinished_states(state: str | None) -> list[State]:
    """Return the states whose jobs can be cancelled.

    Raises:
        UsageError: The state is not one of them.
    """
    states = [State.READY, State.DELAYED, State.LEASED]
    if state is None:
        return states
    if State.of_word(state) not in states:
        raise UsageError(f"state must be ready, delayed or leased (got {state!r}): other jobs have ended")
    return [State.of_word(state)]


def iterate_jobs(app: JobApp, statuses: AsyncGenerator[Status]) -> Generator[Status]:
    """Yield the same from code without an event loop."""
    return iterate_sync(app, statuses, "async for status in tasks.jobs(...)")
