"""Samples of the queues of a backend, and the rates between them, for `qworker top`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from qworker.backend import Backend
from qworker.backend.each_queue import count_queues, describe_problem
from qworker.backend.listing import list_messages
from qworker.cli.schedules import read_all
from qworker.cli.top.history_rates import HistoryRates
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.envelope import Envelope, open_envelope
from qworker.errors import QueueNotFound
from qworker.health.probe import fetch_page
from qworker.jobs.kept import used_groups
from qworker.jobs.records import PROGRESS, Progress, get_cell, read_progress
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.logs import one_line
from qworker.message import Query, QueueStats, State, StoredMessage
from qworker.parcel import unpack
from qworker.schedules.code import supports_schedules
from qworker.schedules.store import ScheduleStatus
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["Row", "RunningJob", "Sample", "Sampler", "WorkerTotals"]

# Rates are averages over this number of seconds, or since the first sample.
_WINDOW_S = 10.0
# The maximum number of leases whose holders are read.
_MOST_LEASES = 500
_HEALTH_PATIENCE_S = 2.0
_OK = 200


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One queue at one moment. Rates are in messages per second. None: the rate is not known, or not yet."""

    queue: str
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    failed: int = 0
    # Seconds that the oldest ready message has waited. None if no message is ready.
    oldest_age_s: float | None = None
    # The number of workers that hold a lease of this queue, or have recorded an event lately.
    workers: int = 0
    paused: bool = False
    # The number of messages that cannot be leased.
    blocked: int = 0
    # Why the queue cannot be used, and its counts are not known.
    problem: str | None = None
    # The growth of the number of ready, leased and delayed messages. It is negative if they become fewer.
    backlog_rate: float | None = None
    # From the health ports of the workers if they are given, otherwise from the history.
    acked_rate: float | None = None
    failed_rate: float | None = None


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose handler runs and has reported progress."""

    queue: str
    id: str
    # None: the message is raw.
    task: str | None
    progress: Progress
    # Unix seconds at which its handler started. None: it is not known.
    started_at: float | None = None


class WorkerTotals(msgspec.Struct, frozen=True):
    """The sums over the workers behind the health ports."""

    workers: int = 0
    # The number of running handlers, and its maximum.
    running: int = 0
    concurrency: int = 0
    suspects: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """All queues at one moment."""

    backend: str
    # Unix seconds.
    at: float
    rows: list[Row]
    # The schedules of these queues, by name. Empty on a store that does not support them.
    schedules: list[ScheduleStatus] = []
    # The running jobs that have reported progress, of each queue.
    running: list[RunningJob] = []
    # None: no health port is given, or none answers.
    fleet: WorkerTotals | None = None
    # The reason why the rows are from an earlier sample, or why counts from health ports are missing.
    problem: str | None = None


class _HealthCounts(msgspec.Struct, frozen=True):
    """The part of `/stats` of a health port that is shown."""

    workers: int
    running: int
    concurrency: int
    suspects: int = 0
    # The number of finished deliveries, by queue and outcome.
    outcomes: dict[str, dict[str, int]] = {}


class _Counts(msgspec.Struct, frozen=True):
    """Counts at one moment, to compute rates from the difference of two of them."""

    backlog: int
    done: int | None
    failed: int | None


class Sampler:
    """The source of samples.

    Args:
        backend: The open backend.
        queue: The queue to sample. None: all queues.
        health: HOST:PORT of workers that run with `--health`.
        clock: The clock.
    """

    def __init__(
        self, backend: Backend, queue: str | None = None, health: Sequence[str] = (), *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._backend = backend
        self._queue = queue
        self._health = health
        self._clock = clock
        # Each item has the monotonic time of its sample.
        self._past: deque[tuple[float, dict[str, _Counts]]] = deque()
        self._history = HistoryRates(backend)
        self._rows: list[Row] = []
        self._schedules: list[ScheduleStatus] = []
        self._running: list[RunningJob] = []

    async def sample(self) -> Sample:
        """Sample now. If the store does not answer, return the earlier rows with the reason.

        Raises:
            QueueNotFound: The queue to sample does not exist.
        """
        healths, problem = await self._ask_workers()
        try:
            rows = await self._sample_queues(healths)
        except BACKEND_ERRORS as error:
            if self._queue is not None and isinstance(error, QueueNotFound):
                raise
            problem = f"the backend cannot be asked: {describe_problem(error)}"
        else:
            self._rows = rows
            if supports_schedules(self._backend.deviations):
                usable = [row.queue for row in rows if row.problem is None]
                self._schedules = await self._read_schedules(usable)
        fleet = None
        if healths:
            fleet = WorkerTotals(
                *(sum(getattr(h, name) for h in healths) for name in ("workers", "running", "concurrency", "suspects"))
            )
        return Sample(
            backend=self._backend.describe(),
            at=self._clock.time(),
            rows=self._rows,
            schedules=self._schedules,
            running=self._running,
            fleet=fleet,
            problem=problem,
        )

    async def _read_schedules(self, queues: Sequence[str]) -> list[ScheduleStatus]:
        try:
            return await read_all(self._backend, queues)
        except BACKEND_ERRORS:
            # A queue was deleted or became unusable meanwhile: the next sample shows that.
            return self._schedules

    async def _sample_queues(self, healths: Sequence[_HealthCounts]) -> list[Row]:
        names = [self._queue] if self._queue is not None else await self._backend.queues()
        seen: list[tuple[QueueStats, int]] = []
        running: list[RunningJob] = []
        for name in names:
            alone = name == self._queue
            found = [await self._backend.stats(name)] if alone else await count_queues(self._backend, [name])
            for stats in found:
                leases = await self._leases(stats)
                seen.append((stats, len({lease.holder for lease in leases if lease.holder is not None})))
                running += await self._running_jobs(stats.queue, leases)
        now = self._clock.monotonic()
        if self._history.on:
            await self._history.sample(now)
        finished = _sums(healths) if healths else self._rates_from_history(stats.queue for stats, _ in seen)
        counted = {stats.queue: _count(stats, finished) for stats, _ in seen}
        self._forget(now, counted)
        rows = [self._row(stats, workers, counted[stats.queue], now) for stats, workers in seen]
        self._past.append((now, counted))
        self._running = running
        return rows

    def _forget(self, now: float, counted: Mapping[str, _Counts]) -> None:
        """Drop old counts. If a worker has restarted its counts, drop all."""
        while len(self._past) > 1 and self._past[1][0] <= now - _WINDOW_S:
            self._past.popleft()
        before = self._past[-1][1] if self._past else {}
        if any((counts.done or 0) < (before[queue].done or 0) for queue, counts in counted.items() if queue in before):
            self._past.clear()

    def _rates_from_history(self, queues: Iterable[str]) -> dict[str, dict[str, int]] | None:
        told = self._history
        if not told.on:
            return None
        return {queue: {"acked": told.done[queue], "failed": told.failed[queue]} for queue in queues}

    async def _leases(self, stats: QueueStats) -> list[StoredMessage]:
        if not stats.leased:
            return []
        return await list_messages(self._backend, stats.queue, Query(State.LEASED, limit=_MOST_LEASES))

    async def _running_jobs(self, queue: str, leases: Sequence[StoredMessage]) -> list[RunningJob]:
        """Return the jobs that have reported progress. Where no job of a queue has, that is one look."""
        try:
            if not leases or PROGRESS not in await used_groups(self._backend, queue):
                return []
            replies = await self._backend.cells(queue, [get_cell(PROGRESS, lease.message.id) for lease in leases])
        except BACKEND_ERRORS:
            # The counts are shown without progress, such as that of another user's queue.
            return []
        found: list[RunningJob] = []
        for lease, reply in zip(leases, replies, strict=True):
            stored = read_progress(reply.cell)
            if stored is not None:
                opened = open_envelope(unpack(lease.message).body)
                task = opened.task if isinstance(opened, Envelope) else None
                job = RunningJob(
                    queue=queue,
                    id=lease.message.id,
                    task=task,
                    progress=stored.progress,
                    started_at=stored.started_at,
                )
                found.append(job)
        return found

    def _row(self, stats: QueueStats, workers: int, counted: _Counts, now: float) -> Row:
        before, since = next(
            ((counts[stats.queue], at) for at, counts in self._past if stats.queue in counts), (None, now)
        )
        backlog_rate = acked_rate = failed_rate = None
        if before is not None and now > since:
            backlog_rate = (counted.backlog - before.backlog) / (now - since)
            acked_rate = _rate(before.done, counted.done, now - since)
            failed_rate = _rate(before.failed, counted.failed, now - since)
        return Row(
            queue=stats.queue,
            ready=stats.ready,
            leased=stats.leased,
            delayed=stats.delayed,
            failed=stats.failed,
            oldest_age_s=stats.oldest_age_s,
            workers=max(workers, self._history.workers(stats.queue, now - _WINDOW_S)),
            paused=stats.paused,
            blocked=stats.blocked,
            problem=stats.problem,
            backlog_rate=backlog_rate,
            acked_rate=acked_rate,
            failed_rate=failed_rate,
        )

    async def _ask_workers(self) -> tuple[list[_HealthCounts], str | None]:
        """Return the counts of the health ports, and the reason why the first one fails, if one does."""
        answers = await asyncio.gather(
            *(
                run_in_thread(BlockingCall.PROBE, fetch_page, where, "/stats", _HEALTH_PATIENCE_S)
                for where in self._health
            )
        )
        found: list[_HealthCounts] = []
        problem: str | None = None
        for where, (status, text) in zip(self._health, answers, strict=True):
            try:
                if status == _OK:
                    found.append(msgspec.json.decode(text, type=_HealthCounts))
                    continue
                said = one_line(text)
            except msgspec.DecodeError as error:
                said = f"no worker's answer: {error}"
            problem = problem or f"{where}: {said}"
        return found, problem


def _sums(healths: Sequence[_HealthCounts]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for health in healths:
        for queue, outcomes in health.outcomes.items():
            mine = sums.setdefault(queue, {})
            for outcome, count in outcomes.items():
                mine[outcome] = mine.get(outcome, 0) + count
    return sums


def _count(stats: QueueStats, finished: Mapping[str, Mapping[str, int]] | None) -> _Counts:
    backlog = stats.ready + stats.leased + stats.delayed
    if finished is None:
        return _Counts(backlog, None, None)
    outcomes = finished.get(stats.queue, {})
    return _Counts(backlog, outcomes.get("acked", 0), outcomes.get("failed", 0))


def _rate(before: int | None, now: int | None, seconds: float) -> float | None:
    return None if before is None or now is None else (now - before) / seconds
