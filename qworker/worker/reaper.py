"""The reaper: about once a second, expired leases and due messages of the worker's queues become ready again.

From the same call it learns which leases of this worker are gone, and stops their handlers. The worker learns the
store's time from it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from qworker.backend.reap_rounds import ReapRounds
from qworker.context import CancelReason
from qworker.message import LostLease
from qworker.worker.delivery import Delivery
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["Reaper", "stop_lost"]

_INTERVAL = 1.0


def stop_lost(deliveries: Iterable[Delivery], lost: Mapping[tuple[str, str, int], bool]) -> None:
    """Stop the handlers of lost leases, or keep them from starting.

    Args:
        deliveries: The deliveries, of which some may be lost.
        lost: The lost leases by queue, id and token, and whether each message was cancelled.
    """
    for delivery in deliveries:
        message = delivery.lease.message
        cancelled = lost.get((message.queue, message.id, delivery.lease.token))
        if cancelled is not None:
            delivery.lose(CancelReason.CANCELLED if cancelled else CancelReason.LEASE_LOST)


class Reaper:
    """Reaps the worker's queues until it is cancelled."""

    def __init__(self, state: WorkerState) -> None:
        self._queues = state.queues
        self._state = state
        self._held = state.held
        self._rounds = ReapRounds(state.backend, self._names, state.clock, self._on_lost, state.store_clock.take)
        self._names_losses = "lost_leases" not in state.backend.deviations
        self._outage = state.outage("reaper")
        self._draw = state.draw
        # Deliveries whose lease was not extended. The next round tells why, and then their handlers are stopped.
        self._missing: set[Delivery] = set()
        self._wake = asyncio.Event()

    async def _names(self) -> Sequence[str]:
        return self._queues

    async def run(self) -> None:
        """Reap about once per interval until cancelled."""
        while True:
            pause = await self._round()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def ask_why(self, deliveries: Iterable[Delivery]) -> None:
        """Stop the handlers of leases that are gone, after a round at once that may say that they were cancelled."""
        for delivery in deliveries:
            if delivery.gone is None:
                delivery.gone = CancelReason.LEASE_LOST
                self._missing.add(delivery)
        if self._names_losses:
            self._wake.set()
        else:
            self._stop(self._missing)

    async def _round(self) -> float:
        missing, self._missing = self._missing, set()
        try:
            return await self._reap()
        finally:
            # Also if the store does not answer.
            self._stop(missing)

    async def _reap(self) -> float:
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

    def _on_lost(self, queue: str, lost: Sequence[LostLease]) -> None:
        # The token: a later delivery of the same message is another lease.
        leases = {(queue, one.id, one.token): one.cancelled for one in lost}
        stop_lost(tuple(self._held), leases)
        if self._state.early_losses is not None:
            self._state.early_losses |= leases

    def _stop(self, missing: set[Delivery]) -> None:
        """Stop the handlers of these deliveries, unless a round has stopped them."""
        for delivery in tuple(missing):
            if delivery in self._held and delivery.cancel_reason is None:
                delivery.lose(CancelReason.LEASE_LOST)
        missing.clear()
