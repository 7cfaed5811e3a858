"""What a worker tells the history: gathered from its loops for a moment, made into batches, and handed to the backend.

A message that ends soon after its lease is told once, when it ends. One that runs for longer is told when it is leased as well, so
that the history of a worker that dies shows what it was at. What was gathered for less than `_EVERY` seconds dies with the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

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
_MOST = 256
# Characters of an error, and of a task's name that nobody here registers.
_MOST_ERROR, _MOST_NAME = 300, 200

_queue: Callable[[Run], str] = attrgetter("lease.message.queue")
_is_told: Callable[[Run], bool] = attrgetter("told")
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
        worker: its name.
        clock: the wall clock.
        log: the worker's logger.
    """

    def __init__(
        self,
        record: Callable[[Sequence[EventBatch]], None],
        held: AbstractSet[Run],
        worker: str,
        *,
        clock: Clock,
        log: Any,
    ) -> None:
        self._record = record
        self._held = held
        self._worker = worker
        self._clock = clock
        self._log = log
        # In order: when, which, whether all were acked, and why they were lost.
        self._ended: list[tuple[float, Sequence[Run], bool, str | None]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._broken = False

    # -- what the loops tell -----------------------------------------------------------------------------------------

    def leased(self, runs: Sequence[Run]) -> None:
        """Note when."""
        now = self._clock.time()
        for run in runs:
            run.leased_at = now
        if self._timer is None:
            self._timer = self._loop.call_later(_EVERY, self._tick)

    def extended(self, runs: Sequence[Run]) -> None:
        """Tell the renewals, and before them the leases."""
        batches = self._begun([run for run in runs if run in self._held])
        told = [run for run in runs if run.told]
        self._hand_over([*batches, *self._of_each("extended", self._clock.time(), told)])

    def settled(self, runs: Sequence[Run], at: float, acked: bool) -> None:
        """Gather ends."""
        self._end(runs, at, acked, None)

    def lost(self, run: Run, why: str) -> None:
        """Gather an end."""
        self._end((run,), self._clock.time(), False, why)

    def _end(self, runs: Sequence[Run], at: float, acked: bool, why: str | None) -> None:
        self._ended.append((at, runs, acked, why))
        self._count += len(runs)
        if self._count >= _ENOUGH:
            self.flush()

    def flush(self) -> None:
        """Hand over what was gathered."""
        ended, self._ended = self._ended, []
        self._count = 0
        if not ended:
            return
        batches: list[EventBatch] = []
        for (acked, why), group in groupby(ended, lambda one: (one[2], one[3])):
            if acked:
                batches += self._acked([(at, runs) for at, runs, _, _ in group])
            else:
                batches += chain.from_iterable(self._ends(at, runs, why) for at, runs, _, _ in group)
        self._hand_over(batches)

    def close(self) -> None:
        """Hand over everything; nothing is told afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.flush()

    def _tick(self) -> None:
        self.flush()
        before = self._clock.time() - _EVERY
        self._hand_over(self._begun([run for run in self._held if run.leased_at <= before]))
        self._timer = self._loop.call_later(_EVERY, self._tick) if self._held else None

    def _hand_over(self, batches: list[EventBatch]) -> None:
        if not batches or self._broken:
            return
        try:
            self._record(batches)
        except Exception as error:  # noqa: BLE001 - whoever watches must not stop the work
            self._broken = True
            self._log.error(
                events.OBSERVER_FAILED, **{events.ERROR_TYPE: type(error).__name__, events.ERROR: one_line(str(error))}
            )

    # -- batches -----------------------------------------------------------------------------------------------------

    def _acked(self, ended: list[tuple[float, Sequence[Run]]]) -> list[EventBatch]:
        """The usual end, of many at once."""
        runs = [run for _, some in ended for run in some]
        if any(map(_is_told, runs)) or len(set(map(_queue, runs))) > 1:
            return list(chain.from_iterable(self._ends(at, some, None) for at, some in ended))
        at = [moment for moment, some in ended for _ in some] if len(ended) > 1 else ended[0][0]
        return self._batches("acked", at, runs, begins=True)

    def _ends(self, at: float, runs: Sequence[Run], why: str | None) -> list[EventBatch]:
        """Ends of any kind, told one after another."""

        def kind_of(run: Run) -> tuple[Kind, str, bool]:
            settlement = run.settlement
            kind: Kind = "lost" if why is not None or settlement is None else _KINDS[settlement.how]
            return kind, run.lease.message.queue, not run.told

        batches: list[EventBatch] = []
        for (kind, _, begins), group in groupby(sorted(runs, key=kind_of), kind_of):
            some = list(group)
            batches += self._batches(kind, at, some, begins=begins, why=why)
        return batches

    def _begun(self, runs: Iterable[Run]) -> list[EventBatch]:
        """The leases that were not told yet, of those whose task is known."""
        untold = [run for run in runs if not run.told and run.task]
        for run in untold:
            run.told = True
        return self._of_each("leased", None, untold)

    def _of_each(self, kind: Kind, at: float | None, runs: Sequence[Run]) -> list[EventBatch]:
        groups = groupby(sorted(runs, key=_queue), _queue)
        return [one for _, some in groups for one in self._batches(kind, at, list(some), begins=kind == "leased")]

    def _batches(
        self, kind: Kind, at: float | list[float] | None, runs: list[Run], *, begins: bool, why: str | None = None
    ) -> list[EventBatch]:
        """Records of one kind for messages of one queue."""
        if len(runs) <= _MOST:
            return [self._batch(kind, at, runs, begins, why)]
        return [
            self._batch(kind, at[i : i + _MOST] if isinstance(at, list) else at, runs[i : i + _MOST], begins, why)
            for i in range(0, len(runs), _MOST)
        ]

    def _batch(
        self, kind: Kind, at: float | list[float] | None, runs: list[Run], begins: bool, why: str | None
    ) -> EventBatch:
        leases = [run.lease for run in runs]
        messages = [lease.message for lease in leases]
        leased_at: list[float | None] = [run.leased_at for run in runs] if begins else []
        tries = [message.tries for message in messages]
        ended = kind not in {"leased", "extended"}
        return EventBatch(
            event=kind,
            queue=messages[0].queue,
            worker=self._worker,
            at=[run.leased_at for run in runs] if at is None else at,
            id=[message.id for message in messages],
            task=_tasks(runs),
            tries=tries if any(tries) else 0,
            token=[lease.token for lease in leases],
            enqueued_at=[message.enqueued_at for message in messages],
            duration_us=[int(run.duration * 1e6) if run.started else None for run in runs] if ended else None,
            error=[_why(run, why) for run in runs] if kind in _WITH_ERROR else None,
            begins=begins,
            leased_at=leased_at if begins and ended else None,
        )


def _tasks(runs: list[Run]) -> str | list[str | None] | None:
    handlers = {run.handler for run in runs}
    if len(handlers) == 1:
        (handler,) = handlers
        if handler is not None:
            return None if isinstance(handler, RawHandler) else handler.name
    return [None if isinstance(run.handler, RawHandler) or not run.task else run.task[:_MOST_NAME] for run in runs]


def _why(run: Run, why: str | None) -> str | None:
    error = why if why is not None else None if run.settlement is None else run.settlement.error
    return one_line(error)[:_MOST_ERROR] if error else None
