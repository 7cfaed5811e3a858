"""Messages and what happens to them.

                publish                  lease                    ack
    (producer) ─────────► ready ─────────────────────► leased ─────────► done, or gone
                 │          ▲                          │ │ │
       due later │          │ reap (due)       release │ │ │ fail_perm
                 ▼          │                          │ │ └───────────► fail ──► requeue: ready
              delayed ◄─────┴────────── fail_tmp, reap ┘ │                        (tries = 0)
                                        (tries + 1)      │
                            ready ◄──────────────────────┘ (tries unchanged)

Every arrow is one atomic step of the store, conditional on the lease's token where there is a lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

__all__ = [
    "Draft",
    "Finished",
    "Lease",
    "Message",
    "QueueStats",
    "Settle",
    "Settlement",
    "State",
    "StoredMessage",
    "microseconds",
]


class State(StrEnum):
    """Where a stored message is."""

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    DONE = "done"
    FAIL = "fail"


class Draft(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message to be published."""

    body: bytes
    # Given: a message stored under this id, in any state, makes the publish a no-op. None: the backend makes one.
    id: str | None = None
    # Seconds from now, by the store's clock, until it may be leased.
    delay: float = 0.0
    # Absolute Unix seconds instead of `delay`; wins over it.
    due_at: float | None = None
    # 0 (default) to 9 (first).
    priority: int = 0
    # While a message with this key is ready, delayed or leased, another is not stored.
    key: str | None = None
    # A label for people who list the store: the task's name, where there is one.
    task: str | None = None
    # fsq's arguments, for protocols that have them.
    arguments: tuple[str, ...] = ()
    # rfq's flat map, for protocols that have one.
    fields: Mapping[str, str] | None = None
    # For messages that come from another store: what they had there.
    tries: int = 0
    enqueued_at: float | None = None
    # Their id there, for protocols that give them one of their own: kept beside the message, and one that is stored is not stored
    # again under it.
    origin: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One unit of work in a queue."""

    id: str
    queue: str
    body: bytes
    # Failed attempts so far: temporary failures and expired leases both count.
    tries: int = 0
    # Unix seconds.
    enqueued_at: float = 0.0
    priority: int = 0
    key: str | None = None
    # fsq's arguments; a stranger's file has its old name here.
    arguments: tuple[str, ...] = ()
    # rfq's flat map.
    fields: Mapping[str, str] | None = None
    # The id that it had in the store that it came from, where this one gave it another.
    origin: str | None = None


class Lease(msgspec.Struct, kw_only=True, eq=False):
    """A message claimed until an expiry. Backends subclass it with what they need to find their claim again."""

    message: Message
    # The fencing number: rises with each delivery of the message. Stale holders can change nothing.
    token: int
    # Unix seconds by the store's clock.
    expires_at: float


class Settle(StrEnum):
    """How a lease ends."""

    ACK = "ack"
    FAIL_TMP = "fail_tmp"
    FAIL_PERM = "fail_perm"
    RELEASE = "release"


class Settlement(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The end of one lease."""

    lease: Lease
    how: Settle
    # Seconds until a fail_tmp may run again.
    delay: float = 0.0
    # Why, for fail_tmp and fail_perm; kept beside a failed message.
    error: str | None = None


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message as `browse` sees it: a look, not a claim."""

    message: Message
    state: State
    # Unix seconds; None where the state has no such time.
    due_at: float | None = None
    expires_at: float | None = None
    finished_at: float | None = None
    # Who leases it.
    holder: str | None = None
    # Why it failed.
    error: str | None = None
    # Where the store has a finished message, for `discard`; means nothing to anybody else.
    place: str | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A done or failed message as a look found it."""

    id: str
    state: State
    # Unix seconds.
    finished_at: float | None
    # As in `StoredMessage`.
    place: str | None = None

    def matches(self, stored: StoredMessage | None) -> bool:
        """Whether a look finds it still as it was, to the microsecond."""
        return (
            stored is not None
            and stored.message.id == self.id
            and stored.state is self.state
            and self.is_from(stored.finished_at)
        )

    def is_from(self, finished_at: float | None) -> bool:
        """Whether it was found with this time."""
        return microseconds(finished_at) == microseconds(self.finished_at)


def microseconds(seconds: float | None) -> int | None:
    """Whole microseconds: the precision in which a time survives a table, and in which two are compared."""
    return None if seconds is None else round(seconds * 1e6)


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's counts."""

    queue: str
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    done: int = 0
    fail: int = 0
    # Seconds that the oldest ready message has waited; None when none is ready.
    oldest_age: float | None = None
    down: bool = False
    # How long what is finished is kept, in words; empty where nothing is removed.
    retention: Mapping[str, str] = {}
