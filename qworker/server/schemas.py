"""What travels under `/-/` beside the contract's own types, and what is refused before it reaches a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from qworker.errors import UsageError
from qworker.history.event import Event
from qworker.message import Draft, Message, Selection, SettleAction
from qworker.names import check_id, check_key, check_queue
from qworker.server.responses import BodyTooLarge

__all__ = [
    "ACTIONS",
    "ExtendRequest",
    "ExtendResponse",
    "HistoryPage",
    "HistoryPosition",
    "IdsRequest",
    "LeaseGrant",
    "LeaseRef",
    "SettleRequest",
    "WaitRequest",
    "check_delay",
    "check_draft",
    "check_selection",
    "validate_lease",
]

# Ten years, and the year 2106: seconds that every store can write down.
_LONGEST_DELAY = 315_360_000.0
_LATEST = 4_294_967_295.0
# Ids of other stores: names of files, at most.
_LONGEST_ORIGIN = 255


# What paths and JSON call the ends of a lease.
ACTIONS: Mapping[str, SettleAction] = {
    "ack": SettleAction.ACK,
    "retry": SettleAction.FAIL_TMP,
    "fail": SettleAction.FAIL_PERM,
    "release": SettleAction.RELEASE,
}


class LeaseRef(msgspec.Struct, frozen=True):
    """A lease as clients name it."""

    queue: str
    id: str
    token: int


class LeaseGrant(msgspec.Struct, frozen=True):
    """A lease as clients get it."""

    message: Message
    token: int
    expires_at: float


class SettleRequest(msgspec.Struct, frozen=True):
    """The end of one lease."""

    lease: LeaseRef
    action: Literal["ack", "retry", "fail", "release"]
    delay: float = 0.0
    error: str | None = None


class HistoryPage(msgspec.Struct, frozen=True):
    """Events of the history."""

    events: list[Event]
    # The position to go on from.
    after: str | None


class HistoryPosition(msgspec.Struct, frozen=True):
    """A position in the history."""

    until: str


class ExtendRequest(msgspec.Struct, frozen=True):
    """Leases to extend."""

    leases: list[LeaseRef]
    visibility_timeout: float


class ExtendResponse(msgspec.Struct, frozen=True):
    """What became of them."""

    # Places in the request's list.
    lost: list[int]
    # For each of the request's list; 0 for a lost one.
    expires_at: list[float]


class IdsRequest(msgspec.Struct, frozen=True):
    """Messages of a queue, by their ids."""

    ids: list[str]


class WaitRequest(msgspec.Struct, frozen=True):
    """What to wait for, and for how long."""

    queues: list[str]
    timeout: float


def check_draft(draft: Draft, body_limit: int) -> None:
    """Refuse what no store can keep.

    Raises:
        BodyTooLarge: The message is larger than allowed.
        UsageError: A name or number is out of its range.
    """
    if len(draft.body) > body_limit:
        raise BodyTooLarge
    if draft.id is not None:
        check_id(draft.id)
    if draft.unique_key is not None:
        check_key(draft.unique_key)
    if draft.original_id is not None and len(draft.original_id) > _LONGEST_ORIGIN:
        raise UsageError(f"original_id must have at most {_LONGEST_ORIGIN} characters")
    for name, value, most in (
        ("delay", draft.delay, _LONGEST_DELAY),
        ("due_at", draft.due_at or 0.0, _LATEST),
        ("enqueued_at", draft.enqueued_at or 0.0, _LATEST),
        ("priority", draft.priority, 9),
        ("tries", draft.tries, 1_000_000),
    ):
        if not 0 <= value <= most:
            raise UsageError(f"{name} must be a number from 0 to {most:g} (got {value:g})")


def check_selection(selection: Selection) -> None:
    """Refuse times that no store can have written down.

    Raises:
        UsageError: A message finished outside the range.
    """
    for one in selection.unchanged or ():
        if not 0 <= (one.finished_at or 0.0) <= _LATEST:
            raise UsageError(f"finished_at must be a number from 0 to {_LATEST:g} (got {one.finished_at:g})")


def check_delay(delay: float) -> None:
    """Refuse a delay that no store can keep.

    Raises:
        UsageError: It is negative, or longer than ten years.
    """
    if not 0 <= delay <= _LONGEST_DELAY:
        raise UsageError(f"delay must be a number from 0 to {_LONGEST_DELAY:g} (got {delay:g})")


def validate_lease(held: LeaseRef) -> LeaseRef:
    """Refuse names that are none.

    Raises:
        InvalidName: The queue or the id.
    """
    check_queue(held.queue)
    check_id(held.id)
    return held
