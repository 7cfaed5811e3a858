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
from qworker.history.batch import EventBatch
from qworker.history.event import Kind
from qworker.logs import one_line
from qworker.message import SettleAction
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
_KINDS: dict[SettleAction, Kind] = {
    SettleAction.ACK: "acked",
    SettleAction.FAIL_TMP: "retried",
    SettleAction.FAIL_PERM: "failed",
    SettleAction.RELEASE: "released",
}


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
        # The runs whose lease is recorded.
        self._told: set[Delivery] = set()
        self._ready: list[EventBatch] = []
        # By queue.
        self._acks: dict[str, AckColumns] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._unless_broken = _DisableOnError(log)

    # -- called by the loops -----------------------------------------------------------------------------------------

    def leased(self) -> None:
        """Start the timer that records leases which are held longer."""
        if self._timer is None:
            self._timer = self._loop.call_later(_EVERY, self._tick)

    def extended(self, runs: Sequence[Delivery]) -> None:
        """Record that leases were extended, and before it that they were taken."""
        with self._unless_broken:
            self._tell_leases([run for run in runs if run in self._held])
            self._tell("extended", self._clock.time(), [run for run in runs if run in self._told])

    def settled(self, runs: Sequence[Delivery], at: float, acked: bool) -> None:
        """Record the outcomes of settled runs."""
        with self._unless_broken:
            if not acked or (self._told and not self._told.isdisjoint(runs)):
                self._end(runs, at, None)
                return
            # The usual end. Its columns are taken now, while the runs are in the processor's cache.
            for queue, some in [(self._one_queue, runs)] if self._one_queue else by_queue(runs):
                self._add_acks(some, at, queue)

    def lost(self, run: Delivery, why: str) -> None:
        """Record that a run's lease was lost."""
        with self._unless_broken:
            self._end((run,), self._clock.time(), why)

    def close(self) -> None:
        """Append everything. Nothing is recorded afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._unless_broken:
            self.flush()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _add_acks(self, runs: Sequence[Delivery], at: float, queue: str) -> None:
        acks = self._acks.get(queue)
        if acks is None:
            acks = self._acks[queue] = AckColumns(self._worker, queue)
        for first in range(0, len(runs), _MOST):
            acks.add(runs[first : first + _MOST], at)
            if len(acks.ids) >= _ENOUGH:
                self.flush()

    def _end(self, runs: Sequence[Delivery], at: float, why: str | None) -> None:
        def kind_of(run: Delivery) -> tuple[Kind, bool]:
            settlement = run.settlement
            kind: Kind = "lost" if why is not None or settlement is None else _KINDS[settlement.action]
            return kind, run not in self._told

        for (kind, begins), group in groupby(sorted(runs, key=kind_of), kind_of):
            self._tell(kind, at, list(group), begins=begins, why=why)
        self._told.difference_update(runs)

    def _tell_leases(self, runs: Sequence[Delivery]) -> None:
        """Record the leases that are not recorded yet, of runs whose task is known."""
        untold = [run for run in runs if run.task and run not in self._told]
        self._told.update(untold)
        self._tell("leased", None, untold, begins=True)

    def _tell(
        self, kind: Kind, at: float | None, runs: Sequence[Delivery], *, begins: bool = False, why: str | None = None
    ) -> None:
        """Collect one transition of some runs. If `at` is None, it is the time of their leases."""
        # What was collected before comes first.
        self._move_acks()
        most = _MOST_WITH_TEXT if self._texts and kind == "retried" else _MOST
        for _, some in by_queue(runs):
            self._ready += [
                self._batch(kind, at, some[first : first + most], begins, why) for first in range(0, len(some), most)
            ]
        if len(self._ready) >= _ENOUGH:
            self.flush()

    def _batch(self, kind: Kind, at: float | None, runs: list[Delivery], begins: bool, why: str | None) -> EventBatch:
        messages = [run.lease.message for run in runs]
        leased_at = [run.leased_at for run in runs]
        ended = kind not in {"leased", "extended"}
        return EventBatch(
            kind=kind,
            queue=messages[0].queue,
            worker=self._worker,
            at=[*leased_at] if at is None else at,
            id=[message.id for message in messages],
            task=task_column(runs),
            tries=[message.tries for message in messages],
            token=[run.lease.token for run in runs],
            enqueued_at=[message.enqueued_at for message in messages],
            duration_us=[int(run.duration * 1e6) if run.started else None for run in runs] if ended else None,
            error=[_why(run, why) for run in runs] if kind in _WITH_ERROR else None,
            text=_text_column(runs) if self._texts and kind == "retried" else None,
            begins=begins,
            leased_at=[*leased_at] if begins and ended else None,
        )

    # -- appending ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        with self._unless_broken:
            before = self._clock.time() - _EVERY
            self._tell_leases([run for run in self._held if run.leased_at <= before])
            self.flush()
        self._timer = self._loop.call_later(_EVERY, self._tick) if self._held else None

    def flush(self) -> None:
        """Append what was collected."""
        self._move_acks()
        batches, self._ready = self._ready, []
        if batches and not self._unless_broken.broken:
            self._append(batches)

    def _move_acks(self) -> None:
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


def _why(run: Delivery, why: str | None) -> str | None:
    error = why if why is not None else None if run.settlement is None else run.settlement.error
    return one_line(error)[:_MOST_ERROR] if error else None


def _text_column(runs: Sequence[Delivery]) -> str | list[str | None] | None:
    """Return the errors that have several lines. If all are equal, return the error once."""
    errors = [None if run.settlement is None else run.settlement.error for run in runs]
    texts = [error if error and "\n" in error else None for error in errors]
    return texts[0] if len(set(texts)) == 1 else texts
