"""Rows and numbers that several pages show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from qworker.failure_text import summary
from qworker.failures.groups import task_of
from qworker.message import State, StoredMessage
from qworker.sampling import QueueSnapshot
from qworker.ui.access import Access
from qworker.ui.problems import Problem
from qworker.ui.text import DASH, age, arguments_of, duration, number, rate
from qworker.ui.watch import Seen

__all__ = [
    "EVENT_COLOURS",
    "FRESH_S",
    "NO_HISTORY",
    "failed_count",
    "if_old",
    "leased_count",
    "message_row",
    "numbers_of",
    "problem_of",
    "queue_names",
    "status_of",
    "task_names",
    "time_to_empty",
]

# Seconds above which the age of a number is shown. A page is up to 2 s older, so no number without an age is older than
# 5 s.
FRESH_S = 3.0
# Why some numbers are dashes.
NO_HISTORY = "the workers of this store keep no history: add ?history=1 to their URL"
# The colours of the kinds of events that have one.
EVENT_COLOURS = {"acked": "good", "failed": "bad", "cancelled": "bad", "lost": "bad", "retried": "warn"}


def queue_names(seen: Seen) -> list[str]:
    """Return the queues of the last sample."""
    return [one.queue for one in seen.queues]


def failed_count(one: QueueSnapshot | None) -> int:
    """Return the number of failed messages that were counted."""
    return 0 if one is None or one.counted is None else one.counted.count.stats.failed


def leased_count(one: QueueSnapshot) -> int:
    """Return the number of leased messages that were counted."""
    return 0 if one.counted is None else one.counted.count.stats.leased


def task_names(one: QueueSnapshot | None) -> list[str]:
    """Return the tasks of the messages that wait in a queue, as far as they were counted."""
    return [] if one is None or one.counted is None else list(one.counted.count.tasks)


def problem_of(one: QueueSnapshot | None) -> str | None:
    """Return why a queue cannot be used."""
    return None if one is None else one.problem


def if_old(at: float | None, now: float) -> float | None:
    """Return the moment at which something was read if its age is shown, and otherwise None."""
    return at if at is not None and now - at > FRESH_S else None


def numbers_of(one: QueueSnapshot, now: float) -> dict[str, Any]:
    """Return the numbers of a queue as text."""
    stats = None if one.counted is None else one.counted.stats_at(now)
    flow = one.flow
    return {
        "queue": one.queue,
        "stats": stats,
        "exact": one.counted is None or one.counted.exact,
        "counted_at": if_old(None if one.counted is None else one.counted.at, now),
        "flow": flow,
        "growth": None if one.counted is None else rate(one.counted.backlog_rate, signed=True),
        "acked": rate(flow.acked) if flow else DASH,
        "failures": rate(flow.failed) if flow else DASH,
        "retries": rate(flow.retried) if flow else DASH,
        "wait": duration(flow.wait.p95) if flow and flow.wait else DASH,
        "run": duration(flow.run.p95) if flow and flow.run else DASH,
        "workers": number(flow.workers) if flow else DASH,
        "oldest": age(None if one.counted is None else one.counted.oldest_at, now),
        "empty_in": duration(time_to_empty(one)),
        "no_history": NO_HISTORY,
    }


def time_to_empty(one: QueueSnapshot) -> float | None:
    """Return the seconds until nothing waits, if the queue goes on to shrink like this. None: it does not shrink."""
    if one.counted is None or one.counted.backlog_rate is None or one.counted.backlog_rate > -0.05:
        return None
    stats = one.counted.count.stats
    return (stats.ready + stats.leased) / -one.counted.backlog_rate


def status_of(one: QueueSnapshot, problems: Sequence[Problem]) -> dict[str, str]:
    """Return the word for a queue, and its kind, which has a colour."""
    stats = None if one.counted is None else one.counted.count.stats
    if one.problem is not None:
        return {"status": "Unusable", "kind": "bad"}
    if stats is None:
        return {"status": "Counting…", "kind": "calm"}
    if stats.paused:
        return {"status": "Paused", "kind": "warn"}
    if any(problem.unworked_at is not None for problem in problems):
        return {"status": "No worker", "kind": "bad"}
    if problems:
        return {"status": "Trouble", "kind": "bad"}
    is_active = stats.leased or (one.flow is not None and one.flow.acked)
    return {"status": "Active", "kind": "good"} if is_active else {"status": "Idle", "kind": "calm"}


class MessageRow(msgspec.Struct, frozen=True):
    """One row of a list of messages.

    Attributes:
        id: The id of the message.
        task: Its task, or that it has none.
        tries: Its tries.
        note: The time that matters in its state, or who works on it.
        arguments: The beginning of its arguments.
        error: Its last error in one line. None: it has none.
    """

    id: str
    task: str
    tries: int
    note: str
    arguments: str
    error: str | None


def message_row(stored: StoredMessage, access: Access, now: float) -> MessageRow:
    """Return one row of a list of messages."""
    message = stored.message
    return MessageRow(
        id=message.id,
        task=task_of(message) or "(raw)",
        tries=message.tries,
        note=_note(stored, now),
        arguments=arguments_of(message, masked=not access.sees_secrets),
        error=summary(stored.error) if stored.error else None,
    )


def _note(stored: StoredMessage, now: float) -> str:
    """Return the time that matters in a state."""
    match stored.state:
        case State.READY:
            return age(stored.message.enqueued_at or None, now)
        case State.DELAYED:
            return age(stored.due_at, now, "in {}")
        case State.LEASED:
            return stored.holder or "another process"
        case _:
            return age(stored.finished_at, now, "{} ago")
