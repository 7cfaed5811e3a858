"""One transition of one message, as the history tells it."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["KINDS", "MOST_ERROR", "Event", "Kind", "error_line"]

Kind = Literal["enqueued", "leased", "extended", "retried", "failed", "acked", "released", "lost"]

KINDS: tuple[Kind, ...] = ("enqueued", "leased", "extended", "retried", "failed", "acked", "released", "lost")

# Characters of an error that are kept: the whole of it is beside the failed message.
MOST_ERROR = 300


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message's transition, written by the worker that made it.

    Times are Unix seconds by the clock of that worker.
    """

    event: Kind
    # When it happened; `enqueued`: when the message was published.
    at: float
    queue: str
    id: str
    # The name in its envelope; None: a raw message.
    task: str | None
    # Failed attempts before this event's delivery.
    tries: int
    # Who wrote it.
    worker: str
    # The lease's fencing number.
    token: int | None = None
    # Seconds that the handler ran: of retried, failed, acked, released and lost; None where it was not run.
    duration_s: float | None = None
    enqueued_at: float | None = None
    # The first line, of retried, failed and lost.
    error: str | None = None


def error_line(error: str | None) -> str | None:
    """The first line of a failure that has something in it, bounded; None for none."""
    if not error:
        return None
    line = next((line.strip() for line in error.splitlines() if line.strip()), "")
    return line[:MOST_ERROR] or None
