"""Reports of failures: the call of `on_failure` is stored before its message is failed.

A worker that dies in between leaves a lease that expires. The message runs or fails again, and the id of the report is
taken.
"""

from __future__ import annotations

import asyncio

from qworker import log_events as events
from qworker.call import Call
from qworker.errors import AlreadyEnqueued, QueueNotFound, UsageError
from qworker.failed_call import failure_report
from qworker.failure_text import summary_of
from qworker.worker.delivery import Delivery
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["FailureReports"]


class FailureReports:
    """Stores the reports of failures.

    Args:
        state: The state of the worker.
    """

    def __init__(self, state: WorkerState) -> None:
        self._backend = state.backend
        self._clock = state.clock
        self._log = state.log
        self._features = state.features
        self._outage = state.outage("failure-reports")
        # Seconds. If the whole store does not answer, the lease is lost earlier.
        self._patience = 2 * state.options.visibility_timeout

    async def store(self, delivery: Delivery) -> None:
        """Store the report of a delivery whose message is to be failed.

        If the lease is lost before it is stored, the settlement is withdrawn: the next worker that gets the message
        reports it. If it can never be stored, that is logged, and the message fails without a report.
        """
        delivery.unreported = False
        try:
            call = self._call(delivery)
        except Exception as error:  # noqa: BLE001 - hooks and header sources are code of the app
            self._log_lost(delivery, error)
            return
        until = self._clock.monotonic() + self._patience
        while isinstance(stored := await self._try(call), BaseException):
            problem, now = stored, self._clock.monotonic()
            if delivery.gone is not None or now >= delivery.expires:
                delivery.settlement = None
                return
            if isinstance(problem, (UsageError, AlreadyEnqueued)) or now >= until:
                self._log_lost(delivery, problem)
                return
            await asyncio.sleep(self._outage.record_failure(problem))
        self._outage.record_success()
        # Another report can have the unique key of this one.
        self._count(delivery, "stored" if stored == call.draft.id else "existed")

    def _call(self, delivery: Delivery) -> Call:
        handler, settlement = delivery.handler, delivery.settlement
        assert handler is not None
        assert handler.on_failure is not None
        assert settlement is not None
        message = delivery.lease.message
        return failure_report(
            handler.on_failure,
            message,
            handler.name,
            code=delivery.code,
            error=settlement.error or "",
            tries=message.tries + bool(delivery.started),
            failed_at=self._clock.time(),
        )

    def _count(self, delivery: Delivery, outcome: str) -> None:
        self._features.add("failure_reports", outcome, delivery.lease.message.queue, delivery.task)

    async def _try(self, call: Call) -> str | BaseException:
        """Return the id of the message that is stored, or an error."""
        try:
            try:
                (stored,) = await self._backend.publish(call.queue, (call.draft,))
            except QueueNotFound:
                # This worker may not work on the queue of the reports.
                await self._backend.create(call.queue)
                (stored,) = await self._backend.publish(call.queue, (call.draft,))
        except (*BACKEND_ERRORS, UsageError, AlreadyEnqueued) as error:
            return error
        return stored

    def _log_lost(self, delivery: Delivery, error: BaseException) -> None:
        self._count(delivery, "lost")
        fields = {events.ERROR_TYPE: type(error).__name__, events.ERROR: summary_of(error)}
        self._log.error(events.FAILURE_NOT_REPORTED, **delivery.fields(), **fields)
