"""The settler: collects the outcomes of one turn of the event loop and sends them to the store as one batch.

While a batch is on its way the next one is collected, and at most two are on their way. So a store that commits slowly
gets larger batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from qworker import log_events as events
from qworker.context import CancelReason
from qworker.failure_text import CANCELLED, code_of, error_type, summary_of
from qworker.kit.settle import SettledInPart
from qworker.kit.store_errors import is_final_for_message
from qworker.logs import debug_enabled, one_line
from qworker.message import OUTCOMES, MessageRef, SettleAction, Settlement, State
from qworker.worker.delivery import Delivery, Outcome
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.set_aside import SetAside
from qworker.worker.state import WorkerState

__all__ = ["SENDERS", "Settler"]

# The number of batches that can be on their way at once. `run` must be started this number of times.
SENDERS = 2

_OUTCOMES = {action: Outcome(word) for action, word in OUTCOMES.items()}


class Settler:
    """Sends settlements, counts and logs how messages ended.

    Args:
        state: The state of the worker. A delivery leaves `held` when it is settled.
        stop_extending: Lets no new extension of these deliveries start. Returns those whose extension is under way.
    """

    def __init__(self, state: WorkerState, stop_extending: Callable[[Iterable[Delivery]], list[Delivery]]) -> None:
        self._state = state
        self._stop_extending = stop_extending
        self._backend = state.backend
        self._held = state.held
        self._counts = state.counts
        self._observers = state.observers
        self._listener = state.listener
        self._records = state.records
        self._events = state.events
        self._clock = state.clock
        self._outage = state.outage("settler")
        self._log = state.log
        # Whether acks are logged.
        self._debug = debug_enabled()
        self._pending: list[Delivery] = []
        # Deliveries whose lease is being extended.
        self._waiting: list[Delivery] = []
        # Deliveries that the store cannot settle while it settles others.
        self._aside = SetAside(state.log, state.draw, self.submit)
        # Batches that are being sent, with the pauses after errors.
        self._batches = 0
        self._wake: asyncio.Event = asyncio.Event()
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    def submit(self, delivery: Delivery) -> None:
        """Take a delivery whose settlement is decided. Only on the event loop's thread."""
        if not self._pending:
            self._wake.set()
            self._idle.clear()
        self._pending.append(delivery)

    def drop_lost(self, delivery: Delivery, reason: str) -> None:
        """Drop a delivery that needs no settlement because its lease is gone."""
        self._held.discard(delivery)
        self._end_lost(delivery, events.LEASE_LOST, reason)
        self._events.messages_settled()

    def on_extended(self) -> None:
        """Submit the deliveries that waited for their extension."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for delivery in waiting:
                self.submit(delivery)

    async def run(self) -> None:
        """Send batches until cancelled."""
        while True:
            while not self._pending:
                self._wake.clear()
                await self._wake.wait()
            await self.send()

    async def flush(self, patience: float) -> bool:
        """Wait until everything is settled. Return False if `patience` seconds were not enough."""
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def last_flush(self, patience: float) -> bool:
        """Settle what is left when no `run` is active. Return False if `patience` seconds were not enough."""
        try:
            async with asyncio.timeout(patience):
                self._aside.submit_all()
                while self._pending or self._waiting or self._aside.waiting:
                    if self._pending:
                        await self.send()
                    else:
                        await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    async def send(self) -> None:
        """Send what is pending."""
        batch, self._pending = self._pending, []
        busy = self._stop_extending(batch)
        if busy:
            self._waiting.extend(busy)
            batch = [delivery for delivery in batch if delivery.settling]
        self._batches += 1
        try:
            await self._send(batch)
        except BaseException:
            # The task was cancelled, or the backend has a bug. The last flush can still send the batch.
            self._pending[:0] = [delivery for delivery in batch if delivery in self._held]
            raise
        finally:
            self._batches -= 1
            if not (self._pending or self._waiting or self._batches or self._aside.waiting):
                self._idle.set()

    async def _send(self, deliveries: list[Delivery]) -> None:
        """Settle deliveries in batches.

        A batch that fails goes behind the others and halves the size of the next one, and a success doubles it. So soon
        after an outage batches are as large as before. A settlement that the store cannot take while it takes others is
        set aside, and delays no other.
        """
        size = len(deliveries)
        while deliveries:
            batch, deliveries = deliveries[:size], deliveries[size:]
            at = self._clock.time()
            try:
                refused = await self._settle(batch)
            except BACKEND_ERRORS as error:
                unstored = self._end_stored(batch, error, at)
                if unstored is not None:
                    self._set_aside(unstored, error)
                    continue
                pause = self._outage.record_failure(error)
                size = (len(batch) + 1) // 2
                batch = self._abandon_expired(batch, error)
                if len(batch) == 1 and is_final_for_message(error):
                    batch = self._instead(batch[0], error)
                deliveries += batch
                await asyncio.sleep(pause)
                if len(deliveries) == 1 and self._pending:
                    # With others beside it, the store shows whether it cannot take this one alone.
                    self._pending[:0] = deliveries
                    return
            else:
                size *= 2
                self._outage.record_success()
                self._aside.forget(batch)
                if refused:
                    await self._find_cancelled(batch, refused)
                self._end(batch, refused, at)

    async def _find_cancelled(self, batch: list[Delivery], refused: list[Settlement]) -> None:
        """Find out which messages were cancelled so shortly before their end that no reap has told it."""
        lost = {id(settlement) for settlement in refused}
        asked: dict[str, dict[str, Delivery]] = {}
        for delivery in batch:
            if id(delivery.settlement) in lost and delivery.gone is not CancelReason.CANCELLED:
                message = delivery.lease.message
                asked.setdefault(message.queue, {})[MessageRef(message.id, delivery.task or None)] = delivery
        for queue, deliveries in asked.items():
            try:
                found = await self._backend.find(queue, list(deliveries))
            except BACKEND_ERRORS:
                # It is reported as a lost lease, which it is too.
                continue
            for stored in found:
                if stored.state is State.FAILED and code_of(stored.error) == CANCELLED:
                    deliveries[stored.message.id].gone = CancelReason.CANCELLED

    def _end_stored(self, batch: list[Delivery], error: BaseException, at: float) -> list[Delivery] | None:
        """End what was stored of a batch in which an error concerns single messages, and return the others.

        Returns:
            None: as far as is known, the error concerns the store.
        """
        part = error.__cause__
        if not isinstance(part, SettledInPart):
            return batch if self._aside.knows(batch) else None
        left = {id(settlement) for settlement in part.unstored}
        stored = [delivery for delivery in batch if id(delivery.settlement) not in left]
        self._outage.record_success()
        self._aside.forget(stored)
        self._end(stored, list(part.refused), at)
        return [delivery for delivery in batch if id(delivery.settlement) in left]

    def _set_aside(self, batch: list[Delivery], error: BaseException) -> None:
        """Let deliveries wait, each for its own next try."""
        batch = self._abandon_expired(batch, error)
        if len(batch) == 1 and is_final_for_message(error):
            batch = self._instead(batch[0], error)
        for delivery in batch:
            self._aside.add(delivery, error)

    def _instead(self, delivery: Delivery, error: BaseException) -> list[Delivery]:
        """Fail a message whose outcome the store can never take. If it cannot be failed either, its lease expires."""
        settlement = delivery.settlement
        if settlement is None or settlement.action is SettleAction.FAIL_PERM:
            self._abandon([delivery], error)
            return []
        reason = f"its outcome ({settlement.action.value}) cannot be stored: {one_line(str(error))}"
        delivery.settle(
            SettleAction.FAIL_PERM, error=reason if settlement.error is None else f"{reason}\n\n{settlement.error}"
        )
        return [delivery]

    async def _settle(self, batch: list[Delivery]) -> list[Settlement]:
        settlements = [delivery.settlement for delivery in batch if delivery.settlement is not None]
        count = len(batch)
        self._state.settling += count
        self._events.settlements_sent()
        try:
            if self._records.in_use:
                # First: a message that has ended always has its result.
                await self._records.store(batch)
            return await self._backend.settle(settlements)
        finally:
            self._state.settling -= count

    def _abandon_expired(self, batch: list[Delivery], error: BaseException) -> list[Delivery]:
        now = self._clock.monotonic()
        self._abandon([delivery for delivery in batch if delivery.expires <= now], error)
        return [delivery for delivery in batch if delivery.expires > now]

    def _abandon(self, deliveries: list[Delivery], error: BaseException) -> None:
        for delivery in deliveries:
            self._held.discard(delivery)
            self._aside.forget([delivery])
            self._end_lost(delivery, events.SETTLEMENT_ABANDONED, one_line(str(error)))
        if deliveries:
            self._events.messages_settled()

    def _end(self, batch: list[Delivery], refused: list[Settlement], at: float) -> None:
        held = self._held
        held.difference_update(batch)
        if refused:
            lost = {id(settlement) for settlement in refused}
            for delivery in batch:
                if id(delivery.settlement) in lost:
                    self._end_lost(delivery, events.LEASE_LOST, "the store refused the outcome")
            batch = [delivery for delivery in batch if id(delivery.settlement) not in lost]
        counts = self._counts
        acked = counts.acked
        telling = self._debug or bool(self._observers)
        for delivery in batch:
            settlement = delivery.settlement
            if settlement is None:
                continue
            if settlement.action is SettleAction.ACK:
                counts.acked += 1
                if telling:
                    self._log_acked(delivery)
            else:
                self._end_unacked(delivery, settlement)
        if self._listener is not None and batch:
            self._listener.leases_settled(batch, at, counts.acked - acked == len(batch))
        self._events.messages_settled()

    def _log_acked(self, delivery: Delivery) -> None:
        if self._debug:
            self._log.debug(
                events.MESSAGE_ACKED, **delivery.fields(), **{events.DURATION_S: round(delivery.duration, 6)}
            )
        self._observe(delivery, Outcome.ACKED, None)

    def _end_unacked(self, delivery: Delivery, settlement: Settlement) -> None:
        outcome = _OUTCOMES[settlement.action]
        more: dict[str, Any] = {events.OUTCOME: outcome.value, events.DURATION_S: round(delivery.duration, 6)}
        if settlement.error:
            more[events.ERROR_TYPE] = error_type(delivery.error)
            more[events.ERROR] = one_line(settlement.error)
        if outcome is Outcome.RETRIED:
            self._counts.retried += 1
            self._log.warning(events.MESSAGE_RETRIED, **delivery.fields(), **more, delay=round(settlement.delay, 3))
        elif outcome is Outcome.FAILED:
            self._counts.failed += 1
            self._log.error(events.MESSAGE_FAILED, **delivery.fields(), **more)
        else:
            self._counts.released += 1
            if delivery.released_because is not None:
                more[events.ERROR] = one_line(delivery.released_because)
            self._log.info(events.MESSAGE_RELEASED, **delivery.fields(), **more)
        self._observe(delivery, outcome, settlement.error)

    def _end_lost(self, delivery: Delivery, event: str, reason: str) -> None:
        if delivery.gone is CancelReason.CANCELLED:
            self._end_cancelled(delivery)
            return
        self._counts.lost += 1
        say = self._log.error if event == events.SETTLEMENT_ABANDONED else self._log.warning
        say(event, **delivery.fields(), **{events.DURATION_S: round(delivery.duration, 6), events.ERROR: reason})
        self._observe(delivery, Outcome.LOST, reason)
        if self._listener is not None:
            self._listener.lease_lost(delivery, reason)

    def _end_cancelled(self, delivery: Delivery) -> None:
        self._counts.cancelled += 1
        self._log.info(
            events.MESSAGE_CANCELLED, **delivery.fields(), **{events.DURATION_S: round(delivery.duration, 6)}
        )
        self._observe(delivery, Outcome.CANCELLED, None)
        if self._listener is not None:
            self._listener.lease_lost(delivery, "it was cancelled")

    def _observe(self, delivery: Delivery, outcome: Outcome, error: str | None) -> None:
        for observer in self._observers:
            try:
                observer.message_settled(delivery, outcome, error, delivery.duration)
            except Exception as problem:  # noqa: BLE001 - an observer must not stop the work
                self._log.error(
                    events.OBSERVER_FAILED,
                    **{events.ERROR_TYPE: type(problem).__name__, events.ERROR: summary_of(problem)},
                )
