"""Counting what a worker does, cheaply: one look-up and a few additions a message.

Nothing here knows who reads: `qworker.health` makes Prometheus' text of it, `qworker.telemetry` OpenTelemetry's instruments.
The labels are a queue that the worker was told to work on and a task that the app registers: nothing that a message brings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

from qworker.message import SettleAction
from qworker.run import Run
from qworker.task import Handler

__all__ = ["SECONDS", "TRIES", "Cell", "Metrics", "merged"]

# Upper bounds of the histograms' buckets; one more holds the rest.
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TRIES = (0, 1, 2, 4, 8, 16)

# Looking a member up in its class costs as much as the rest of a count.
_ACK, _FAIL_PERM = SettleAction.ACK, SettleAction.FAIL_PERM
_SHORTEST = SECONDS[0]


def _empty(bounds: tuple[float, ...]) -> list[int]:
    return [0] * (len(bounds) + 1)


class Cell(msgspec.Struct):
    """What one task's messages on one queue came to, since the process began."""

    queue: str
    # A registered name, or "" for what nobody here knows.
    task: str
    ack: int = 0
    fail_tmp: int = 0
    fail_perm: int = 0
    release: int = 0
    lost: int = 0
    # Handlers' durations: how many in each bucket of `SECONDS`, and their sum in seconds.
    durations: list[int] = msgspec.field(default_factory=lambda: _empty(SECONDS))
    seconds: float = 0.0
    # Failed attempts before the final outcome: how many in each bucket of `TRIES`, and their sum.
    tries: list[int] = msgspec.field(default_factory=lambda: _empty(TRIES))
    attempts: int = 0

    @property
    def outcomes(self) -> dict[str, int]:
        """Messages by the way in which they left the worker."""
        return {
            "ack": self.ack,
            "fail_tmp": self.fail_tmp,
            "fail_perm": self.fail_perm,
            "release": self.release,
            "lost": self.lost,
        }

    def add(self, other: Cell) -> None:
        """Count what `other` has counted."""
        for name in ("ack", "fail_tmp", "fail_perm", "release", "lost", "seconds", "attempts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.durations = [a + b for a, b in zip(self.durations, other.durations, strict=True)]
        self.tries = [a + b for a, b in zip(self.tries, other.tries, strict=True)]


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """One cell for each queue and task, sorted; those given stay as they are."""
    sums: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        key = (cell.queue, cell.task)
        if key not in sums:
            sums[key] = Cell(*key)
        sums[key].add(cell)
    return [sums[key] for key in sorted(sums)]


class Metrics:
    """An `Observer` that counts. Written on the loop's thread, read from any."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], Cell] = {}
        self._list: list[Cell] = []
        # Of the last message.
        self._queue = ""
        self._handler: Handler | None = None
        self._cell = Cell("", "")

    def cells(self) -> list[Cell]:
        """The live counts, by queue and task."""
        # A copy of a list is one step of the interpreter; a dictionary may grow while it is read.
        return self._list.copy()

    def started(self, run: Run) -> None:
        """Nothing is counted before the end."""

    def finished(self, run: Run, outcome: str, error: str | None, duration: float) -> None:
        """Count a message that has left the worker."""
        message, handler = run.lease.message, run.handler
        # As a rule the one before was of the same task: a comparison costs less than making and finding a key.
        if handler is self._handler and message.queue is self._queue:
            cell = self._cell
        else:
            cell = self._found(message.queue, handler)
        if run.started:
            cell.durations[0 if duration <= _SHORTEST else bisect_left(SECONDS, duration)] += 1
            cell.seconds += duration
        if outcome is _ACK:
            cell.ack += 1
        elif outcome is _FAIL_PERM:
            cell.fail_perm += 1
        else:
            setattr(cell, outcome, getattr(cell, outcome) + 1)
            return
        if tries := message.tries:
            cell.tries[bisect_left(TRIES, tries)] += 1
            cell.attempts += tries
        else:
            cell.tries[0] += 1

    def _found(self, queue: str, handler: Handler | None) -> Cell:
        key = (queue, "" if handler is None else handler.name)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(*key)
            self._list.append(cell)
        self._queue, self._handler, self._cell = queue, handler, cell
        return cell
