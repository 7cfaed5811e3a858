"""Checks of options when they are given. An error is one line with the name and the value of the option."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, SupportsFloat

from qworker.duration import parse_duration
from qworker.errors import UsageError

__all__ = ["check_flag", "check_headers", "check_seconds", "check_text", "check_whole", "number_of", "shown"]

_LONGEST = 60


def shown(value: object) -> str:
    """Return a value for an error text: one line of limited length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - it runs code of whatever was given
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def check_text(name: str, value: Any) -> str:
    """Return `value` if it is text.

    Raises:
        UsageError: It is not text.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text (got {shown(value)})")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False.

    Raises:
        UsageError: It is neither.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False (got {shown(value)})")
    return value


def check_whole(name: str, value: Any, least: float, most: int | None = None) -> int:
    """Return `value` if it is a whole number in a range.

    Raises:
        UsageError: It is not a whole number, or is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number (got {shown(value)})")
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be {allowed} (got {shown(value)})")
    return value


def number_of(value: Any) -> float:
    """Return a number as a float, or nan for text, for True and False, and for anything that is not a finite number."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    # The last check is slow, so it comes last.
    if isinstance(value, (bool, str, bytes)) or not isinstance(value, (int, SupportsFloat)):
        return math.nan
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - it runs code of whatever was given
        return math.nan
    return number if math.isfinite(number) else math.nan


def seconds_of(value: Any) -> float:
    """Return a number of seconds, or a timedelta, as a float; nan for anything else, as `number_of`."""
    return value.total_seconds() if isinstance(value, timedelta) else number_of(value)


def check_seconds(name: str, value: Any, *, positive: bool = False, most: float = math.inf) -> float:
    """Return a number of seconds, or a timedelta, as a float.

    Args:
        name: The name of the option, as the user types it.
        value: The given value.
        positive: Whether to refuse 0 too.
        most: The largest valid number of seconds.

    Raises:
        UsageError: The value is neither, or is out of range.
    """
    seconds = seconds_of(value)
    if math.isnan(seconds):
        raise UsageError(f"{name} must be a number of seconds (got {shown(value)}){_seconds_hint(name, value)}")
    if seconds < 0 or (positive and seconds == 0):
        raise UsageError(f"{name} must be {'more than' if positive else 'at least'} 0 seconds (got {shown(value)})")
    if seconds > most:
        raise UsageError(f"{name} must be at most {most:.0f} seconds (got {shown(value)})")
    return seconds


def _seconds_hint(name: str, value: Any) -> str:
    if name == "delay" and isinstance(value, datetime):
        return ": for a time write using(due_at=when)"
    if not isinstance(value, str):
        return ""
    try:
        return f": write {name}={parse_duration(value):g}"
    except UsageError:
        return ""


def check_headers(headers: Any, source: Callable[[], Any] | None = None) -> None:
    """Check that headers map text to text.

    Args:
        headers: The given headers.
        source: The function that returned them. None: the caller gave them.

    Raises:
        UsageError: They do not map text to text.
    """
    origin = "headers" if source is None else source
    given: object = headers
    # The second check takes longer than all the others, so it comes last.
    if given.__class__ is not dict and not isinstance(given, Mapping):
        raise UsageError(f"{_origin(origin)} must map text to text (got {shown(headers)})")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"{_origin(origin)} must map text to text (got {shown(name)}: {shown(value)})")


def _origin(origin: Any) -> str:
    return origin if isinstance(origin, str) else f"the headers of {getattr(origin, '__name__', shown(origin))}"
