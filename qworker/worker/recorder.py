"""The recorder of a worker: it collects the transitions of its loops, makes batches, and appends them to the history.

A message that ends soon after its lease is recorded once, when it ends. One that runs longer is also recorded when it
is leased, so that the history of a dead worker shows what it worked on. Transitions of the last `_EVERY` seconds are
lost if the worker is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from typing import Any

from qworker import log_events as events
from qworker.clock import Clock
from qworker.context import CancelReason
from qworker.history.batch import EventBatch
from qworker.history.event import Kind
from qworker.logs import one_line
from qworker.message import OUTCOMES
from qworker.worker.ack_columns import AckColumns, by_queue, task_column
from qworker.worker.delivery import Delivery

__all__ = ["Recorder"]

# Seconds between two appends, and the number of messages that are appended at once.
_EVERY = 0.25
_ENOUGH = 512
# Messages in one record, and in one with complete errors.
_MOST = 512
_MOST_WITH_TEXT = 16
# Characters that are kept of an error.
_MOST_ERROR = 300

_WITH_ERROR = frozenset({"retried", "failed", "lost"})


class Recorder:
    """The `LeaseListener` of a worker, recorded in the history.

    Args:
        append: Appends batches to the history.
        held: The worker's leases.
        queues: The queues of the worker.
        worker: Its name.
        clock: The wall clock.
        log: The worker's logger.
        texts: Whether the complete error of a retried message is recorded.
    """

    def __init__(
        self,
        append: Callable[[Sequence[EventBatch]], None],
        held: AbstractSet[Delivery],
        queues: Sequence[str],
        worker: str,
        *,
        clock: Clock,
        log: Any,
        texts: bool = False,
    ) -> None:
        self._texts = texts
        self._append = append
        self._held = held
        self._one_queue = queues[0] if len(queues) == 1 else None
        self._worker = worker
        self._clock = clock
        self._log = log
        # The deliveries whose lease is recorded.
        self._recorded: set[Delivery] = set()
        self._ready: list[EventBatch] = []
        # The acked messages of each queue.
        self._acks: dict[str, AckColumns] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._disable_on_error = _DisableOnError(log)

    # -- called by the loops -----------------------------------------------------------------------------------------

    def leases_taken(self) -> None:
        """Start the timer that records leases which are held longer."""
        if self._timer is None:
            self._timer = self._loop.call_later(_EVERY, self._tick)

    def leases_extended(self, deliveries: Sequence[Delivery]) -> None:
        """Record that leases were extended, and before it that they were taken."""
        with self._disable_on_error:
            self._record_leases([delivery for delivery in deliveries if delivery in self._held])
            self._record(
                "extended", self._clock.time(), [delivery for delivery in deliveries if delivery in self._recorded]
            )

    def leases_settled(self, deliveries: Sequence[Delivery], at: float, acked: bool) -> None:
        """Record the outcomes of settled deliveries."""
        with self._disable_on_error:
            if not acked or (self._recorded and not self._recorded.isdisjoint(deliveries)):
                self._record_ends(deliveries, at, None)
                return
            # Acks are the usual case. Their columns are taken now, while the deliveries are in the processor's cache.
            for queue, some in [(self._one_queue, deliveries)] if self._one_queue else by_queue(deliveries):
                self._add_acks(some, at, queue)

    def lease_lost(self, delivery: Delivery, reason: str) -> None:
        """Record that a lease was lost."""
        with self._disable_on_error:
            self._record_ends((delivery,), self._clock.time(), reason)

    def close(self) -> None:
        """Append everything. Nothing is recorded afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._disable_on_error:
            self.flush()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _add_acks(self, deliveries: Sequence[Delivery], at: float, queue: str) -> None:
        acks = self._acks.get(queue)
        if acks is None:
            acks = self._acks[queue] = AckColumns(self._worker, queue)
        for first in range(0, len(deliveries), _MOST):
            acks.add(deliveries[first : first + _MOST], at)
            if len(acks.ids) >= _ENOUGH:
                self.flush()

    def _record_ends(self, deliveries: Sequence[Delivery], at: float, reason: str | None) -> None:
        def kind_of(delivery: Delivery) -> tuple[Kind, bool]:
            settlement = delivery.settlement
            kind: Kind = "lost" if reason is not None or settlement is None else OUTCOMES[settlement.action]
            if kind == "lost" and delivery.gone is CancelReason.CANCELLED:
                kind = "cancelled"
            return kind, delivery not in self._recorded

        for (kind, begins), group in groupby(sorted(deliveries, key=kind_of), kind_of):
            self._record(kind, at, list(group), begins=begins, reason=reason)
        self._recorded.difference_update(deliveries)

    def _record_leases(self, deliveries: Sequence[Delivery]) -> None:
        """Record the leases that are not recorded yet, of deliveries whose task is known."""
        unrecorded = [delivery for delivery in deliveries if delivery.task and delivery not in self._recorded]
        self._recorded.update(unrecorded)
        self._record("leased", None, unrecorded, begins=True)

    def _record(
        self,
        kind: Kind,
        at: float | None,
        deliveries: Sequence[Delivery],
        *,
        begins: bool = False,
        reason: str | None = None,
    ) -> None:
        """Collect one transition of some deliveries. If `at` is None, it is the time of their leases."""
        # Transitions that were collected before come first.
        self._flush_acks()
        most = _MOST_WITH_TEXT if self._texts and kind == "retried" else _MOST
        for _, some in by_queue(deliveries):
            self._ready += [
                self._batch(kind, at, some[first : first + most], begins, reason) for first in range(0, len(some), most)
            ]
        if len(self._ready) >= _ENOUGH:
            self.flush()

    def _batch(
        self, kind: Kind, at: float | None, deliveries: list[Delivery], begins: bool, reason: str | None
    ) -> EventBatch:
        messages = [delivery.lease.message for delivery in deliveries]
        leased_at = [delivery.leased_at for delivery in deliveries]
        ended = kind not in {"leased", "extended"}
        return EventBatch(
            kind=kind,
            queue=messages[0].queue,
            worker=self._worker,
            at=[*leased_at] if at is None else at,
            id=[message.id for message in messages],
            task=task_column(deliveries),
            tries=[message.tries for message in messages],
            token=[delivery.lease.token for delivery in deliveries],
            enqueued_at=[message.enqueued_at for message in messages],
            duration_us=[int(delivery.duration * 1e6) if delivery.started else None for delivery in deliveries]
            if ended
            else None,
            error=[_error_line(delivery, reason) for delivery in deliveries] if kind in _WITH_ERROR else None,
            text=_text_column(deliveries) if self._texts and kind == "retried" else None,
            begins=begins,
            leased_at=[*leased_at] if begins and ended else None,
        )

    # -- appending ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        with self._disable_on_error:
            before = self._clock.time() - _EVERY
            self._record_leases([delivery for delivery in self._held if delivery.leased_at <= before])
            self.flush()
        self._timer = self._loop.call_later(_EVERY, self._tick) if self._held else None

    def flush(self) -> None:
        """Append the collected events."""
        self._flush_acks()
        batches, self._ready = self._ready, []
        if batches and not self._disable_on_error.broken:
            self._append(batches)

    def _flush_acks(self) -> None:
        for acks in self._acks.values():
            acks.move_to(self._ready)


class _DisableOnError:
    """A context that keeps an error of the recorder from stopping the worker. After an error nothing is recorded."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.broken = False

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: object) -> bool:
        """Log the first error."""
        if not isinstance(error, Exception):
            return False
        if not self.broken:
            self.broken = True
            self._log.error(
                events.OBSERVER_FAILED, **{events.ERROR_TYPE: type(error).__name__, events.ERROR: one_line(str(error))}
            )
        return True


def _error_line(delivery: Delivery, reason: str | None) -> str | None:
    error = reason if reason is not None else None if delivery.settlement is None else delivery.settlement.error
    return one_line(error)[:_MOST_ERROR] if error else None


def _text_column(deliveries: Sequence[Delivery]) -> str | list[str | None] | None:
    """Return the errors that have several lines. If all are equal, return the error once."""
    errors = [None if delivery.settlement is None else delivery.settlement.error for delivery in deliveries]
    texts = [error if error and "\n" in error else None for error in errors]
    return texts[0] if len(set(texts)) == 1 else texts
