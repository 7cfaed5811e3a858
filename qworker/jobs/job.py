"""The job handle: what a producer can do with a call after it was enqueued."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, TypeVar

import msgspec

from qworker.duration import Seconds
from qworker.errors import UsageError
from qworker.jobs.cancel import Was, cancel_jobs
from qworker.jobs.iterate import iterate_sync
from qworker.jobs.records import Progress
from qworker.jobs.source import JobSource
from qworker.jobs.status import Status, job_status
from qworker.jobs.waiting import follow_progress, wait_for_result
from qworker.retry import MOST_DELAY
from qworker.validation import check_seconds

__all__ = ["Job"]

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Job(msgspec.Struct, Generic[T_co], frozen=True, eq=False):
    """An enqueued call. `enqueue` returns it, and `task.job(id)` and `tasks.job(id)` make it from the id alone.

    Attributes:
        id: The message's id. While the message is stored, to enqueue again with this id stores nothing. When the
            message is done, its id is free again, unless the store keeps done messages (the URL option `keep_done`),
            or `hold=` keeps it taken.
            With `using(unique_key=...)` it is the id of the call that already waits or runs, if there is one.
        queue: The message's queue.
        existed: Whether nothing new was stored, because a message with the id or the unique key was there. None: it is
            not known, or the call is sent later (`Tasks.buffered`, `enqueue_on_commit`). It is not known of a call with
            `using(id=...)`: a store says only that a message with this id is stored. Of a call with a unique key too,
            it is True if another message has the key.
    """

    id: str
    queue: str
    existed: bool | None = None
    _source: JobSource | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same message."""
        return isinstance(other, Job) and (self.id, self.queue) == (other.id, other.queue)

    def __hash__(self) -> int:
        """Return a hash of the message."""
        return hash((self.id, self.queue))

    def __repr__(self) -> str:
        """Return the id and the queue."""
        return f"Job(id={self.id!r}, queue={self.queue!r})"

    def _bound(self) -> JobSource:
        if self._source is None:
            raise UsageError("this job belongs to no app: make it with task.job(id) or tasks.job(id)")
        return self._source

    # -- the result --------------------------------------------------------------------------------------------------

    async def result(self, timeout: Seconds | None = None) -> T_co:
        """Wait for the job and return what its handler returned.

        In a handler, the worker runs other messages meanwhile.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit.

        Raises:
            TimeoutError: The job has not ended in this time. It is not changed.
            JobFailed: Its message failed.
            JobCancelled: Its message was cancelled.
            JobGone: Neither the message nor its result is stored.
            ResultTooBig, ResultNotEncodable: It is done, and its value could not be kept.
            UsageError: The task keeps no results, or too many handlers of this worker wait for other jobs.
            BackendError: The store could not be asked.
        """
        source = self._bound()
        source.check_kept()
        seconds = None if timeout is None else check_seconds("timeout", timeout, most=MOST_DELAY)
        backend = await source.app.backend()
        record = await wait_for_result(backend, source, self.queue, self.id, seconds)
        value: T_co = source.value_of(self.id, record)
        return value

    def result_sync(self, timeout: Seconds | None = None) -> T_co:
        """Wait for the job and return what its handler returned, from code without an event loop. See `result`.

        Raises:
            UsageError: An event loop is running in this thread: await `result` there.
        """
        return _run_sync(self._bound(), self.result(timeout), "await job.result()")

    # -- the status --------------------------------------------------------------------------------------------------

    async def status(self) -> Status:
        """Look at the job. The look costs the same however many messages wait."""
        source = self._bound()
        return await job_status(await source.app.backend(), source, self.queue, self.id)

    def status_sync(self) -> Status:
        """Look at the job from code without an event loop. See `status`."""
        return _run_sync(self._bound(), self.status(), "await job.status()")

    async def cancel(self, *, by: str = "") -> Was:
        """Cancel the job: its message fails with the code `cancelled`, whether it waits or runs.

        A running handler is stopped within about a second: an `async def` handler gets `CancelledError`, a process is
        killed, and a thread can ask `Context.cancelled`.

        Args:
            by: The user or program that cancels it, for the reason that is kept with the message.

        Returns:
            `waiting` or `running`: the state before. `finished`: it had ended, or is not stored, and is not changed.

        Raises:
            NotSupported: The store can neither cancel nor remove messages.
        """
        source = self._bound()
        was = await cancel_jobs(await source.app.backend(), source, self.queue, [self.id], by)
        return was[self.id]

    def cancel_sync(self, *, by: str = "") -> Was:
        """Cancel the job from code without an event loop. See `cancel`."""
        return _run_sync(self._bound(), self.cancel(by=by), "await job.cancel()")

    # -- the progress ------------------------------------------------------------------------------------------------

    async def progress(self) -> AsyncGenerator[Progress]:
        """Yield each new progress that the handler reports, until the job has ended.

        Progress is stored at most twice a second, so values in between are left out.

        Raises:
            NotSupported: The store has no place for progress.
        """
        source = self._bound()
        async for progress in follow_progress(await source.app.backend(), source, self.queue, self.id):
            yield progress

    def progress_sync(self) -> Generator[Progress]:
        """Yield each new progress from code without an event loop. See `progress`."""
        source = self._bound()
        return iterate_sync(source.app, self.progress(), "async for progress in job.progress()")


def _run_sync(source: JobSource, coroutine: Coroutine[Any, Any, R], instead: str) -> R:
    return source.app._run_sync(coroutine, instead=instead)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
