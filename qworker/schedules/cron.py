"""The ticks of a cron expression in a time zone, by cronsim.

Expressions with a fixed minute and hour follow Debian's rules: a time that a change of the clocks skips runs right
after it, and a time that comes twice runs the first time. All others follow the clock on the wall.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

from qworker.errors import UsageError
from qworker.extras import not_installed
from qworker.validation import shown

try:
    from cronsim import CronSim, CronSimError
except ModuleNotFoundError as missing:
    raise not_installed(missing, "a cron schedule") from missing

__all__ = ["CronTimetable"]

_DAY = 86_400
_SECOND = timedelta(seconds=1)
_FIELDS = ("second", "minute", "hour", "day of month", "month", "day of week")
_RANGES = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
# What a library or crontab accepts as a name of an expression.
_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class CronTimetable:
    """The ticks of a cron expression.

    Args:
        expression: 5 fields, or 6 with the seconds first.
        zone: The time zone of the fields.

    Raises:
        UsageError: The expression is not valid, or it never matches.
    """

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._expression = expression
        self._zone = zone
        fields = expression.split()
        self._is_fixed = len(fields) == 5 and not fields[0].startswith("*") and not fields[1].startswith("*")
        try:
            found = next(CronSim(expression, datetime(2024, 1, 1)), None)  # noqa: DTZ001 - local time
        except CronSimError as error:
            raise UsageError(
                f"{shown(expression)} is not a valid cron expression: {_problem(fields, str(error))}"
            ) from error
        if found is None:
            raise UsageError(f"{shown(expression)} is not a valid cron expression: no date matches it")

    def after(self, moment: float) -> Iterator[int]:
        """Yield the ticks after a moment, in Unix seconds, in their order."""
        start = math.floor(moment)
        return self._fixed(start) if self._is_fixed else self._by_wall(start)

    def _fixed(self, start: int) -> Iterator[int]:
        last = start
        for local in CronSim(self._expression, datetime.fromtimestamp(start, self._zone)):
            # Inside a repeated hour the library begins with times that are past. Two skipped times give the same one.
            tick = int(local.timestamp())
            if tick > last:
                last = tick
                yield tick

    def _by_wall(self, start: int) -> Iterator[int]:
        """Yield the ticks of each stretch of time between two changes of the clocks.

        The library gets local times without a zone: in its own steps of hours, it misses minutes next to changes of
        half an hour.
        """
        local = datetime.fromtimestamp(start, self._zone)
        at: int | None = start
        begin = local.replace(tzinfo=None)
        while at is not None:
            offset = _offset(at, self._zone)
            base, at = at, None
            for found in CronSim(self._expression, begin):
                tick = int(found.replace(tzinfo=UTC).timestamp()) - offset
                change = _first_change(base, tick, offset, self._zone)
                if change is not None:
                    # One second before the new stretch, by its own clock.
                    at = change
                    begin = datetime.fromtimestamp(change, self._zone).replace(tzinfo=None) - _SECOND
                    break
                base = tick
                yield tick


def _offset(at: int, zone: tzinfo) -> int:
    offset = datetime.fromtimestamp(at, zone).utcoffset()
    return 0 if offset is None else int(offset.total_seconds())


def _first_change(start: int, end: int, offset: int, zone: tzinfo) -> int | None:
    """Return the first second after `start`, up to `end`, with another offset. None: there is none."""
    low = start
    while low < end:
        high = min(low + _DAY, end)
        if _offset(high, zone) != offset:
            while high - low > 1:
                middle = (low + high) // 2
                if _offset(middle, zone) == offset:
                    low = middle
                else:
                    high = middle
            return high
        low = high
    return None


def _problem(fields: list[str], error: str) -> str:
    """Return what is wrong with an expression, as a part of a sentence."""
    if len(fields) == 1 and fields[0].lower() in _NICKNAMES:
        return f"write {_NICKNAMES[fields[0].lower()]!r}"
    if len(fields) not in {5, 6}:
        return f"it must have 5 fields, or 6 with the seconds first (got {len(fields)})"
    padded = fields if len(fields) == 6 else ["0", *fields]
    name = error.removeprefix("Bad ").replace("-", " ")
    for field, given, (least, most) in zip(_FIELDS, padded, _RANGES, strict=True):
        if field != name:
            continue
        for number in re.findall(r"(?<![#/\d])\d+", given):
            if not least <= int(number) <= most:
                return f"{field} must be between {least} and {most} (got {number})"
        if name == "day of month" and re.fullmatch(r"[\d,-]+", given):
            return "no date matches it"
        return f"{field} {given!r} cannot be read"
    return error
