"""The contents of a report: counts, percentiles and series. Their size is bounded, however long the history is."""

from __future__ import annotations

import msgspec

__all__ = ["Depth", "Failures", "Percentiles", "QueueTotals", "Report", "TaskTimes", "TimeStep", "WorkerShare"]


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a time, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


class QueueTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one queue between `since` and `until`.

    Attributes:
        queue: The queue.
        enqueued: Messages that were enqueued.
        done: Messages that were acked.
        failed: Messages that failed.
        open: Messages that were neither done nor failed at `until`, whenever they were enqueued.
        runs: Runs of handlers.
        retried: Runs that were retried.
        released: Runs that were released.
        lost: Runs whose lease was lost.
        per_second: Messages done per second of the report's span.
    """

    queue: str
    enqueued: int
    done: int
    failed: int
    open: int
    runs: int
    retried: int
    released: int
    lost: int
    per_second: float


class TaskTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long one task's messages waited and ran.

    Attributes:
        queue: The queue.
        task: The name of the task; None for raw messages.
        done: Messages that were acked.
        failed: Messages that failed.
        begun: Messages that began.
        wait: Seconds from the enqueueing of these messages to their beginning, including a requested delay.
        runs: Runs whose duration is known.
        run: Seconds that these runs took.
    """

    queue: str
    task: str | None
    done: int
    failed: int
    begun: int
    wait: Percentiles | None
    runs: int
    run: Percentiles | None


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of error of one task. Errors that differ only in numbers and quoted text are one kind.

    Attributes:
        queue: The queue.
        task: The name of the task; None for raw messages.
        error: The error without numbers and quoted text.
        example: One of the errors as it was written.
        failed: Messages that failed permanently.
        retried: Runs that were retried.
    """

    queue: str
    task: str | None
    error: str
    example: str
    failed: int
    retried: int


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one worker."""

    worker: str
    runs: int
    failed: int
    busy_s: float


class TimeStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of time, over all queues.

    Attributes:
        at: When it begins, in Unix seconds.
        enqueued: Messages that were enqueued.
        done: Messages that were acked.
        failed: Messages that failed.
        retried: Runs that were retried.
        wait: Seconds that the messages waited which began in it.
        run: Seconds that the runs took which finished in it.
    """

    at: float
    enqueued: int
    done: int
    failed: int
    retried: int
    wait: Percentiles | None
    run: Percentiles | None


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """The number of open messages of a queue at the end of each step of time."""

    queue: str
    counts: list[int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's history in numbers.

    Attributes:
        source: The archive's path or the store's URL, without its password.
        made_at: When the report was made, in Unix seconds.
        since: When it begins, in Unix seconds.
        until: When it ends, in Unix seconds.
        step_s: The length of a step of `moments`, in seconds.
        queues: The counts of each queue.
        tasks: The times of each task.
        failures: The kinds of errors.
        workers: The work of each worker.
        moments: The steps of time.
        depths: The open messages of each queue.
    """

    source: str
    made_at: float
    since: float
    until: float
    step_s: float
    queues: list[QueueTotals]
    tasks: list[TaskTimes]
    failures: list[Failures]
    workers: list[WorkerShare]
    moments: list[TimeStep]
    depths: list[Depth]

    @property
    def span_s(self) -> float:
        """The seconds that the report covers."""
        return self.until - self.since
