"""Notes of handlers that wait for other jobs, for `explain`.

A wait is noted when it gets long, because most waits are short. A note expires soon after its worker has died: it does
not apply to a later delivery.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from qworker.cell import CellOp
from qworker.jobs.records import WAITS_NOTED_EVERY, delete_wait, put_wait, rank_of
from qworker.worker.delivery import Delivery
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["WaitNotes"]

# Seconds between two rounds, while a handler waits.
_INTERVAL = 1.0
# Seconds after which a wait is noted.
_LONG = 5.0


class WaitNotes:
    """Stores which handlers wait, until it is cancelled."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._backend = state.backend
        self._clock = state.clock
        self._outage = state.outage("waits")
        self._woken = asyncio.Event()
        # When each wait was noted last, in monotonic seconds.
        self._noted: dict[Delivery, float] = {}

    def wake(self) -> None:
        """Report that a handler waits, or continues. On the event loop's thread."""
        self._woken.set()

    async def run(self) -> None:
        """Note waits until cancelled."""
        if "cells" in self._backend.deviations:
            await asyncio.Event().wait()
        state = self._state
        while True:
            if not self._noted and not state.waiting + state.waiting_suspects:
                self._woken.clear()
                await self._woken.wait()
            await asyncio.sleep(_INTERVAL)
            try:
                await self.round()
            except BACKEND_ERRORS as error:
                await asyncio.sleep(self._outage.record_failure(error))
            else:
                self._outage.record_success()

    async def round(self) -> None:
        """Note the waits that are long, and delete the notes of those that have ended."""
        now = self._clock.monotonic()
        long = {one for one in self._state.active if one.waits and now - one.waits_since >= _LONG}
        due = [one for one in long if now - self._noted.get(one, -WAITS_NOTED_EVERY) >= WAITS_NOTED_EVERY]
        over = self._noted.keys() - long
        ops: defaultdict[str, list[CellOp]] = defaultdict(list)
        for one in due:
            message = one.lease.message
            ops[message.queue].append(put_wait(message.id, rank_of(one.lease.token), one.waits_for))
        for one in over:
            message = one.lease.message
            ops[message.queue].append(delete_wait(message.id))
        for queue, batch in ops.items():
            await self._backend.cells(queue, batch)
        self._noted |= dict.fromkeys(due, now)
        for one in over:
            del self._noted[one]
