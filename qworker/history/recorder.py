"""What a worker tells the history: gathered from its loops for a moment, made into batches, and handed to the backend.

A message that ends soon after its lease is told once, when it ends. One that runs for longer is told when it is leased as well, so
that the history of a worker that dies shows what it was at. What was gathered for less than `_EVERY` seconds dies with the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from qworker import events
from qworker.clock import Clock
from qworker.history.batch import EventBatch
from qworker.history.event import Kind
from qworker.logs import one_line
from qworker.message import Settle
from qworker.run import Run
from qworker.task import RawHandler

__all__ = ["Recorder"]

# Seconds between two hand-overs, and messages after which there is one at once.
_EVERY = 0.25
_ENOUGH = 256
# Messages in one record.
_MOST = 512
# Characters of an error, and of a task's name that nobody here registers.
_MOST_ERROR, _MOST_NAME = 300, 200

T = TypeVar("T")

_queue: Callable[[Run], str] = attrgetter("lease.message.queue")
_WITH_ERROR = frozenset({"retried", "failed", "lost"})
_KINDS: dict[Settle, Kind] = {
    Settle.ACK: "acked",
    Settle.FAIL_TMP: "retried",
    Settle.FAIL_PERM: "failed",
    Settle.RELEASE: "released",
}


class Recorder:
    """A worker's `Transitions`, for the history.

    Args:
        record: the backend's.
        held: the worker's leases.
        queues: what it works on.
        worker: its name.
        clock: the wall clock.
        log: the worker's logger.
    """

    def __init__(
        self,
        record: Callable[[Sequence[EventBatch]], None],
        held: AbstractSet[Run],
        queues: Sequence[str],
        worker: str,
        *,
        clock: Clock,
        log: Any,
    ) -> None:
        self._record = record
        self._held = held
        self._one_queue = queues[0] if len(queues) == 1 else None
        self._worker = worker
        self._clock = clock
        self._log = log
        # Those whose lease the history knows of.
        self._told: set[Run] = set()
        self._ready: list[EventBatch] = []
        self._acks = _Acks(worker)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._broken = False

    # -- what the loops tell -----------------------------------------------------------------------------------------

    def leased(self) -> None:
        """See to it that what is held for long is told."""
        if self._timer is None:
            self._timer = self._loop.call_later(_EVERY, self._tick)

    def extended(self, runs: Sequence[Run]) -> None:
        """Tell the renewals, and before them the leases."""
        self._tell_leases([run for run in runs if run in self._held])
        self._tell("extended", self._clock.time(), [run for run in runs if run in self._told])

    def settled(self, runs: Sequence[Run], at: float, acked: bool) -> None:
        """Tell ends."""
        if acked and self._one_queue is not None and (not self._told or self._told.isdisjoint(runs)):
            # The usual end. Their columns are taken now: a run that is kept for later has left the processor's cache by then.
            for first in range(0, len(runs), _MOST):
                self._acks.add(runs[first : first + _MOST], at, self._one_queue)
                if len(self._acks.ids) >= _ENOUGH:
                    self._acks.move_to(self._ready)
            if self._ready:
                self.flush()
        else:
            self._end(runs, at, None)

    def lost(self, run: Run, why: str) -> None:
        """Tell an end."""
        self._end((run,), self._clock.time(), why)

    def close(self) -> None:
        """Hand over everything; nothing is told afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.flush()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _end(self, runs: Sequence[Run], at: float, why: str | None) -> None:
        def kind_of(run: Run) -> tuple[Kind, bool]:
            settlement = run.settlement
            kind: Kind = "lost" if why is not None or settlement is None else _KINDS[settlement.how]
            return kind, run not in self._told

        for (kind, begins), group in groupby(sorted(runs, key=kind_of), kind_of):
            self._tell(kind, at, list(group), begins=begins, why=why)
        self._told.difference_update(runs)

    def _tell_leases(self, runs: Sequence[Run]) -> None:
        """Those that were not told yet, and whose task is known."""
        untold = [run for run in runs if run.task and run not in self._told]
        self._told.update(untold)
        self._tell("leased", None, untold, begins=True)

    def _tell(
        self, kind: Kind, at: float | None, runs: Sequence[Run], *, begins: bool = False, why: str | None = None
    ) -> None:
        """Gather one transition of some runs; `at` is that of their leases where it is None."""
        # What was gathered before comes first.
        self._acks.move_to(self._ready)
        for _, group in groupby(sorted(runs, key=_queue), _queue):
            some = list(group)
            self._ready += [
                self._batch(kind, at, some[first : first + _MOST], begins, why) for first in range(0, len(some), _MOST)
            ]
        if len(self._ready) >= _ENOUGH:
            self.flush()

    def _batch(self, kind: Kind, at: float | None, runs: list[Run], begins: bool, why: str | None) -> EventBatch:
        messages = [run.lease.message for run in runs]
        leased_at = [run.leased_at for run in runs]
        ended = kind not in {"leased", "extended"}
        return EventBatch(
            event=kind,
            queue=messages[0].queue,
            worker=self._worker,
            at=[*leased_at] if at is None else at,
            id=[message.id for message in messages],
            task=_tasks(runs),
            tries=[message.tries for message in messages],
            token=[run.lease.token for run in runs],
            enqueued_at=[message.enqueued_at for message in messages],
            duration_us=[int(run.duration * 1e6) if run.started else None for run in runs] if ended else None,
            error=[_why(run, why) for run in runs] if kind in _WITH_ERROR else None,
            begins=begins,
            leased_at=[*leased_at] if begins and ended else None,
        )

    # -- handing over ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        before = self._clock.time() - _EVERY
        self._tell_leases([run for run in self._held if run.leased_at <= before])
        self.flush()
        self._timer = self._loop.call_later(_EVERY, self._tick) if self._held else None

    def flush(self) -> None:
        """Hand over what was gathered."""
        self._acks.move_to(self._ready)
        batches, self._ready = self._ready, []
        if not batches or self._broken:
            return
        try:
            self._record(batches)
        except Exception as error:  # noqa: BLE001 - whoever watches must not stop the work
            self._broken = True
            self._log.error(
                events.OBSERVER_FAILED, **{events.ERROR_TYPE: type(error).__name__, events.ERROR: one_line(str(error))}
            )


class _Acks:
    """The usual ends of one queue's messages, as columns that grow. What was settled at once is a group."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._clear()

    def _clear(self) -> None:
        self._queue = ""
        self.ids: list[str] = []
        self._tries: list[int] = []
        self._enqueued_at: list[float | None] = []
        self._durations: list[int | None] = []
        # By group.
        self._sizes: list[int] = []
        self._at: list[float] = []
        self._tasks: list[str | list[str | None] | None] = []
        self._tokens: list[list[int | None]] = []
        self._leased_at: list[list[float | None]] = []

    def add(self, runs: Sequence[Run], at: float, queue: str) -> None:
        """Take the columns of some."""
        leases = [run.lease for run in runs]
        messages = [lease.message for lease in leases]
        self._queue = queue
        self.ids += [message.id for message in messages]
        self._tries += [message.tries for message in messages]
        self._enqueued_at += [message.enqueued_at for message in messages]
        self._durations += [int(run.duration * 1e6) for run in runs]
        self._sizes.append(len(runs))
        self._at.append(at)
        self._tasks.append(_tasks(runs))
        self._tokens.append([lease.token for lease in leases])
        self._leased_at.append([run.leased_at for run in runs])

    def move_to(self, batches: list[EventBatch]) -> None:
        """Make a batch of them, and begin anew."""
        if not self.ids:
            return
        batches.append(
            EventBatch(
                event="acked",
                queue=self._queue,
                worker=self._worker,
                at=self._at,
                id=self.ids,
                groups=self._sizes,
                task=self._task_column(),
                tries=self._tries if any(self._tries) else 0,
                token=_by_group(self._tokens),
                enqueued_at=self._enqueued_at,
                duration_us=self._durations,
                begins=True,
                leased_at=_by_group(self._leased_at),
            )
        )
        self._clear()

    def _task_column(self) -> str | list[str | None] | None:
        first = self._tasks[0]
        if not isinstance(first, list) and all(task == first for task in self._tasks):
            return first
        column: list[str | None] = []
        for task, size in zip(self._tasks, self._sizes, strict=True):
            column += task if isinstance(task, list) else [task] * size
        return column


def _by_group(groups: list[list[T]]) -> list[T]:
    """One value for each group, where each has only one; else one for each message."""
    if all(group.count(group[0]) == len(group) for group in groups):
        return [group[0] for group in groups]
    return [value for group in groups for value in group]


def _tasks(runs: Sequence[Run]) -> str | list[str | None] | None:
    """The names of the tasks; of raw messages None."""
    handlers = {run.handler for run in runs}
    if len(handlers) == 1:
        (handler,) = handlers
        if handler is not None:
            return None if isinstance(handler, RawHandler) else handler.name
    return [None if isinstance(run.handler, RawHandler) or not run.task else run.task[:_MOST_NAME] for run in runs]


def _why(run: Run, why: str | None) -> str | None:
    error = why if why is not None else None if run.settlement is None else run.settlement.error
    return one_line(error)[:_MOST_ERROR] if error else None
