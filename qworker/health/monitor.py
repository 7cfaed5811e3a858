"""The worker's side: a heartbeat that shows whether the loop turns, and a sample of the queues now and then."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.health.worker_report import Phase, WorkerReport
from qworker.logs import one_line
from qworker.message import QueueStats
from qworker.url import mask
from qworker.worker import Worker
from qworker.worker.metrics import Metrics
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["LoopHeartbeat", "Monitor", "Reporter"]

_BEAT_S = 0.5
# Seconds between two samples of the queues; more where one takes long, so that sampling costs at most 2 %.
_LOOK_EVERY_S = 2.0
_LOOK_SHARE = 0.02
_LONGEST_PAUSE_S = 60.0
# A store that has not answered for so long is out of reach.
_LOOK_PATIENCE_S = 10.0
_REPORT_EVERY_S = 0.5


class LoopHeartbeat:
    """Whether a loop turns. `beat` runs on the loop; `stalled` may be asked from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # Monotonic seconds; None: the loop has not begun, or is over.
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
        """Seconds that the loop has stood still; 0.0 while it turns."""
        last = self._last
        return 0.0 if last is None else max(0.0, self._now() - last - _BEAT_S)


class Monitor:
    """What others may know of this process. Written on the loop's thread, read from any.

    Args:
        concurrency: The handlers that the worker may run at once.
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
        self._looked_at: float | None = None

    def attach(self, worker: Worker) -> None:
        """Monitor a worker that is about to run."""
        self._worker = worker
        worker.observers.append(self.metrics)

    async def sample(self, backend: Backend, queues: Sequence[str]) -> None:
        """Look at the queues again and again, until cancelled."""
        try:
            while True:
                began = time.monotonic()
                await self._sample_queues(backend, queues)
                took = time.monotonic() - began
                await asyncio.sleep(min(_LONGEST_PAUSE_S, max(_LOOK_EVERY_S, took / _LOOK_SHARE)))
        finally:
            self._over = True

    async def _sample_queues(self, backend: Backend, queues: Sequence[str]) -> None:
        seen: list[QueueStats] = []
        try:
            async with asyncio.timeout(_LOOK_PATIENCE_S):
                for queue in queues:
                    try:
                        seen.append(await backend.stats(queue))
                    except QueueNotFound:
                        # Deleted, or not made yet: it has nothing in it.
                        seen.append(QueueStats(queue=queue))
        except TimeoutError:
            self._problem = f"the backend has not answered for {_LOOK_PATIENCE_S:g} s"
        except BACKEND_ERRORS as error:
            self._problem = mask(one_line(str(error)))
        else:
            self._queues = seen
            self._problem = None
            self._looked_at = time.time()

    def queues(self) -> list[QueueStats]:
        """Return the queues when they were last looked at. From any thread."""
        return self._queues

    def state(self) -> Phase:
        """Return what the worker is at."""
        if self._over:
            return "draining"
        if self._worker is None or self._looked_at is None:
            return "starting"
        return self._worker.state

    def report(self) -> WorkerReport:
        """Return the process at this moment. From any thread."""
        return WorkerReport(
            life=self._life,
            pid=os.getpid(),
            state=self.state(),
            stalled=self.pulse.stalled_seconds(),
            problem=self._problem,
            running=0 if self._worker is None else self._worker.running_count,
            concurrency=self._concurrency,
            counts=self.metrics.counts(),
            queues=self._queues,
            looked_at=self._looked_at,
        )


class Reporter:
    """Tells a supervisor, from a thread of its own: also while a handler blocks the loop."""

    def __init__(self, watch: Monitor, send: Callable[[WorkerReport], None]) -> None:
        self._watch = watch
        self._send = send
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qworker-reporter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_REPORT_EVERY_S):
            self._send(self._watch.report())
        # What the last messages came to.
        self._send(self._watch.report())

    def close(self) -> None:
        """Tell a last time."""
        self._ended.set()
        self._thread.join(_REPORT_EVERY_S)

    def keep_across_exec(self) -> None:
        """A fresh process takes over: it tells the rest."""
        self.close()
