"""Ticks: the ids of their messages, and the header that says which tick a call is of."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

from qworker.names import to_message_id

__all__ = ["TICK_HEADER", "TickOf", "read_tick_header", "tick_header", "tick_id", "tick_of_id"]

# The tick in Unix seconds, the time zone and the name of the schedule.
TICK_HEADER = "qworker-tick"

_ID = re.compile(r"cron:(.+):([0-9]{1,12})", re.DOTALL)


class TickOf(msgspec.Struct, frozen=True):
    """The tick of a call.

    Attributes:
        schedule: The name of the schedule.
        moment: The tick, in the time zone of the schedule, or in UTC if this machine does not know the zone.
        tz: The name of the time zone of `moment`.
    """

    schedule: str
    moment: datetime
    tz: str


def tick_id(name: str, tick: int) -> str:
    """Return the id of a tick's message. All workers make the same one, so it is enqueued once."""
    return to_message_id(f"cron:{name}:{tick}")


def tick_of_id(given: str) -> TickOf | None:
    """Return the tick of an id, in UTC. None: it is not the id of a tick, or is hashed."""
    found = _ID.fullmatch(given)
    return None if found is None else _tick_of(found[2], "UTC", found[1])


def tick_header(name: str, tick: int, tz: str) -> str:
    """Return the value of the header."""
    return f"{tick} {tz} {name}"


def read_tick_header(text: str) -> TickOf | None:
    """Return the tick that the header names. None: it is not valid."""
    parts = text.split(" ", 2)
    return _tick_of(*parts) if len(parts) == 3 else None


def _tick_of(seconds: str, tz: str, schedule: str) -> TickOf | None:
    try:
        moment = datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        return None
    if tz == "UTC":
        return TickOf(schedule, moment, tz)
    # Loaded for handlers of such ticks only.
    from zoneinfo import ZoneInfo

    try:
        return TickOf(schedule, moment.astimezone(ZoneInfo(tz)), tz)
    except (KeyError, ValueError, OSError):
        return TickOf(schedule, moment, "UTC")
