"""The reaper: about once a second, expired leases and due messages of the worker's queues become ready again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qworker.backend.reap_rounds import ReapRounds
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["Reaper"]

_INTERVAL = 1.0


class Reaper:
    """Reaps the worker's queues until it is cancelled."""

    def __init__(self, state: WorkerState) -> None:
        self._queues = state.queues
        self._held = state.held
        self._rounds = ReapRounds(state.backend, self._names, state.clock)
        self._outage = state.outage("reaper")
        self._draw = state.draw

    async def _names(self) -> Sequence[str]:
        return self._queues

    async def run(self) -> None:
        """Reap about once per interval until cancelled."""
        while True:
            pause = await self._round()
            await asyncio.sleep(pause)

    async def _round(self) -> float:
        self._rounds.use({delivery.lease.message.queue for delivery in self._held})
        trouble: Exception | None = None
        try:
            await self._rounds.run()
        except BACKEND_ERRORS as error:
            trouble = error
        trouble = trouble or next(iter(self._rounds.failing.values()), None)
        if trouble is not None:
            return max(_INTERVAL, self._outage.record_failure(trouble))
        self._outage.record_success()
        # Jitter keeps the workers of one store apart.
        return _INTERVAL * (0.8 + 0.4 * self._draw())
