"""The types of requests and responses under `/-/`, and checks before a request reaches the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from qworker.asgi.interface import BodyTooLarge, get_number
from qworker.errors import UsageError
from qworker.history.event import Event
from qworker.message import Draft, Message, Selection, SettleAction
from qworker.names import check_existing_queue, check_id, check_key, to_message_id

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
    "get_visibility",
    "validate_lease",
]

# Seconds: ten years, and the year 2106. Every store can keep these values.
_LONGEST_DELAY = 315_360_000.0
_LATEST = 4_294_967_295.0
# Characters. The longest ids of other stores are names of files.
_LONGEST_ORIGIN = 255


# The names of the settle actions in paths and in JSON.
ACTIONS: Mapping[str, SettleAction] = {
    "ack": SettleAction.ACK,
    "retry": SettleAction.FAIL_TMP,
    "fail": SettleAction.FAIL_PERM,
    "release": SettleAction.RELEASE,
}


class LeaseRef(msgspec.Struct, frozen=True):
    """The identity of a lease in requests."""

    queue: str
    id: str
    token: int


class LeaseGrant(msgspec.Struct, frozen=True):
    """A lease in responses."""

    message: Message
    token: int
    expires_at: float


class SettleRequest(msgspec.Struct, frozen=True):
    """The settlement of one lease."""

    lease: LeaseRef
    action: Literal["ack", "retry", "fail", "release"]
    delay: float = 0.0
    error: str | None = None
    died: bool = False
    survived: bool = False


class HistoryPage(msgspec.Struct, frozen=True):
    """Events of the history."""

    events: list[Event]
    # The position to continue from.
    after: str | None


class HistoryPosition(msgspec.Struct, frozen=True):
    """A position in the history."""

    until: str


class ExtendRequest(msgspec.Struct, frozen=True):
    """Leases to extend."""

    leases: list[LeaseRef]
    visibility_timeout: float


class ExtendResponse(msgspec.Struct, frozen=True):
    """The result of extending leases."""

    # Positions of the lost leases in the request.
    lost: list[int]
    # Unix seconds for each lease of the request. 0 for a lost one.
    expires_at: list[float]


class IdsRequest(msgspec.Struct, frozen=True):
    """Messages of a queue, by their ids."""

    ids: list[str]


class WaitRequest(msgspec.Struct, frozen=True):
    """The queues to wait for, and the timeout in seconds."""

    queues: list[str]
    timeout: float


def check_draft(draft: Draft, body_limit: int) -> None:
    """Check that a store can keep a draft.

    Raises:
        BodyTooLarge: The message is too large.
        UsageError: A name or number is out of range.
    """
    if len(draft.body) > body_limit:
        raise BodyTooLarge
    if draft.id is not None:
        to_message_id(draft.id)
    if draft.unique_key is not None:
        check_key(draft.unique_key)
    if draft.original_id is not None and len(draft.original_id) > _LONGEST_ORIGIN:
        raise UsageError(f"original_id must have at most {_LONGEST_ORIGIN} characters")
    for name, value, most in (
        ("delay", draft.delay, _LONGEST_DELAY),
        ("hold", draft.hold, _LONGEST_DELAY),
        ("due_at", draft.due_at or 0.0, _LATEST),
        ("enqueued_at", draft.enqueued_at or 0.0, _LATEST),
        ("priority", draft.priority, 9),
        ("tries", draft.tries, 1_000_000),
    ):
        if not 0 <= value <= most:
            raise UsageError(f"{name} must be a number from 0 to {most:g} (got {value:g})")


def check_selection(selection: Selection) -> None:
    """Check that the times of a selection are times that a store can have.

    Raises:
        UsageError: A time is out of range.
    """
    for one in selection.unchanged or ():
        if not 0 <= (one.finished_at or 0.0) <= _LATEST:
            raise UsageError(f"finished_at must be a number from 0 to {_LATEST:g} (got {one.finished_at:g})")


def get_visibility(given: dict[str, str], default: float, *, least: float, most: float) -> float:
    """Return the length of a lease in seconds from the query.

    Raises:
        UsageError: It is out of range. Or the client is of 0.1, which could neither extend nor settle the lease.
    """
    if "visibility" in given:
        raise UsageError("visibility is now visibility_timeout: upgrade the client to qworker 0.2")
    return get_number(given, "visibility_timeout", default, least=least, most=most)


def check_delay(delay: float) -> None:
    """Check that a store can keep a delay.

    Raises:
        UsageError: The delay is negative, or longer than ten years.
    """
    if not 0 <= delay <= _LONGEST_DELAY:
        raise UsageError(f"delay must be a number from 0 to {_LONGEST_DELAY:g} (got {delay:g})")


def validate_lease(held: LeaseRef) -> LeaseRef:
    """Check the names of a lease.

    Raises:
        InvalidName: The queue or the id is not a valid name.
    """
    check_existing_queue(held.queue)
    check_id(held.id)
    return held
