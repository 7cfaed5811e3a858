"""The options of a handler and of a call, checked when they are set."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from qworker.duration import Moment, Seconds
from qworker.errors import UsageError
from qworker.names import check_existing_queue, check_key, to_message_id
from qworker.retry import MOST_DELAY, Retries
from qworker.unique import Unique
from qworker.validation import check_flag, check_headers, check_seconds, check_text, check_whole, number_of, shown

__all__ = [
    "DEFAULT_MAX_TRIES",
    "YEAR_10000",
    "NeedyOption",
    "TaskOptions",
    "call_options",
    "check_max_tries",
    "check_result",
    "check_unique",
    "needs_of",
    "sent_options",
    "unique_option",
]

DEFAULT_MAX_TRIES = 5

# Options that not every store supports.
NeedyOption: TypeAlias = Literal[
    "result=", "max_tries=None", "unique=", "unique=Unique(again=...)", 'unique=Unique(scope="app")'
]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a handler.

    Attributes:
        queue: The queue whose messages it runs.
        max_tries: After this many failed attempts a message is failed and kept. The first attempt counts. None: there
            is no limit.
        timeout: Seconds after which an attempt is cancelled and counts as failed. None: no limit.
        retries: Which errors are retried, and after which delays.
        process: Whether it runs in a process pool, for work that holds the GIL.
        priority: 0 to 9 (first), for calls without their own priority.
        hold: Seconds from the enqueue for which the id of a call stays taken, for calls that have an id.
        result: Seconds for which the result of a call is kept, from the end of the call. None: it is not kept.
        unique: The unique key of its calls, for calls without their own key. None: they have none.

    Raises:
        UsageError: An option has the wrong type or is out of range.
    """

    queue: str = "default"
    max_tries: int | None = DEFAULT_MAX_TRIES
    timeout: float | None = None
    retries: Retries = Retries()
    process: bool = False
    priority: int = 0
    hold: float = 0.0
    result: float | None = None
    unique: Unique | None = None

    def __post_init__(self) -> None:
        check_existing_queue(check_text("queue", self.queue))
        check_max_tries(self.max_tries)
        if self.timeout is not None:
            seconds = check_seconds("timeout", self.timeout, positive=True, most=MOST_DELAY)
            # A timedelta becomes seconds.
            msgspec.structs.force_setattr(self, "timeout", seconds)
        check_flag("process", self.process)
        check_whole("priority", self.priority, 0, 9)
        if self.hold.__class__ is not float or self.hold:
            msgspec.structs.force_setattr(self, "hold", check_seconds("hold", self.hold, most=MOST_DELAY))
        if self.result is not None:
            msgspec.structs.force_setattr(self, "result", check_result(self.result))
        if self.unique is not None:
            check_unique(self.unique)

    @property
    def needs(self) -> list[NeedyOption]:
        """The options that not every store supports."""
        return needs_of(self.unique, self.max_tries, self.result)


def needs_of(unique: Unique | None, max_tries: int | msgspec.UnsetType | None, result: Any) -> list[NeedyOption]:
    """Return which options of a task or of a call not every store supports. What is unset counts as not given."""
    needs: list[NeedyOption] = [] if result is None or result is msgspec.UNSET else ["result="]
    if unique is not None:
        needs.append("unique=")
        if unique.replaces:
            needs.append("unique=Unique(again=...)")
        if unique.scope == "app":
            needs.append('unique=Unique(scope="app")')
    return needs if max_tries is not None else [*needs, "max_tries=None"]


def check_max_tries(given: Any) -> int | None:
    """Return the number of tries; None: no limit.

    Raises:
        UsageError: It is neither None nor a whole number of at least 1.
    """
    if given is None:
        return None
    number = check_whole("max_tries", given, -math.inf)
    if number < 1:
        raise UsageError(f"max_tries must be at least 1, or None for unlimited (got {number})")
    return number


def check_result(given: Any) -> float:
    """Return the seconds for which a result is kept.

    Raises:
        UsageError: It is neither a positive number of seconds nor a timedelta.
    """
    if given is True:
        raise UsageError("result must be the time for which the result is kept: write result=3600 (got True)")
    return check_seconds("result", given, positive=True, most=MOST_DELAY)


def check_unique(given: Any) -> Unique:
    """Return the options of a unique key.

    Raises:
        UsageError: They are not options of a unique key, or name no key.
    """
    if not isinstance(given, Unique):
        raise UsageError(f'unique must be a Unique, such as Unique(by=("user",)) (got {shown(given)})')
    if given.key is None and given.by is None:
        raise UsageError('unique needs key= or by=: write Unique(by=("user",)), or Unique(key="all")')
    return given


def unique_option(unique: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the unique key of a call, as a field next to those of its draft.

    Raises:
        UsageError: They are not valid, or there is a key already.
    """
    if unique is None:
        return {}
    if "unique_key" in fields:
        raise UsageError("unique and unique_key cannot be given together: leave one out")
    return {"unique": check_unique(unique)}


def call_options(
    delay: Seconds | None,
    due_at: Moment | None,
    priority: int | None,
    unique_key: str | None,
    id: str | None,  # noqa: A002
    queue: str | None,
    headers: Mapping[str, str] | None,
    hold: Seconds | None,
) -> dict[str, Any]:
    """Return the fields of a draft.

    Raises:
        InvalidName: `unique_key`, `id` or `queue` is not allowed.
        UsageError: There is a hold and no id, or an option has the wrong type or is out of range.
    """
    fields: dict[str, Any] = {}
    if delay is not None:
        if due_at is not None:
            raise UsageError("delay and due_at cannot be given together: leave one out")
        fields["delay"] = check_seconds("delay", delay, most=MOST_DELAY)
    if due_at is not None:
        fields["due_at"] = check_time("due_at", due_at)
    if priority is not None:
        fields["priority"] = check_whole("priority", priority, 0, 9)
    if unique_key is not None:
        fields["unique_key"] = check_key(check_text("unique_key", unique_key))
    fields |= _id_options(id, hold)
    if queue is not None:
        check_existing_queue(check_text("queue", queue))
    if headers is not None:
        check_headers(headers)
    return fields


def sent_options(
    fields: Mapping[str, Any],
    timeout: Seconds | msgspec.UnsetType | None,
    max_tries: int | msgspec.UnsetType | None,
    expires: Seconds | None,
) -> dict[str, Any]:
    """Return the options of a call that travel with it, without `result`.

    Args:
        fields: The fields of its draft.
        timeout: See `Task.using`.
        max_tries: See `Task.using`.
        expires: See `Task.using`.

    Raises:
        UsageError: An option has the wrong type or is out of range.
    """
    sent: dict[str, Any] = {}
    if timeout is not msgspec.UNSET:
        given = None if timeout is None else check_seconds("timeout", timeout, positive=True, most=MOST_DELAY)
        sent["timeout"] = given
    if max_tries is not msgspec.UNSET:
        sent["max_tries"] = check_max_tries(max_tries)
    if expires is not None:
        sent["expires"] = check_seconds("expires", expires, positive=True, most=MOST_DELAY)
        waits = fields.get("delay", 0.0)
        if fields.get("due_at") is not None:
            waits = fields["due_at"] - time.time()
        if waits >= sent["expires"]:
            raise UsageError(f"expires must be longer than delay (got {sent['expires']:g} and {waits:g} seconds)")
    return sent


def _id_options(given_id: str | None, hold: Seconds | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if given_id is not None:
        fields["id"] = to_message_id(check_text("id", given_id))
    if hold is not None:
        fields["hold"] = check_seconds("hold", hold, most=MOST_DELAY)
        if fields["hold"] and given_id is None:
            raise UsageError("hold= needs id=: give the message an id")
    return fields


def check_time(name: str, value: Any) -> float:
    """Return Unix seconds as a float. The year must have four digits."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise UsageError(f"{name} must have a time zone (got {value})")
        seconds = value.timestamp()
    else:
        seconds = number_of(value)
    if math.isnan(seconds):
        raise UsageError(f"{name} must be a datetime, or a number of Unix seconds (got {shown(value)})")
    if not 0 <= seconds < YEAR_10000:
        raise UsageError(f"{name} must be a time in Unix seconds, before the year 10000 (got {shown(value)})")
    return seconds


# Unix seconds.
YEAR_10000 = 253_402_300_800.0
