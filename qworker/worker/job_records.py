"""What a worker stores for the callers of jobs: the ends of messages whose result is wanted, and progress.

Both are cells. The ends of a batch of settlements are stored in one call before the batch, so a message that was acked
always has its result. If the worker dies in between, the message runs again, and its next delivery has a higher rank.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from qworker import log_events as events
from qworker.backend import Backend
from qworker.cell import MOST_VALUE, CellOp
from qworker.clock import Clock
from qworker.failure_text import error_type, without_code
from qworker.jobs.records import (
    Progress,
    StoredProgress,
    StoredResult,
    delete_progress,
    put_progress,
    put_result,
    rank_of,
)
from qworker.logs import WorkerLog, one_line
from qworker.message import SettleAction, Settlement
from qworker.worker.delivery import Delivery
from qworker.worker.metrics import FeatureCounts
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["JobRecords"]

# Seconds between two times at which progress is stored.
_PROGRESS_INTERVAL = 0.5
# Bytes. The rest of a cell is for what surrounds the value.
_MOST_RESULT = MOST_VALUE - 512


class JobRecords:
    """Stores the ends and the progress of messages.

    Attributes:
        in_use: Whether a delivery of this worker wanted its end or progress to be stored. Until then, settling does
            nothing more than without this class.
    """

    def __init__(self, backend: Backend, clock: Clock, log: WorkerLog, features: FeatureCounts) -> None:
        self.in_use = False
        self._features = features
        self._backend = backend
        self._clock = clock
        self._log = log
        self._dirty: list[Delivery] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._flushing: asyncio.Task[None] | None = None
        # A put of progress must not arrive after the delete of its settlement.
        self._progress_lock = asyncio.Lock()

    def bind(self) -> None:
        """Use the running event loop for progress that comes from threads."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    # -- the end of a message ----------------------------------------------------------------------------------------

    async def store(self, batch: Iterable[Delivery]) -> None:
        """Store what the callers of these deliveries want to know, before their settlements are sent.

        Raises:
            BackendError: It is not stored. The call can be repeated.
        """
        by_queue: dict[str, list[CellOp]] = defaultdict(list)
        with_progress = False
        ends: list[tuple[Delivery, str]] = []
        for delivery in batch:
            ops = self._ops(delivery, ends)
            if ops:
                by_queue[delivery.lease.message.queue] += ops
                with_progress = with_progress or delivery.progress is not None
        if not by_queue:
            return
        if not with_progress:
            await self._send(by_queue)
        else:
            async with self._progress_lock:
                await self._send(by_queue)
        for delivery, end in ends:
            self._features.add("results", end, delivery.lease.message.queue, delivery.task)

    async def _send(self, by_queue: dict[str, list[CellOp]]) -> None:
        for queue, ops in by_queue.items():
            await self._backend.cells(queue, ops)

    def _ops(self, delivery: Delivery, ends: list[tuple[Delivery, str]]) -> list[CellOp]:
        """Return the operations that store what the callers of a delivery want to know, and add its end to `ends`."""
        settlement = delivery.settlement
        message_id = delivery.lease.message.id
        ttl = delivery.result_ttl
        ops: list[CellOp] = []
        if ttl and settlement is not None:
            result = self._end_of(delivery, settlement)
            if result is not None:
                ops.append(put_result(message_id, rank_of(delivery.lease.token), result, ttl))
                ends.append((delivery, result.state))
        if delivery.progress is not None:
            ops.append(self._put(delivery, ttl) if ttl else delete_progress(message_id))
        return ops

    def _end_of(self, delivery: Delivery, settlement: Settlement) -> StoredResult | None:
        """Return the end to store, or None if the message runs again."""
        now = self._clock.time()
        started_at = self._started_at(delivery)
        if settlement.action is SettleAction.FAIL_PERM:
            return StoredResult(
                "failed",
                error_type=error_type(delivery.error),
                text=without_code(settlement.error or ""),
                code=delivery.code,
                started_at=started_at,
                finished_at=now,
            )
        if settlement.action is not SettleAction.ACK:
            return None
        value = delivery.result
        if value is not None and value.problem is None and len(value.body) <= _MOST_RESULT:
            return StoredResult("done", msgspec.Raw(value.body), started_at=started_at, finished_at=now)
        problem = "the handler's value is missing" if value is None else value.problem
        if problem is None:
            return StoredResult("too_big", started_at=started_at, finished_at=now)
        self._log.warning(events.RESULT_NOT_KEPT, **delivery.fields(), **{events.ERROR: one_line(problem)})
        return StoredResult("not_encodable", text=problem[:2000], started_at=started_at, finished_at=now)

    def _started_at(self, delivery: Delivery) -> float | None:
        if not delivery.started:
            return None
        return self._clock.time() - (self._clock.monotonic() - delivery.started)

    # -- progress ----------------------------------------------------------------------------------------------------

    def report(self, delivery: Delivery, progress: Progress) -> None:
        """Take the progress of a running handler. From any thread."""
        if "cells" in self._backend.deviations:
            return
        delivery.progress = progress
        if delivery.progress_pending or self._loop is None:
            return
        delivery.progress_pending = True
        if threading.get_ident() == self._thread:
            self._mark(delivery)
        else:
            self._loop.call_soon_threadsafe(self._mark, delivery)

    def _mark(self, delivery: Delivery) -> None:
        self.in_use = True
        self._dirty.append(delivery)
        if self._flushing is None and self._loop is not None:
            self._flushing = self._loop.create_task(self._flush(), name="qworker-progress")

    async def _flush(self) -> None:
        try:
            while self._dirty:
                dirty, self._dirty = self._dirty, []
                await self._store_progress(dirty)
                await asyncio.sleep(_PROGRESS_INTERVAL)
        finally:
            self._flushing = None

    async def _store_progress(self, deliveries: Sequence[Delivery]) -> None:
        async with self._progress_lock:
            by_queue: dict[str, list[CellOp]] = defaultdict(list)
            for delivery in deliveries:
                # What is reported from here on is stored in the next round.
                delivery.progress_pending = False
                if delivery.settlement is None:
                    by_queue[delivery.lease.message.queue].append(self._put(delivery, None))
            try:
                await self._send(by_queue)
            except BACKEND_ERRORS as error:
                # The next report is stored again, and the settler reports an outage.
                self._log.debug(events.PROGRESS_NOT_STORED, **{events.ERROR: one_line(str(error))})

    def _put(self, delivery: Delivery, ttl: float | None) -> CellOp:
        progress = delivery.progress
        assert progress is not None
        stored = StoredProgress(progress, self._started_at(delivery))
        return put_progress(delivery.lease.message.id, rank_of(delivery.lease.token), stored, ttl)
