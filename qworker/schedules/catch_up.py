"""Which ticks are due: those on time, and by the policy those that were missed."""

from __future__ import annotations

from itertools import takewhile
from typing import Literal

from qworker.schedules.timetable import Timetable, late_of

__all__ = ["ON_TIME", "due_ticks"]

# Seconds. A tick that is this late, because the worker was busy, is still on time. A longer step of the clock counts as
# time in which ticks were missed.
ON_TIME = 10.0
# Missed ticks that `all` runs at most.
_MOST_MISSED = 100


def due_ticks(
    timetable: Timetable, catch_up: Literal["latest", "all", "none"], last: float, awake: float, now: float
) -> tuple[list[int], list[int]]:
    """Return the ticks to enqueue, and all that have passed, both with the oldest first.

    Args:
        timetable: The ticks.
        catch_up: The policy for ticks that were missed.
        last: The last tick. Only later ones count.
        awake: Since when a worker was there to tick. Earlier ticks were missed.
        now: The time.
    """
    begin = max(last, now - late_of(timetable, now))
    passed = list(takewhile(lambda tick: tick <= now, timetable.after(begin)))
    if not passed:
        return [], []
    # A tick at the very moment of the start is on time.
    since = max(awake, now - ON_TIME)
    on_time = [tick for tick in passed if tick >= since]
    missed = [tick for tick in passed if tick < since]
    # One tick is enough after a gap: with one on time, the missed ones are not the latest.
    latest = [] if on_time else missed[-1:]
    caught_up = {"latest": latest, "all": missed[-_MOST_MISSED:], "none": []}[catch_up]
    return caught_up + on_time, passed
