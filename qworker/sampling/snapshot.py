"""What a sampler knows at one moment. Each group of numbers has its time, and says whether it is exact."""

from __future__ import annotations

import msgspec

from qworker.backend.offers import QueueCount
from qworker.message import QueueStats

__all__ = ["Counted", "FlowRates", "Percentiles", "QueueSnapshot", "StoreSnapshot", "WorkerSeen"]


class Percentiles(msgspec.Struct, frozen=True, gc=False):
    """Seconds that half, 95 % and 99 % of the messages took at most, to the accuracy of the histogram's buckets."""

    p50: float
    p95: float
    p99: float


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a queue, counted at one moment.

    Attributes:
        at: Unix seconds at which the count began. The numbers are not older.
        count: The counts. Those of a store that counts at once have no tasks and no ids.
        oldest_at: Unix seconds at which the oldest ready message was enqueued. None: no message is ready.
        backlog_rate: The growth of the number of ready, leased and delayed messages per second, between this count and
            an earlier one. It is negative if they become fewer. None: there is no earlier one.
    """

    at: float
    count: QueueCount
    oldest_at: float | None = None
    backlog_rate: float | None = None

    @property
    def exact(self) -> bool:
        """False if messages moved during the count, so that some may be missing or counted twice."""
        return self.count.exact

    def stats_at(self, now: float) -> QueueStats:
        """Return the counts, with the age of the oldest message at a moment in Unix seconds."""
        age = None if self.oldest_at is None else max(0.0, now - self.oldest_at)
        return msgspec.structs.replace(self.count.stats, oldest_age_s=age)


class FlowRates(msgspec.Struct, frozen=True, kw_only=True):
    """What workers have done with messages lately, from the history. Rates are in messages per second.

    Attributes:
        at: Unix seconds at which the history was read.
        period_s: Seconds before `at` over which the rates are averages.
        acked: Acked messages.
        failed: Failed messages.
        retried: Attempts that failed and are repeated.
        lost: Leases that ended without an outcome.
        wait: Time from the publish to the first lease. None: no message was leased.
        run: Time in the handler. None: no handler ended.
        workers: Workers that have recorded an event in the period. 0 in the flow of one task.
    """

    at: float
    period_s: float
    acked: float
    failed: float
    retried: float
    lost: float
    wait: Percentiles | None = None
    run: Percentiles | None = None
    workers: int = 0


class WorkerSeen(msgspec.Struct, frozen=True):
    """A worker that has recorded events.

    Attributes:
        worker: Its name: the host and the process id.
        queues: The queues of the events, sorted.
        at: Unix seconds of the last one, by the clock of the worker.
    """

    worker: str
    queues: list[str]
    at: float


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One queue.

    Attributes:
        queue: Its name.
        counted: Its counts. None: it was not counted yet.
        flow: Its rates. None: the store keeps no history, or there is no period yet.
        tasks: The rates of each task. "" is for messages without a task.
        problem: Why the queue cannot be used now. The counts are those from before.
    """

    queue: str
    counted: Counted | None = None
    flow: FlowRates | None = None
    tasks: dict[str, FlowRates] = {}
    problem: str | None = None


class StoreSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All queues of a sampler.

    Attributes:
        at: Unix seconds at which it was made.
        queues: The queues, sorted by name. A queue that does not exist is left out.
        workers: The workers that the history has seen since the sampler began, in the last hour at most, by name.
        has_history: Whether there is a history to follow. If there is, rates are known from the second sample on.
        problem: Why the store cannot be asked now. The queues are those from before.
        samples_problem: Why the samples are kept in the memory of this process only. None: they are stored, or the
            store does not offer it.
    """

    at: float
    queues: list[QueueSnapshot]
    workers: list[WorkerSeen] = []
    has_history: bool = True
    problem: str | None = None
    samples_problem: str | None = None
