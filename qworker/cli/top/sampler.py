"""Samples of the queues of a backend, and the rates between them, for `qworker top`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from qworker.backend import Backend
from qworker.backend.each_queue import describe_problem
from qworker.backend.listing import list_messages
from qworker.cli.schedules import read_all
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import QueueNotFound
from qworker.health.probe import fetch_page
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.logs import one_line
from qworker.message import Query, State, StoredMessage
from qworker.sampling import QueueSampler, QueueSnapshot, StoreSnapshot
from qworker.schedules.code import supports_schedules
from qworker.schedules.store import ScheduleStatus
from qworker.tools.running import RunningJob, read_running
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["Row", "Sample", "Sampler", "WorkerTotals"]

# Rates of health ports are averages over this number of seconds, or since the first sample.
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
    # Seconds since its messages were counted. None: they are being counted for the first time.
    count_age_s: float | None = None
    # False if messages moved during the count, so that some may be missing or counted twice.
    exact: bool = True
    # The growth of the number of ready, leased and delayed messages. It is negative if they become fewer.
    backlog_rate: float | None = None
    # From the health ports of the workers if they are given, otherwise from the history.
    acked_rate: float | None = None
    failed_rate: float | None = None


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


class _Finished(msgspec.Struct, frozen=True):
    """What health ports count of one queue, to compute rates from the difference of two of them."""

    acked: int
    failed: int


class _Rates(msgspec.Struct, frozen=True):
    """Finished messages of one queue per second."""

    acked: float
    failed: float


class Sampler:
    """The source of samples.

    Args:
        backend: The open backend.
        queue: The queue to sample. None: all queues.
        health: HOST:PORT of workers that run with `--health`.
        url: The URL of the backend, by which another process counts large queues. None: this process counts them.
        every: Seconds between two counts of a queue whose count is cheap. 0: each sample counts it.
        clock: The clock.
    """

    def __init__(
        self,
        backend: Backend,
        queue: str | None = None,
        health: Sequence[str] = (),
        *,
        url: str | None = None,
        every: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._backend = backend
        self._queue = queue
        self._health = health
        self._clock = clock
        self._sampler = QueueSampler(backend, None if queue is None else [queue], url=url, every=every, clock=clock)
        # Whether the first counts have ended. The next ones do not delay a sample.
        self._has_counts = False
        # Each item has the monotonic time of its sample.
        self._past: deque[tuple[float, dict[str, _Finished]]] = deque()
        self._rows: list[Row] = []
        self._schedules: list[ScheduleStatus] = []
        self._running: list[RunningJob] = []

    async def sample(self) -> Sample:
        """Sample now. If the store does not answer, return the earlier rows with the reason.

        Raises:
            QueueNotFound: The queue to sample does not exist.
        """
        healths, problem = await self._ask_workers()
        snapshot = await self._sampler.tick(*(() if self._has_counts else (None,)))
        self._has_counts = True
        if self._queue is not None and not snapshot.queues and snapshot.problem is None:
            raise QueueNotFound(self._queue)
        try:
            rows = await self._rows_of(snapshot, healths)
        except BACKEND_ERRORS as error:
            problem = f"the backend cannot be asked: {describe_problem(error)}"
        else:
            problem = snapshot.problem or problem
            if snapshot.problem is None:
                self._rows = rows
                await self._read_schedules()
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

    async def aclose(self) -> None:
        """End the counts that are running. Idempotent."""
        await self._sampler.aclose()

    async def _read_schedules(self) -> None:
        if not supports_schedules(self._backend.deviations):
            return
        try:
            self._schedules = await read_all(self._backend, [row.queue for row in self._rows if row.problem is None])
        except BACKEND_ERRORS:
            # A queue was deleted or became unusable meanwhile: the next sample shows that.
            return

    async def _rows_of(self, snapshot: StoreSnapshot, healths: Sequence[_HealthCounts]) -> list[Row]:
        rows: list[Row] = []
        running: list[RunningJob] = []
        now = self._clock.monotonic()
        rates = self._health_rates(healths, now)
        for found in snapshot.queues:
            leases = [] if snapshot.problem else await self._leases(found)
            rows.append(_row(found, snapshot.at, leases, rates.get(found.queue) if healths else _flow_rates(found)))
            running += await read_running(self._backend, found.queue, leases)
        self._running = running
        return rows

    def _health_rates(self, healths: Sequence[_HealthCounts], now: float) -> dict[str, _Rates]:
        """Return the rates by queue, from the difference to an earlier sample."""
        counts = {
            queue: _Finished(outcomes.get("acked", 0), outcomes.get("failed", 0))
            for queue, outcomes in _sums(healths).items()
        }
        self._forget(now, counts)
        rates: dict[str, _Rates] = {}
        for queue, count in counts.items():
            at, before = next(((at, past[queue]) for at, past in self._past if queue in past), (now, count))
            if now > at:
                seconds = now - at
                rates[queue] = _Rates((count.acked - before.acked) / seconds, (count.failed - before.failed) / seconds)
        self._past.append((now, counts))
        return rates

    def _forget(self, now: float, counts: Mapping[str, _Finished]) -> None:
        """Drop old counts. If a worker has restarted its counts, drop all."""
        while len(self._past) > 1 and self._past[1][0] <= now - _WINDOW_S:
            self._past.popleft()
        before = self._past[-1][1] if self._past else {}
        if any(count.acked < before[queue].acked for queue, count in counts.items() if queue in before):
            self._past.clear()

    async def _leases(self, found: QueueSnapshot) -> list[StoredMessage]:
        if found.counted is None or not found.counted.count.stats.leased or found.problem is not None:
            return []
        try:
            return await list_messages(self._backend, found.queue, Query(State.LEASED, limit=_MOST_LEASES))
        except QueueNotFound:
            # It was deleted after it was counted.
            return []

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


def _flow_rates(found: QueueSnapshot) -> _Rates | None:
    return None if found.flow is None else _Rates(found.flow.acked, found.flow.failed)


def _row(found: QueueSnapshot, now: float, leases: Sequence[StoredMessage], rates: _Rates | None) -> Row:
    if found.counted is None:
        return Row(queue=found.queue, problem=found.problem)
    stats = found.counted.stats_at(now)
    holders = {lease.holder for lease in leases if lease.holder is not None}
    return Row(
        queue=stats.queue,
        ready=stats.ready,
        leased=stats.leased,
        delayed=stats.delayed,
        failed=stats.failed,
        oldest_age_s=stats.oldest_age_s,
        workers=max(len(holders), 0 if found.flow is None else found.flow.workers),
        paused=stats.paused,
        blocked=stats.blocked,
        problem=found.problem,
        count_age_s=max(0.0, now - found.counted.at),
        exact=found.counted.exact,
        backlog_rate=found.counted.backlog_rate,
        acked_rate=None if rates is None else rates.acked,
        failed_rate=None if rates is None else rates.failed,
    )
