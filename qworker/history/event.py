"""One transition of one message, as the history tells it."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["KINDS", "Event", "Kind"]

Kind = Literal["enqueued", "leased", "extended", "retried", "failed", "acked", "released", "lost"]

KINDS: tuple[Kind, ...] = ("enqueued", "leased", "extended", "retried", "failed", "acked", "released", "lost")


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message's transition, told by the worker that made it.

    Times are Unix seconds by the clock of that worker. A message that was released untouched is told as `enqueued` again, with the
    same `at`, when it is leased again: an event is named by its id, kind and `at`.
    """

    # Its stored name, also in JSON, is `event`.
    kind: Kind = msgspec.field(name="event")
    # When it happened; `enqueued`: when the message was published; an end: when its outcome was sent to the store, which took it.
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
    # Why, in one line and bounded, of retried, failed and lost; the whole of it is beside the failed message.
    error: str | None = None
    # The whole of it, of retried, where the store does not keep it beside a message that waits.
    text: str | None = None
