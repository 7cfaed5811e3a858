"""Calls whose arguments do not fit their task here: since when they are refused.

In a rolling deploy, two versions of an app share a queue, and each refuses the calls of the other. So such a call is
released for a time, and fails only after it. A cell keeps the time of its first refusal for all workers. A store
without cells cannot, so each worker counts from the first time that it has seen the call. That is never too early.
"""

from __future__ import annotations

from qworker.cell import Cell, CellOp
from qworker.errors import UsageError
from qworker.refusal import MISFITS, refused_since
from qworker.worker.delivery import Delivery
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["Misfits"]

# Seconds after its last use for which a cell is kept, beside the time of the refusals themselves.
_EXTRA_TTL = 60.0
# The number of calls that are remembered for a store without cells.
_MOST = 10_000


class Misfits:
    """Knows since when calls are refused.

    Args:
        state: The state of the worker.
    """

    def __init__(self, state: WorkerState) -> None:
        self._backend = state.backend
        self._clock = state.clock
        self._patience = state.app.unknown_for
        self._outage = state.outage("misfits")
        self._has_cells = "cells" not in state.backend.deviations
        # Unix seconds of the first refusal by this worker, for a store without cells.
        self._seen: dict[tuple[str, str], float] = {}

    async def is_over(self, delivery: Delivery) -> bool:
        """Return whether a call was refused for long enough to fail. Then its time is forgotten.

        If the worker dies in between, the time starts again, and the message stays.
        """
        message = delivery.lease.message
        now = self._clock.time()
        if not self._has_cells:
            return self._is_over_here((message.queue, message.id), now)
        cell = Cell(MISFITS, message.id, b"%.3f" % now, ttl=2 * self._patience + _EXTRA_TTL)
        try:
            (reply,) = await self._backend.cells(message.queue, [CellOp("put", cell, only="")])
            since = refused_since(reply.cell)
            if since is None or now - since < self._patience:
                return False
            await self._backend.cells(message.queue, [CellOp("delete", Cell(MISFITS, message.id))])
        except (*BACKEND_ERRORS, UsageError) as error:
            self._outage.record_failure(error)
            return False
        self._outage.record_success()
        return True

    def _is_over_here(self, key: tuple[str, str], now: float) -> bool:
        seen = self._seen
        if key not in seen and len(seen) >= _MOST:
            del seen[next(iter(seen))]
        if now - seen.setdefault(key, now) < self._patience:
            return False
        del seen[key]
        return True
