"""A schedule: a call, its times, and what happens with missed and overlapping ticks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import msgspec

from qworker.duration import Seconds
from qworker.envelope import Envelope, open_envelope
from qworker.errors import MissingExtra, UsageError
from qworker.message import Draft
from qworker.schedules.records import Definition
from qworker.schedules.timetable import timetable_of, zone_of
from qworker.task import Call
from qworker.unique import Unique
from qworker.validation import check_seconds, check_text, shown

__all__ = ["CatchUp", "Overlap", "Schedule", "check_key", "check_name", "definition_of", "naming_schedule"]

CatchUp: TypeAlias = Literal["latest", "all", "none"]
Overlap: TypeAlias = Literal["allow", "skip"]

_CATCH_UPS = ("latest", "all", "none")
_OVERLAPS = ("allow", "skip")
# Seconds of the longest interval: a hundred years.
_LONGEST = 36_500 * 86_400.0
# The fields of a message that a definition keeps, and those that each tick sets.
_KEPT = frozenset({"body", "task", "priority", "delay", "unique_key", "unique"})
_SET_BY_TICKS = frozenset({"id", "due_at", "hold"})
_UNUSABLE = tuple(name for name in Draft.__struct_fields__ if name not in _KEPT)
_EMPTY = Draft(body=b"")
# Bytes of the longest name. With a prefix it is a unique key.
_MOST_NAME = 200


class Schedule(msgspec.Struct, frozen=True):
    """A schedule without its name, for `Tasks.schedules.sync`. Exactly one of `cron` and `every` is given.

    Attributes:
        call: The call that each tick enqueues, from `task.call(...)`.
        cron: A cron expression of 5 fields, or of 6 with the seconds first.
        every: Whole seconds between two ticks, at least 1, or a timedelta. Ticks are its multiples since the epoch.
        tz: The time zone of `cron`.
        catch_up: What happens with the ticks that no worker was there for: `latest` runs the last of them, `all` runs
            at most 100, `none` runs none. Ticks that are missed for longer than 20 periods, or for a day, never run.
        overlap: `skip`: a tick is skipped while the call of an earlier one waits or runs.

    Raises:
        UsageError: A field is not valid.
    """

    call: Call
    cron: str | None = None
    every: Seconds | None = None
    tz: str = "UTC"
    catch_up: CatchUp = "latest"
    overlap: Overlap = "allow"

    def __post_init__(self) -> None:
        """Check the fields. `every` becomes seconds."""
        if (self.cron is None) == (self.every is None):
            raise UsageError("a schedule has exactly one of cron= and every=")
        given: Any = self.call
        if not isinstance(given, Call):
            raise UsageError(f"a schedule takes a call (got {shown(given)}): make it with task.call(...)")
        zone_of(check_text("tz", self.tz))
        if self.every is not None:
            msgspec.structs.force_setattr(self, "every", _whole_seconds(self.every))
        else:
            timetable_of(check_text("cron", self.cron), None, self.tz)
        for option, value, known in (
            ("catch_up", self.catch_up, _CATCH_UPS),
            ("overlap", self.overlap, _OVERLAPS),
        ):
            if value not in known:
                raise UsageError(f"{option} must be one of {', '.join(known)} (got {shown(value)})")


def _whole_seconds(every: Seconds) -> float:
    seconds = check_seconds("every", every, positive=True, most=_LONGEST)
    if seconds < 1 or seconds != int(seconds):
        raise UsageError(f"every must be a whole number of seconds, at least 1 (got {shown(every)})")
    return seconds


def check_name(name: Any) -> str:
    """Return `name` if it can be the name of a schedule.

    Raises:
        UsageError: It is not text of 1 to 200 bytes without control characters.
    """
    text = check_text("the name of a schedule", name)
    size = len(text.encode(errors="replace"))
    if not 0 < size <= _MOST_NAME or not text.isprintable():
        raise UsageError(
            f"the name of a schedule must be printable text of 1 to {_MOST_NAME} bytes (got {shown(name)})"
        )
    return text


@contextmanager
def naming_schedule(name: Any) -> Generator[None]:
    """Let the text of a `UsageError` in the block begin with the name of the schedule."""
    try:
        yield
    except MissingExtra:
        raise
    except UsageError as error:
        raise UsageError(f"schedule {shown(name)}: {error}") from error


def check_key(schedule: Schedule, unique: Unique | None, *, has_key: bool) -> None:
    """Check that the calls of a schedule can have their unique key.

    Raises:
        UsageError: They cannot.
    """
    if has_key and schedule.overlap == "skip":
        raise UsageError('overlap="skip" sets a unique key: leave unique_key= out, or use overlap="allow"')
    if unique is not None and unique.again == "error":
        raise UsageError('the call of a schedule cannot have again="error", since no caller gets it: use again="keep"')


def definition_of(name: str, schedule: Schedule, *, in_code: bool = False, set_name: str | None = None) -> Definition:
    """Return the stored form of a schedule.

    Raises:
        UsageError: Its call has an option that a tick sets itself.
    """
    draft = schedule.call.draft
    opened = open_envelope(draft.body)
    if not isinstance(opened, Envelope):
        raise UsageError("a schedule takes a call of a task: make it with task.call(...)")
    for option in _UNUSABLE:
        if getattr(draft, option) != getattr(_EMPTY, option):
            reason = ": each tick sets its own" if option in _SET_BY_TICKS else ""
            raise UsageError(f"the call of a schedule cannot have {option}={reason}")
    check_key(schedule, draft.unique, has_key=draft.unique_key is not None)
    return Definition(
        name=name,
        queue=schedule.call.queue,
        task=opened.task,
        args=opened.args,
        kwargs=opened.kwargs,
        headers=opened.headers,
        options=opened.options,
        cron=schedule.cron,
        # `__post_init__` has made it whole seconds.
        every=None if schedule.every is None else int(check_seconds("every", schedule.every)),
        tz=schedule.tz,
        catch_up=schedule.catch_up,
        overlap=schedule.overlap,
        priority=draft.priority,
        delay=draft.delay,
        unique_key=draft.unique_key,
        unique=draft.unique,
        in_code=in_code,
        set_name=set_name,
    )
