"""The ticks of a schedule: the moments of an interval or of a cron expression."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo
from functools import lru_cache
from itertools import islice, pairwise
from typing import Protocol

from qworker.errors import UsageError

__all__ = ["LATE_PERIODS", "MOST_LATE", "Timetable", "every_timetable", "late_of", "timetable_of", "zone_of"]

# A missed tick can be caught up for this number of periods, and for at most this number of seconds.
LATE_PERIODS = 20
MOST_LATE = 86_400.0
# The number of gaps between ticks of which the smallest is the period.
_GAPS = 4


class Timetable(Protocol):
    """The ticks of a schedule. A tick is a whole number of Unix seconds."""

    def after(self, moment: float) -> Iterator[int]:
        """Yield the ticks after a moment, in Unix seconds, in their order."""
        ...


class _Every:
    """Multiples of an interval since the epoch, so that a restart never shifts them."""

    def __init__(self, period: int) -> None:
        self._period = period

    def after(self, moment: float) -> Iterator[int]:
        tick = (int(moment // self._period) + 1) * self._period
        while True:
            yield tick
            tick += self._period


@lru_cache(maxsize=1024)
def every_timetable(period: int) -> Timetable:
    """Return the ticks of an interval in seconds."""
    return _Every(period)


@lru_cache(maxsize=1024)
def timetable_of(cron: str | None, every: int | None, tz: str) -> Timetable:
    """Return the ticks of a schedule.

    Args:
        cron: A cron expression of 5 fields, or of 6 with the seconds first. None: `every` counts.
        every: An interval in whole seconds.
        tz: The name of the time zone of `cron`.

    Raises:
        MissingExtra: cronsim is not installed.
        UsageError: The expression or the time zone is not valid.
    """
    if cron is None:
        assert every is not None
        return every_timetable(every)
    # Only who uses a cron expression loads cronsim.
    from qworker.schedules.cron import CronTimetable

    return CronTimetable(cron, zone_of(tz))


@lru_cache(maxsize=1024)
def zone_of(tz: str) -> tzinfo:
    """Return a time zone by its name.

    Raises:
        UsageError: There is no such zone, or the machine has no time zones.
    """
    from zoneinfo import ZoneInfo, available_timezones

    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError) as error:
        if tz != "UTC" and not available_timezones():
            raise UsageError(f"time zone {tz!r}: this machine has no time zones: pip install tzdata") from error
        raise UsageError(f"unknown time zone {tz!r}") from error


def late_of(timetable: Timetable, now: float) -> float:
    """Return the seconds for which a missed tick can be caught up: 20 periods, at most a day.

    The period of a cron expression is the smallest of its next gaps.
    """
    gaps = [later - tick for tick, later in pairwise(islice(timetable.after(now), _GAPS + 1))]
    return min(MOST_LATE, LATE_PERIODS * min(gaps)) if gaps else MOST_LATE
