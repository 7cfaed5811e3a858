"""The reaper: about once a second, expired leases and due messages of the worker's queues become ready again."""

from __future__ import annotations

import asyncio

from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["Reaper"]

_INTERVAL = 1.0


class Reaper:
    """Reaps the worker's queues until it is cancelled."""

    def __init__(self, state: WorkerState) -> None:
        self._backend = state.backend
        self._queues = state.queues
        self._outage = state.outage("reaper")
        self._draw = state.draw

    async def run(self) -> None:
        """Reap about once per interval until cancelled."""
        while True:
            pause = await self._round()
            await asyncio.sleep(pause)

    async def _round(self) -> float:
        trouble: Exception | None = None
        for queue in self._queues:
            try:
                await self._backend.reap(queue)
            except BACKEND_ERRORS as error:
                # An error of one queue must not prevent the reaping of the others.
                trouble = error
        if trouble is not None:
            return max(_INTERVAL, self._outage.record_failure(trouble))
        self._outage.record_success()
        # Jitter keeps the workers of one store apart.
        return _INTERVAL * (0.8 + 0.4 * self._draw())
