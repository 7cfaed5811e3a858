"""Handlers that wait for other jobs: they occupy no consumer, so that a parent never blocks its own child."""

from __future__ import annotations

import asyncio
import threading

from qworker.errors import UsageError
from qworker.jobs.records import AwaitedJob
from qworker.logs import Running
from qworker.worker.delivery import Delivery
from qworker.worker.state import WorkerState

__all__ = ["Waits"]

# For each consumer, so many handlers can wait.
_MOST_PER_CONSUMER = 10


class Waits:
    """Counts the handlers of a worker that wait. `HANDLER_WAITS` holds it wherever a handler runs."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._most = _MOST_PER_CONSUMER * state.options.concurrency
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        # Handlers in threads wait on the background loop of the process.
        self._lock = threading.Lock()

    def begin(self, running: Running, job: AwaitedJob) -> None:
        """Report that the handler of a delivery waits for a job. From any thread.

        Raises:
            UsageError: Too many handlers wait.
        """
        if not isinstance(running, Delivery):
            return
        state = self._state
        with self._lock:
            if running.waits == 0:
                waiting = state.waiting + state.waiting_suspects
                if waiting >= self._most:
                    raise UsageError(
                        f"{waiting:,} handlers of this worker wait for other jobs:"
                        " use a workflow, or raise --concurrency"
                    )
                self._count(running, 1)
                running.waits_since = self._state.clock.monotonic()
            running.waits += 1
            running.waits_for = job
        self._report()

    def end(self, running: Running) -> None:
        """Report that the handler continues. From any thread."""
        if not isinstance(running, Delivery):
            return
        with self._lock:
            if not running.waits:
                # It was dropped with its handler.
                return
            running.waits -= 1
            if running.waits == 0:
                self._count(running, -1)
        self._report()

    def drop(self, delivery: Delivery) -> None:
        """Count a delivery no longer, because its handler has ended and left a wait behind. From the loop."""
        with self._lock:
            if not delivery.waits:
                return
            delivery.waits = 0
            self._count(delivery, -1)
        self._report()

    def _count(self, delivery: Delivery, change: int) -> None:
        if delivery.isolated:
            self._state.waiting_suspects += change
        else:
            self._state.waiting += change

    def _report(self) -> None:
        if threading.get_ident() == self._thread:
            self._state.events.waits_changed()
            return
        try:
            self._loop.call_soon_threadsafe(self._state.events.waits_changed)
        except RuntimeError:
            # The loop has closed while a thread outlived its worker.
            pass
