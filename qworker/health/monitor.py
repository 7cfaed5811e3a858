"""The monitor of a worker: a heartbeat of its event loop, and regular samples of its queues."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

from qworker.backend import Backend
from qworker.health.worker_report import Phase, WorkerReport
from qworker.message import QueueStats
from qworker.sampling import QueueSampler, QueueSnapshot, StoreSnapshot
from qworker.sampling.sampler import EVERY
from qworker.worker import Worker
from qworker.worker.metrics import Metrics, TaskCounts

__all__ = ["LoopHeartbeat", "Monitor", "Reporter"]

_BEAT_S = 0.5
_REPORT_EVERY_S = 0.5


class LoopHeartbeat:
    """The heartbeat of an event loop. `beat` runs on the loop, and any thread can call `stalled_seconds`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # Monotonic seconds of the last beat. None: the loop has not started, or has ended.
        self._last: float | None = None

    async def beat(self) -> None:
        """Beat until cancelled."""
        try:
            while True:
                self._last = self._now()
                await asyncio.sleep(_BEAT_S)
        finally:
            self._last = None

    def stalled_seconds(self) -> float:
        """Return the seconds for which the loop has been blocked, or 0.0 if it runs."""
        last = self._last
        return 0.0 if last is None else max(0.0, self._now() - last - _BEAT_S)


class Monitor:
    """The state of this process for reports. The event loop's thread writes it, and any thread reads it.

    Args:
        concurrency: The maximum number of handlers that the worker runs at once.
    """

    def __init__(self, concurrency: int) -> None:
        self.metrics = Metrics()
        self.pulse = LoopHeartbeat()
        self._life = f"{os.getpid()}-{time.time_ns()}"
        self._concurrency = concurrency
        self._worker: Worker | None = None
        self._over = False
        self._problem: str | None = None
        self._queues: list[QueueStats] = []
        # Whether the store was reached. The first count of a large queue may take minutes more.
        self._reached = False
        self._looked_at: float | None = None

    def attach(self, worker: Worker) -> None:
        """Start to monitor a worker that is about to run."""
        self._worker = worker
        worker.observers.append(self.metrics)

    async def sample(self, backend: Backend, queues: Sequence[str], url: str | None = None) -> None:
        """Sample the queues at intervals until cancelled.

        Args:
            backend: The open backend.
            queues: The queues.
            url: The URL of the backend, by which another process counts large queues.
        """
        async with aclosing(QueueSampler(backend, queues, url=url)) as sampler:
            try:
                while True:
                    self._take(await sampler.tick(), queues)
                    await asyncio.sleep(EVERY)
            finally:
                self._over = True

    def _take(self, snapshot: StoreSnapshot, queues: Sequence[str]) -> None:
        """Take what is known, unless a queue was not counted yet: a number that is missing is not 0."""
        self._problem = snapshot.problem
        if snapshot.problem is not None:
            return
        self._reached = True
        found = {one.queue: one for one in snapshot.queues}
        if any(one.counted is None and one.problem is None for one in found.values()):
            return
        # A queue that was deleted, or is not created yet, has no messages.
        self._queues = [
            _stats_of(found[queue], snapshot.at) if queue in found else QueueStats(queue=queue) for queue in queues
        ]
        # The worker works as long as it can use one of its queues.
        usable = any(stats.problem is None for stats in self._queues)
        self._problem = None if usable else next((stats.problem for stats in self._queues), None)
        counted = [one.counted.at for one in found.values() if one.counted is not None and one.problem is None]
        self._looked_at = min(counted, default=snapshot.at)

    def queues(self) -> list[QueueStats]:
        """Return the last sample of the queues. From any thread."""
        return self._queues

    def state(self) -> Phase:
        """Return what the worker does now."""
        if self._over:
            return "draining"
        if self._worker is None or not self._reached:
            return "starting"
        return self._worker.state

    def _counts(self) -> list[TaskCounts]:
        features = [] if self._worker is None else self._worker.features.counts()
        return [*self.metrics.counts(), *features]

    def report(self) -> WorkerReport:
        """Return a report of the process at this moment. From any thread."""
        return WorkerReport(
            life=self._life,
            pid=os.getpid(),
            state=self.state(),
            stalled=self.pulse.stalled_seconds(),
            problem=self._problem,
            running=0 if self._worker is None else self._worker.running_count,
            concurrency=self._concurrency,
            suspects=0 if self._worker is None else self._worker.suspect_count,
            counts=self._counts(),
            queues=self._queues,
            looked_at=self._looked_at,
        )


def _stats_of(found: QueueSnapshot, now: float) -> QueueStats:
    if found.problem is not None or found.counted is None:
        return QueueStats(queue=found.queue, problem=found.problem)
    return found.counted.stats_at(now)


class Reporter:
    """The sender of reports to a supervisor. It has its own thread, so it sends while a handler blocks the loop."""

    def __init__(self, watch: Monitor, send: Callable[[WorkerReport], None]) -> None:
        self._watch = watch
        self._send = send
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qworker-reporter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_REPORT_EVERY_S):
            self._send(self._watch.report())
        # The last report has the outcomes of the last messages.
        self._send(self._watch.report())

    def close(self) -> None:
        """Send the last report."""
        self._ended.set()
        self._thread.join(_REPORT_EVERY_S)

    def keep_across_exec(self) -> None:
        """Send the last report, because the fresh process sends its own ones."""
        self.close()
