"""One transition of one message, as the history records it."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

__all__ = ["KINDS", "Event", "Kind"]

Kind = Literal["enqueued", "leased", "extended", "retried", "failed", "acked", "released", "lost", "cancelled"]

KINDS: tuple[Kind, ...] = get_args(Kind)


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message's transition, recorded by the worker that made it.

    Times are Unix seconds, by the clock of that worker. An event is identified by its id, kind and `at`: if a message
    was released without a run, `enqueued` is recorded again with the same `at` when it is leased again.

    Attributes:
        kind: What happened. Its stored name, also in JSON, is `event`.
        at: When it happened. For `enqueued`: when the message was published. For an end: when its outcome was sent to
            the store.
        queue: The queue of the message.
        id: The id of the message.
        task: The task's name in the envelope; None for a raw message.
        tries: Failed attempts before this delivery.
        worker: The worker that recorded it.
        token: The fencing token of the lease; None for `enqueued`.
        duration_s: Seconds that the handler ran, in retried, failed, acked, released, lost and cancelled; None if it
            did not run.
        enqueued_at: When the message was published.
        error: The reason in one bounded line, in retried, failed and lost. The complete error is kept with the failed
            message.
        text: The complete error, in retried, if the store does not keep it with a waiting message.
    """

    kind: Kind = msgspec.field(name="event")
    at: float
    queue: str
    id: str
    task: str | None
    tries: int
    worker: str
    token: int | None = None
    duration_s: float | None = None
    enqueued_at: float | None = None
    error: str | None = None
    text: str | None = None
