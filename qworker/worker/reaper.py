"""The reaper: about once a second, expired leases and due messages of the worker's queues become ready again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from qworker.backend import Backend
from qworker.worker.outage import BACKEND_ERRORS, Outage

__all__ = ["Reaper"]

_INTERVAL = 1.0


class Reaper:
    """Reaps `queues` until it is cancelled."""

    def __init__(
        self,
        backend: Backend,
        queues: Sequence[str],
        *,
        outage: Outage,
        draw: Callable[[], float],
        interval: float = _INTERVAL,
    ) -> None:
        self._backend = backend
        self._queues = queues
        self._outage = outage
        self._draw = draw
        self._interval = interval

    async def run(self) -> None:
        """The loop."""
        while True:
            pause = await self._round()
            await asyncio.sleep(pause)

    async def _round(self) -> float:
        trouble: Exception | None = None
        for queue in self._queues:
            try:
                await self._backend.reap(queue)
            except BACKEND_ERRORS as error:
                # One queue's trouble must not keep the others from being reaped.
                trouble = error
        if trouble is not None:
            return max(self._interval, self._outage.record_failure(trouble))
        self._outage.record_success()
        # Jitter keeps the workers of one store apart.
        return self._interval * (0.8 + 0.4 * self._draw())
