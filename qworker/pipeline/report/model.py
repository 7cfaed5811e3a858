"""What a report says: counts, percentiles and series, bounded in size however long the history is."""

from __future__ import annotations

import msgspec

__all__ = ["Depth", "Failures", "Percentiles", "QueueTotals", "Report", "TaskTimes", "TimeStep", "WorkerShare"]


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """How a time is spread, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


class QueueTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one queue between `since` and `until`."""

    queue: str
    enqueued: int
    done: int
    failed: int
    # Neither done nor failed at `until`, whenever they were enqueued.
    open: int
    # Runs of handlers, and how those ended that did not end their message.
    runs: int
    retried: int
    released: int
    lost: int
    # Messages done per second of the report's span.
    per_second: float


class TaskTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long one task's messages waited and ran. `task` is None for raw messages."""

    queue: str
    task: str | None
    done: int
    failed: int
    # Messages that began, and how long they had waited since they were enqueued; a delay that was asked for is in it.
    begun: int
    wait: Percentiles | None
    # Runs whose length is known.
    runs: int
    run: Percentiles | None


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of error of one task: errors that differ in nothing but numbers and quoted text are one kind."""

    queue: str
    task: str | None
    error: str
    # One of them, as it was written.
    example: str
    # Messages that failed for good, and runs that were tried again.
    failed: int
    retried: int


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did."""

    worker: str
    runs: int
    failed: int
    busy_s: float


class TimeStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of time, over all queues. `at` is its beginning, in Unix seconds."""

    at: float
    enqueued: int
    done: int
    failed: int
    retried: int
    # Of the messages that began in it, and of the runs that ended in it.
    wait: Percentiles | None
    run: Percentiles | None


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages of a queue were open at the end of each step of time."""

    queue: str
    counts: list[int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's history in figures."""

    # The archive's path or the queue's URL, without its password.
    source: str
    # Unix seconds.
    made_at: float
    since: float
    until: float
    # The length of a step of `moments`, in seconds.
    step_s: float
    queues: list[QueueTotals]
    tasks: list[TaskTimes]
    failures: list[Failures]
    workers: list[WorkerShare]
    moments: list[TimeStep]
    depths: list[Depth]

    @property
    def span_s(self) -> float:
        """Seconds that the report covers."""
        return self.until - self.since
