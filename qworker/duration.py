"""Durations as text: `90`, `90s`, `500ms`, `15m`, `1.5h`, `7d`. All options, settings and variables use this form."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from qworker.errors import UsageError

__all__ = ["LONGEST", "Moment", "Seconds", "format_duration", "parse_duration", "parse_moment"]

# A span of time: a number of seconds, or a timedelta.
Seconds: TypeAlias = float | timedelta
# A point in time: Unix seconds, or a datetime with a time zone.
Moment: TypeAlias = float | datetime

# Seconds: a hundred years. Every store can hold this number of microseconds.
LONGEST = 36_500 * 86_400.0

_TEXT = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)?")
_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
# The digits of a nanosecond. Smaller differences are rounding errors of floats.
_DIGITS = 9


def parse_duration(text: str, *, least: float = 0.0, most: float = LONGEST) -> float:
    """Return the seconds of a duration.

    Args:
        text: A number and a unit (`ms`, `s`, `m`, `h`, `d`). Without a unit the number is in seconds.
        least: The shortest valid duration in seconds.
        most: The longest valid duration in seconds.

    Raises:
        UsageError: It is not a duration, or it is out of range.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a valid duration: use seconds (90) or 15m, 2h, 7d")
    number, unit = float(found[1]), found[2] or "s"
    seconds = round(number / 1000 if unit == "ms" else number * _UNITS[unit], _DIGITS)
    if seconds < least:
        raise UsageError(f"{text!r} is too short: use at least {format_duration(least)}")
    if seconds > most:
        raise UsageError(f"{text!r} is too long: use at most {format_duration(most)}")
    return seconds


def parse_moment(text: str) -> float:
    """Return the Unix seconds of an age, or of a date with or without a time.

    Args:
        text: An age such as `2h`, or a time such as `2026-11-23T08:00`. A time without a zone is in UTC.

    Raises:
        UsageError: It is neither.
    """
    try:
        # Dates are first, because 20261123 is a date and not an age.
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            return time.time() - parse_duration(text.strip())
        except UsageError as error:
            raise UsageError(f"{error}; or a time such as 2026-11-23T08:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def format_duration(seconds: float) -> str:
    """Return a duration as text in the largest unit without a fraction, for `parse_duration`."""
    for unit, size in _UNITS.items():
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.{_DIGITS}f}".rstrip("0").rstrip(".") + "s"
