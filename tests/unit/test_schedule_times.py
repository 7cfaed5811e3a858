"""The ticks of schedules: cron expressions in zones that change their clocks, intervals, and what was missed."""

from __future__ import annotations

import bisect
import functools
import random
from datetime import UTC, datetime
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest

from qworker.errors import UsageError
from qworker.schedules.catch_up import due_ticks
from qworker.schedules.timetable import every_timetable, late_of, timetable_of, zone_of
from tests.support.depth import DEEP

# Zones that change their clocks in 2026: by an hour and by half an hour, at night and at midnight, on both halves of
# the earth, and one that sets them back for a month only.
ZONES = [
    "Europe/Berlin",
    "Europe/London",
    "America/New_York",
    "America/St_Johns",
    "America/Havana",
    "America/Santiago",
    "Australia/Lord_Howe",
    "Africa/Casablanca",
    "Africa/Cairo",
    "Asia/Beirut",
]
EXPRESSIONS = [
    "30 2 * * *",
    "0 2,3 * * *",
    "15,45 0-3 * * *",
    "30 7 * * mon-fri",
    "0 12 1 * *",
    "5 0 29 2,3 *",
    "0 0 1-7 * sun",
    "*/15 * * * *",
    "* 2 * * *",
    "0 */2 * * *",
    "*/20 1-2 * 3,10 *",
    "10 * * 4 *",
]
START, END = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (2026, 2027))
DAY = 86_400
# How often a clock is looked at, in seconds. Clocks change at a quarter of an hour.
STEP = 60 if DEEP else 900
# Of an expression with more ticks than these, only the weeks around a change are compared.
MANY = 10**6 if DEEP else 2000
NAMES = {name: number for number, name in enumerate(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])}


def numbers_of(field: str, least: int, most: int) -> set[int]:
    """The numbers of a field, read without cronsim."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        low, _, high = span.partition("-")
        first, last = (least, most) if span == "*" else (number_of(low), number_of(high or low))
        found.update(range(first, last + 1, int(step or 1)))
    return found


def number_of(text: str) -> int:
    return NAMES[text] if text in NAMES else int(text)


class Oracle:
    """Which minutes that clocks on the wall show match an expression, by looking at each."""

    def __init__(self, expression: str) -> None:
        minute, hour, day, month, weekday = expression.split()
        self.minutes, self.hours = numbers_of(minute, 0, 59), numbers_of(hour, 0, 23)
        self.days, self.months = numbers_of(day, 1, 31), numbers_of(month, 1, 12)
        self.weekdays = {number % 7 for number in numbers_of(weekday, 0, 7)}
        self.both_days = day.startswith("*") or weekday.startswith("*")
        self.is_fixed = not minute.startswith("*") and not hour.startswith("*")
        # In seconds, as if the wall were in UTC.
        self.shown = [
            midnight + 3600 * hour + 60 * minute
            for midnight in range(START - DAY, END + DAY, DAY)
            if self.matches(datetime.fromtimestamp(midnight, UTC))
            for hour in sorted(self.hours)
            for minute in sorted(self.minutes)
        ]

    def matches(self, day: datetime) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (in_month and in_week) if self.both_days else (in_month or in_week)

    def between(self, first: int, last: int) -> list[int]:
        """The matching minutes from one on, and before another one."""
        return self.shown[bisect.bisect_left(self.shown, first) : bisect.bisect_left(self.shown, last)]

    def ticks(self, zone: str) -> list[int]:
        """The ticks of the year."""
        found: list[int] = []
        before: int | None = None
        for start, end, offset in offsets_of(zone):
            first = start + offset
            if self.is_fixed and before is not None:
                # Minutes that no clock has shown run at the first one after them.
                if self.between(before, first):
                    found.append(start)
                # Those that a clock shows for the second time do not run again.
                first = max(first, before)
            found += [minute - offset for minute in self.between(first, end + offset)]
            before = end + offset
        return sorted(set(found))


@functools.cache
def offsets_of(zone: str) -> list[tuple[int, int, int]]:
    """The parts of the year in which the clock on the wall has one distance to UTC: first, end, distance in seconds."""
    info, found = ZoneInfo(zone), list[tuple[int, int, int]]()
    for at in range(START, END, STEP):
        distance = datetime.fromtimestamp(at, info).utcoffset()
        assert distance is not None
        offset = int(distance.total_seconds())
        first = found.pop()[0] if found and found[-1][2] == offset else at
        found.append((first, at + STEP, offset))
    return found


@pytest.mark.parametrize("zone", ZONES)
def test_the_ticks_of_a_year_are_those_that_looking_at_each_minute_finds(zone: str) -> None:
    changes = [first for first, _, _ in offsets_of(zone)[1:]]
    assert len(changes) == 2, "the zone changes its clocks twice in this year"
    weeks = [(change - 7 * DAY, change + 7 * DAY) for change in changes]
    draw = random.Random(zone)
    for expression in EXPRESSIONS:
        expected = Oracle(expression).ticks(zone)
        timetable = timetable_of(expression, None, zone)
        parts = weeks if len(expected) > MANY else [(START, END)]
        found = [[*takewhile(end.__gt__, timetable.after(first - 1))] for first, end in parts]
        assert found == [[tick for tick in expected if first <= tick < end] for first, end in parts], expression
        # From anywhere around a change, also within a second: the next tick is the next one of the year.
        for change in changes:
            for _ in range(100):
                moment = change + draw.uniform(-7200, 7200)
                after = expected[bisect.bisect_right(expected, moment) :]
                if after:
                    assert next(timetable.after(moment)) == after[0], (expression, moment)


def test_a_tick_inside_of_a_repeated_hour_is_never_past() -> None:
    timetable = timetable_of("30 2 * * *", None, "Europe/Berlin")
    second = datetime(2026, 10, 25, 1, 0, 0, 500_000, tzinfo=UTC).timestamp()
    assert datetime.fromtimestamp(next(timetable.after(second)), UTC).isoformat() == "2026-10-26T01:30:00+00:00"


def test_six_fields_begin_with_the_seconds() -> None:
    timetable = timetable_of("*/20 * * * * *", None, "Europe/Berlin")
    start = int(datetime(2026, 10, 25, 0, 59, 30, tzinfo=UTC).timestamp())
    assert [tick - start for tick in islice(timetable.after(start), 4)] == [10, 30, 50, 70]


def test_an_interval_ticks_at_multiples_of_the_epoch() -> None:
    assert [*islice(every_timetable(15).after(1_000_000_001.5), 3)] == [1_000_000_005, 1_000_000_020, 1_000_000_035]
    assert next(every_timetable(15).after(1_000_000_005.0)) == 1_000_000_020


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("30 25 * * *", "hour must be between 0 and 23 (got 25)"),
        ("60 * * * *", "minute must be between 0 and 59 (got 60)"),
        ("61 * * * * *", "second must be between 0 and 59 (got 61)"),
        ("0 0 0 * *", "day of month must be between 1 and 31 (got 0)"),
        ("0 0 * 13 *", "month must be between 1 and 12 (got 13)"),
        ("0 0 * * 8", "day of week must be between 0 and 7 (got 8)"),
        ("0 0 30 2 *", "no date matches it"),
        ("x * * * *", "minute 'x' cannot be read"),
        ("*/0 * * * *", "minute '*/0' cannot be read"),
        ("* * *", "it must have 5 fields, or 6 with the seconds first (got 3)"),
        ("@daily", "write '0 0 * * *'"),
    ],
)
def test_an_expression_that_is_not_valid_is_refused_with_what_is_wrong(expression: str, problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        timetable_of(expression, None, "UTC")
    assert str(refused.value) == f"{expression!r} is not a valid cron expression: {problem}"


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^unknown time zone 'Europe/Berln'$"):
        zone_of("Europe/Berln")


def test_a_missed_tick_is_caught_up_for_twenty_periods_and_at_most_a_day() -> None:
    assert late_of(every_timetable(15), 0.0) == 300.0
    assert late_of(every_timetable(86_400), 0.0) == 86_400.0
    assert late_of(timetable_of("*/5 9-17 * * *", None, "UTC"), 0.0) == 6000.0


@pytest.mark.parametrize(("policy", "expected"), [("latest", [960]), ("all", [840, 900, 960]), ("none", [])])
def test_missed_ticks_run_by_the_policy(policy: str, expected: list[int]) -> None:
    due, passed = due_ticks(every_timetable(60), policy, 800, 1000.0, 1000.0)  # type: ignore[arg-type]
    assert (due, passed) == (expected, [840, 900, 960])


@pytest.mark.parametrize("policy", ["latest", "all", "none"])
def test_ticks_on_time_run_one_by_one_under_every_policy(policy: str) -> None:
    # The worker was there, but busy for 5 s.
    due, _ = due_ticks(every_timetable(1), policy, 1000, 900.0, 1005.5)  # type: ignore[arg-type]
    assert due == [1001, 1002, 1003, 1004, 1005]


def test_missed_ticks_that_are_too_late_never_run() -> None:
    due, passed = due_ticks(every_timetable(60), "all", 0, 100_000.0, 100_000.0)
    assert len(due) == 20
    assert passed == due
    weekly = timetable_of("0 0 * * 0", None, "UTC")
    monday = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
    assert due_ticks(weekly, "all", monday - 30 * 86_400, monday, monday) == ([], [])


def test_at_most_a_hundred_missed_ticks_run() -> None:
    # The gaps are a day, and for two hours of it a minute.
    timetable = timetable_of("* 0-1 * * *", None, "UTC")
    noon = datetime(2026, 11, 23, 12, 1, tzinfo=UTC).timestamp()
    due, passed = due_ticks(timetable, "all", noon - 86_400, noon, noon)
    assert len(due) <= 100
    assert due == passed[-len(due) :] if due else True


def test_a_tick_at_or_before_the_last_one_never_runs() -> None:
    # The clock was set back: the last tick is in the future.
    assert due_ticks(every_timetable(60), "all", 5000, 0.0, 1000.0) == ([], [])
