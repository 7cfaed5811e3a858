"""What workers do with messages, from the columns of the history: no object is made of an event."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import cast

import msgspec

from qworker.history.batch import EventBatch
from qworker.history.event import Kind
from qworker.history.store import HistoryStore
from qworker.sampling.errors import RecentErrors
from qworker.sampling.snapshot import FlowRates, Percentiles, WorkerSeen
from qworker.worker.metrics import SECONDS

__all__ = ["Flow", "HistoryFlow", "Period", "percentiles"]

_PAGE = 1000
# Tasks of one queue that are told apart. Names of messages that no handler knows are in the history too.
_MOST_TASKS = 200
# Workers that are remembered.
_MOST_WORKERS = 1000
# The outcomes that are counted, which are kinds of events.
_OUTCOMES = frozenset({"acked", "failed", "retried", "lost"})


class Flow(msgspec.Struct):
    """What happened to messages since some moment.

    Attributes:
        waits: Times from the publish to the first lease: their number in each bucket of `SECONDS`.
        runs: Times in the handler, in the same way.
    """

    acked: int = 0
    failed: int = 0
    retried: int = 0
    lost: int = 0
    waits: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    runs: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS) + 1))

    def count(self, kind: Kind, number: int, waits: Iterable[float | None], runs: Iterable[int | None]) -> None:
        """Count one transition of some messages.

        Args:
            kind: The transition.
            number: The number of messages.
            waits: Seconds from the publish to the first lease of each, as far as known.
            runs: Microseconds in the handler of each.
        """
        for wait in waits:
            if wait is not None:
                self.waits[bisect_left(SECONDS, wait)] += 1
        if kind not in _OUTCOMES:
            return
        setattr(self, kind, getattr(self, kind) + number)
        for run in runs:
            if run is not None:
                self.runs[bisect_left(SECONDS, run / 1e6)] += 1

    def add(self, other: Flow) -> None:
        """Add what another flow counts."""
        for name in _OUTCOMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waits = [a + b for a, b in zip(self.waits, other.waits, strict=True)]
        self.runs = [a + b for a, b in zip(self.runs, other.runs, strict=True)]


def percentiles(buckets: list[int]) -> Percentiles | None:
    """Return the percentiles of a histogram with the buckets of `SECONDS`, or None if it is empty.

    Within a bucket the values are taken as evenly spread. What is larger than the last bound counts as that bound.
    """
    total = sum(buckets)
    return Percentiles(*[_percentile(buckets, total * share) for share in (0.5, 0.95, 0.99)]) if total else None


def _percentile(buckets: list[int], rank: float) -> float:
    below, lower = 0.0, 0.0
    for count, upper in zip(buckets, SECONDS, strict=False):
        if count and below + count >= rank:
            return lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return SECONDS[-1]


class Period(msgspec.Struct):
    """What the history got between two reads.

    Attributes:
        began: Monotonic seconds of the first read.
        ended: Monotonic seconds of the second one.
        flows: By queue and task.
        workers: The workers that recorded an event, by queue.
    """

    began: float
    ended: float
    flows: dict[str, dict[str, Flow]] = {}
    workers: dict[str, set[str]] = {}

    def count(self, batch: EventBatch) -> None:
        """Count a batch."""
        self.workers.setdefault(batch.queue, set()).add(batch.worker)
        waits, runs = _waits(batch), batch.column(batch.duration_us)
        if not isinstance(batch.task, list):
            self._flow(batch.queue, batch.task).count(batch.kind, len(batch.id), waits, runs)
            return
        tasks: Iterable[str | None] = batch.column(batch.task)
        for task, wait, run in zip(tasks, waits, runs, strict=False):
            self._flow(batch.queue, task).count(batch.kind, 1, (wait,), (run,))

    def _flow(self, queue: str, task: str | None) -> Flow:
        tasks = self.flows.setdefault(queue, {})
        known = task if task is not None and (task in tasks or len(tasks) < _MOST_TASKS) else ""
        return tasks.setdefault(known, Flow())


def _waits(batch: EventBatch) -> Iterable[float | None]:
    """Return the seconds from the publish to the first lease of each message. None: the batch does not say it."""
    if batch.kind != "leased" and not batch.begins:
        return repeat(None, len(batch.id))
    at: float | list[float | None] | None = cast("float", batch.at) if batch.kind == "leased" else batch.leased_at
    leased = batch.column(at)
    rows = zip(leased, batch.column(batch.enqueued_at), batch.column(batch.tries), strict=False)
    return [None if at is None or since is None or tries else max(0.0, at - since) for at, since, tries in rows]


class HistoryFlow:
    """Follows the logs of a history from their ends.

    Args:
        history: The history. If it is not enabled here, other processes may still write it.
        queues: The queues that are of interest. None: all.
        kept_s: Seconds for which periods are kept.

    Attributes:
        errors: The errors of the last hour.
    """

    def __init__(self, history: HistoryStore, queues: Sequence[str] | None, kept_s: float) -> None:
        self._history = history
        self._queues = queues
        self._kept_s = kept_s
        # The position in each log. None before the first read.
        self._ends: dict[str, str | None] | None = None
        self._read_at = 0.0
        self._periods: deque[Period] = deque()
        # The queues of each worker, with the Unix seconds of the last event of each. Who was seen last is at the end.
        self._workers: dict[str, dict[str, float]] = {}
        self.errors = RecentErrors()

    @property
    def enabled(self) -> bool:
        """Whether there is a history to follow."""
        return self._history.enabled

    async def follow(self, now: float) -> Period:
        """Count what the history got since the last call. The first call only finds the ends of the logs.

        Args:
            now: Monotonic seconds.

        Returns:
            What was counted.

        Raises:
            BackendError: It cannot be read.
        """
        self.errors.begin(now)
        logs = await (self._history.logs() if self._queues is None else self._history.logs_of(self._queues))
        if self._ends is None:
            self._ends = {log: await self._history.last_position(log) for log in logs}
            self._read_at = now
            return Period(now, now, {}, {})
        # Logs that are gone are forgotten.
        self._ends = {log: end for log, end in self._ends.items() if log in logs}
        period = Period(self._read_at, now, {}, {})
        self._read_at = now
        self._periods.append(period)
        while self._periods[0].ended <= now - self._kept_s:
            self._periods.popleft()
        for log in logs:
            await self._count_log(log, period)
        return period

    async def _count_log(self, log: str, period: Period) -> None:
        """Count what one log got. The log of a new worker is read from its beginning."""
        assert self._ends is not None
        while True:
            # The position moves with each page: if the next one cannot be read, this one is not counted again.
            batches, self._ends[log] = await self._history.read_batches(log, self._ends.get(log), _PAGE)
            if not batches:
                return
            for batch in batches:
                period.count(batch)
                self.errors.count(batch)
                self._see(batch)

    def _see(self, batch: EventBatch) -> None:
        queues = self._workers.pop(batch.worker, {})
        queues[batch.queue] = max(queues.get(batch.queue, 0.0), batch.last_at)
        self._workers[batch.worker] = queues
        while len(self._workers) > _MOST_WORKERS:
            del self._workers[next(iter(self._workers))]

    def workers(self, since: float) -> list[WorkerSeen]:
        """Return the workers that have recorded an event since a moment in Unix seconds, by name."""
        found = [WorkerSeen(name, sorted(queues), max(queues.values())) for name, queues in self._workers.items()]
        return sorted((one for one in found if one.at >= since), key=lambda one: one.worker)

    def rates(self, queue: str, at: float) -> tuple[FlowRates | None, dict[str, FlowRates]]:
        """Return the rates of a queue and of each of its tasks over the kept periods. None: there is none yet.

        Args:
            queue: The queue.
            at: Unix seconds of the last read.
        """
        seconds = self._read_at - self._periods[0].began if self._periods else 0.0
        if seconds <= 0:
            return None, {}
        workers: set[str] = set()
        tasks: dict[str, Flow] = {}
        whole = Flow()
        for period in self._periods:
            workers |= period.workers.get(queue, set())
            for task, flow in period.flows.get(queue, {}).items():
                tasks.setdefault(task, Flow()).add(flow)
                whole.add(flow)
        return _rates(whole, at, seconds, len(workers)), {
            task: _rates(flow, at, seconds, 0) for task, flow in sorted(tasks.items())
        }


def _rates(flow: Flow, at: float, seconds: float, workers: int) -> FlowRates:
    return FlowRates(
        at=at,
        period_s=seconds,
        acked=flow.acked / seconds,
        failed=flow.failed / seconds,
        retried=flow.retried / seconds,
        lost=flow.lost / seconds,
        wait=percentiles(flow.waits),
        run=percentiles(flow.runs),
        workers=workers,
    )
