"""The repair of cancels: a worker finishes what a canceller began that was killed, or that does not know the task."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

from qworker.backend.offers import queues_with_cells
from qworker.cell import Cell
from qworker.errors import UNUSABLE, QueueNotFound
from qworker.jobs.cancel import finish_cancels, list_cancels
from qworker.jobs.records import CANCELS
from qworker.jobs.source import JobSource
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["CancelRepair"]

# Seconds between two rounds, and for which a cell must be unchanged: its canceller may be at work.
_INTERVAL = 5.0
# Queues of one round.
_QUEUES = 100


class CancelRepair:
    """Looks for cancels that were begun and not finished, until it is cancelled."""

    def __init__(self, state: WorkerState) -> None:
        self._backend = state.backend
        self._source = JobSource(state.app, None)
        self._queues = deque(state.queues)
        self._clock = state.clock
        self._draw = state.draw
        self._outage = state.outage("cancels")
        # When each version of a cell was seen first, in monotonic seconds: clocks of other hosts have no effect.
        self._seen: dict[tuple[str, str, str], float] = {}

    async def run(self) -> None:
        """Repair until cancelled."""
        if {"cells", "cancel"} & self._backend.deviations.keys():
            await asyncio.Event().wait()
        while True:
            # Jitter keeps the workers of one store apart.
            await asyncio.sleep(_INTERVAL * (0.8 + 0.4 * self._draw()))
            try:
                await self.round()
            except BACKEND_ERRORS as error:
                await asyncio.sleep(self._outage.record_failure(error))
            else:
                self._outage.record_success()

    async def round(self) -> None:
        """Look once at every queue, or at as many as a round has."""
        seen: dict[tuple[str, str, str], float] = {}
        trouble: Exception | None = None
        visited = list(itertools.islice(self._queues, _QUEUES))
        self._queues.rotate(-len(visited))
        for queue in await queues_with_cells(self._backend, visited, CANCELS):
            # A look at a queue without cells may suspend nowhere.
            await asyncio.sleep(0)
            try:
                await self.repair(queue, seen)
            except (QueueNotFound, *UNUSABLE):
                # The reaper reports it.
                continue
            except BACKEND_ERRORS as error:
                # One queue does not keep the others from their repair.
                trouble = error
        self._seen = {key: at for key, at in self._seen.items() if key[0] not in visited} | seen
        if trouble is not None:
            raise trouble

    async def repair(self, queue: str, seen: dict[tuple[str, str, str], float]) -> None:
        """Finish the cancels of one queue that have not changed for a while."""
        now = self._clock.monotonic()
        async for page in list_cancels(self._backend, queue):
            due: list[Cell] = []
            for cell in page:
                key = (queue, cell.name, cell.version)
                seen[key] = self._seen.get(key, now)
                if now - seen[key] >= _INTERVAL:
                    due.append(cell)
            if due:
                await finish_cancels(self._backend, self._source, queue, due)
