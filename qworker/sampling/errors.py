"""What fails now: the errors of failed and repeated attempts of the last hour, from the columns of the history."""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache

import msgspec

from qworker.failure_text import blank_values
from qworker.history.batch import EventBatch

__all__ = ["ErrorCount", "RecentErrors"]

_MINUTES = 60
# Errors that are told apart in a minute. Without a pattern, each attempt would have one of its own.
_MOST_ERRORS = 200
_KINDS = frozenset({"failed", "retried"})

_blanked = lru_cache(2000)(blank_values)


class ErrorCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often an error occurred in one queue.

    Attributes:
        queue: The queue.
        task: The task's name. None: raw messages, or the error has many tasks.
        error: The error in one line, without what differs between messages. Empty: further errors.
        failed: Messages that have failed permanently.
        retried: Attempts that failed and are repeated.
    """

    queue: str
    task: str | None
    error: str
    failed: int
    retried: int


class RecentErrors:
    """Counts errors by queue and task, to the minute.

    Attributes:
        period_s: Seconds that are counted, at most an hour.
    """

    def __init__(self) -> None:
        self.period_s = 0.0
        self._began: float | None = None
        # The number of a minute, and what was counted in it by queue, task, error and kind.
        self._minutes: deque[tuple[int, Counter[tuple[str, str | None, str, str]]]] = deque()

    def begin(self, now: float) -> None:
        """Begin a minute if it is a new one, and forget what is older than an hour.

        Args:
            now: Monotonic seconds.
        """
        self._began = now if self._began is None else self._began
        self.period_s = min(now - self._began, _MINUTES * 60.0)
        minute = int(now // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Counter()))
        while self._minutes[0][0] <= minute - _MINUTES:
            self._minutes.popleft()

    def count(self, batch: EventBatch) -> None:
        """Count a batch in the minute that was begun last."""
        if batch.kind not in _KINDS:
            return
        counts = self._minutes[-1][1]
        for task, error in zip(batch.column(batch.task), batch.column(batch.error), strict=False):
            key = (batch.queue, task, _blanked(error or ""), batch.kind)
            counts[key if key in counts or len(counts) < _MOST_ERRORS else (batch.queue, None, "", batch.kind)] += 1

    def counts(self) -> list[ErrorCount]:
        """Return the errors of all queues, the most frequent first."""
        found: dict[tuple[str, str | None, str], Counter[str]] = {}
        for _, counts in self._minutes:
            for (queue, task, error, kind), count in counts.items():
                found.setdefault((queue, task, error), Counter())[kind] += count
        errors = [
            ErrorCount(queue=queue, task=task, error=error, failed=kinds["failed"], retried=kinds["retried"])
            for (queue, task, error), kinds in found.items()
        ]
        return sorted(errors, key=lambda one: one.failed + one.retried, reverse=True)
