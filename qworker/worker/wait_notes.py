"""Notes of handlers that wait for other jobs, for `explain`.

A wait is noted when it gets long, because most waits are short. A note expires soon after its worker has died: it does
not apply to a later delivery.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import NamedTuple

from qworker.backend.offers import glance_at
from qworker.errors import QueueNotFound
from qworker.jobs.records import WAITS_NOTED_EVERY, delete_wait, put_wait, rank_of
from qworker.worker.delivery import Delivery
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["WaitNotes"]

# Seconds between two rounds, while a handler waits.
_INTERVAL = 1.0
# Seconds after which a wait is noted.
_LONG = 5.0


class _Note(NamedTuple):
    """The note of a wait: when it was stored last, in monotonic seconds, and its version."""

    at: float
    version: str


class WaitNotes:
    """Stores which handlers wait, until it is cancelled."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._backend = state.backend
        self._clock = state.clock
        self._outage = state.outage("waits")
        self._woken = asyncio.Event()
        self._noted: dict[Delivery, _Note] = {}

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
        due: defaultdict[str, list[Delivery]] = defaultdict(list)
        for one in long:
            if one not in self._noted or now - self._noted[one].at >= WAITS_NOTED_EVERY:
                due[one.lease.message.queue].append(one)
        for queue, batch in due.items():
            await self._put(queue, batch, now)
        over: defaultdict[str, list[Delivery]] = defaultdict(list)
        for one in self._noted.keys() - long:
            over[one.lease.message.queue].append(one)
        for queue, batch in over.items():
            # A later delivery of the message has stored another version.
            ops = [delete_wait(one.lease.message.id, self._noted[one].version) for one in batch]
            await self._backend.cells(queue, ops)
            for one in batch:
                del self._noted[one]

    async def _put(self, queue: str, batch: list[Delivery], now: float) -> None:
        try:
            # A put would create a queue again that was deleted.
            await glance_at(self._backend, queue)
        except QueueNotFound:
            return
        ops = [put_wait(one.lease.message.id, rank_of(one.lease.token), one.waits_for) for one in batch]
        for one, reply in zip(batch, await self._backend.cells(queue, ops), strict=True):
            if reply.done and reply.cell is not None:
                self._noted[one] = _Note(now, reply.cell.version)
