"""The counts of a worker, at the cost of one look-up and a few additions per message.

`qworker.health` formats them for Prometheus, and `qworker.worker.telemetry` feeds OpenTelemetry's instruments. The
labels are a queue of the worker's options and a task that the app registers, and nothing that comes from a message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from qworker.task import Handler
from qworker.worker.delivery import Delivery, Outcome

__all__ = ["SECONDS", "TRIES", "Feature", "FeatureCounts", "Metrics", "TaskCounts", "merge_counts"]

# The upper bounds of the histograms' buckets. One more bucket has the larger values.
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TRIES = (0, 1, 2, 4, 8, 16)

# What a worker counts beside deliveries. Each has counts by one label.
Feature: TypeAlias = Literal["ticks", "results", "failure_reports", "releases"]

# The look-up of a member in its class would cost as much as all the rest of counting.
_ACKED, _FAILED = Outcome.ACKED, Outcome.FAILED
_SHORTEST = SECONDS[0]


def _empty_buckets(bounds: tuple[float, ...]) -> list[int]:
    return [0] * (len(bounds) + 1)


class TaskCounts(msgspec.Struct):
    """The outcomes of one task's messages in one queue, since the process started."""

    queue: str
    # The registered name, or "" if no handler was found.
    task: str
    acked: int = 0
    retried: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    cancelled: int = 0
    # The durations of handlers: their number in each bucket of `SECONDS`, and their sum in seconds.
    durations: list[int] = msgspec.field(default_factory=lambda: _empty_buckets(SECONDS))
    seconds: float = 0.0
    # The failed attempts before the final outcome: their number in each bucket of `TRIES`, and their sum.
    tries: list[int] = msgspec.field(default_factory=lambda: _empty_buckets(TRIES))
    attempts: int = 0
    # What the features in use have done: the counts of each by its label. A feature that is not used is not there.
    features: dict[str, dict[str, int]] = {}

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of finished deliveries by outcome."""
        return {
            "acked": self.acked,
            "retried": self.retried,
            "failed": self.failed,
            "released": self.released,
            "lost": self.lost,
            "cancelled": self.cancelled,
        }

    def add(self, other: TaskCounts) -> None:
        """Add the counts of `other`."""
        for name in ("acked", "retried", "failed", "released", "lost", "cancelled", "seconds", "attempts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.durations = [a + b for a, b in zip(self.durations, other.durations, strict=True)]
        self.tries = [a + b for a, b in zip(self.tries, other.tries, strict=True)]
        # Copies: the event loop's thread may write to the counts of `other`.
        for feature, labels in other.features.copy().items():
            mine = self.features.setdefault(feature, {})
            for label, count in labels.copy().items():
                mine[label] = mine.get(label, 0) + count


def merge_counts(counts: Iterable[TaskCounts]) -> list[TaskCounts]:
    """Return one sum for each queue and task, sorted. The given counts do not change."""
    sums: dict[tuple[str, str], TaskCounts] = {}
    for one in counts:
        key = (one.queue, one.task)
        if key not in sums:
            sums[key] = TaskCounts(*key)
        sums[key].add(one)
    return [sums[key] for key in sorted(sums)]


class FeatureCounts:
    """The counts of features. The event loop's thread writes them, and any thread reads them."""

    def __init__(self) -> None:
        self._by_task: dict[tuple[str, str], TaskCounts] = {}
        self._list: list[TaskCounts] = []

    def counts(self) -> list[TaskCounts]:
        """Return the live counts, by queue and task. Empty if no feature is used."""
        return self._list.copy()

    def add(self, feature: Feature, label: str, queue: str, task: str = "", count: int = 1) -> None:
        """Count what a feature has done.

        Args:
            feature: The feature.
            label: One of a few fixed words.
            queue: The queue.
            task: The name of a task that the app registers, or "".
            count: How often.
        """
        key = (queue, task)
        counts = self._by_task.get(key)
        if counts is None:
            counts = self._by_task[key] = TaskCounts(*key)
            self._list.append(counts)
        labels = counts.features.setdefault(feature, {})
        labels[label] = labels.get(label, 0) + count


class Metrics:
    """An `Observer` that counts. The event loop's thread writes the counts, and any thread reads them."""

    def __init__(self) -> None:
        self._by_task: dict[tuple[str, str], TaskCounts] = {}
        self._list: list[TaskCounts] = []
        # These three are of the last message.
        self._queue = ""
        self._handler: Handler | None = None
        self._counts = TaskCounts("", "")

    def counts(self) -> list[TaskCounts]:
        """Return the live counts, by queue and task."""
        # Another thread can copy a list in one step of the interpreter. A dictionary could grow while it is read.
        return self._list.copy()

    def handler_started(self, delivery: Delivery) -> None:
        """Do nothing: deliveries are counted when they end."""

    def message_settled(self, delivery: Delivery, outcome: Outcome, error: str | None, duration: float) -> None:
        """Count a message that has left the worker."""
        message, handler = delivery.lease.message, delivery.handler
        # Usually the previous message was of the same task. A comparison costs less than creating and finding a key.
        if handler is self._handler and message.queue is self._queue:
            counts = self._counts
        else:
            counts = self._find_counts(message.queue, handler)
        if delivery.started:
            counts.durations[0 if duration <= _SHORTEST else bisect_left(SECONDS, duration)] += 1
            counts.seconds += duration
        if outcome is _ACKED:
            counts.acked += 1
        elif outcome is _FAILED:
            counts.failed += 1
        else:
            setattr(counts, outcome, getattr(counts, outcome) + 1)
            return
        if tries := message.tries:
            counts.tries[bisect_left(TRIES, tries)] += 1
            counts.attempts += tries
        else:
            counts.tries[0] += 1

    def _find_counts(self, queue: str, handler: Handler | None) -> TaskCounts:
        key = (queue, "" if handler is None else handler.name)
        counts = self._by_task.get(key)
        if counts is None:
            counts = self._by_task[key] = TaskCounts(*key)
            self._list.append(counts)
        self._queue, self._handler, self._counts = queue, handler, counts
        return counts
