"""Fixed rules that find trouble in the numbers of a store."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qworker.names import counted
from qworker.sampling import QueueSnapshot, RingSample
from qworker.ui.text import duration

__all__ = ["Problem", "problems_of"]

# Seconds after which waiting messages without a worker are a problem.
_UNWORKED_S = 60.0
# Seconds of the past that count, and the failures in them that are a problem: so many, and this share of all ends.
_RECENT_S = 600.0
_MOST_FAILURES, _MOST_SHARE = 10, 0.05


class Problem(msgspec.Struct, frozen=True):
    """One problem of a queue.

    Attributes:
        queue: The queue.
        text: What is wrong, without the queue's name.
        state: The list of messages that shows it.
        unworked_at: Unix seconds since when there is no worker, if that is the problem.
    """

    queue: str
    text: str
    state: str = "ready"
    unworked_at: float | None = None

    def line(self, now: float) -> str:
        """Return what is wrong, with the time since when. A page shows it as an age."""
        return self.text if self.unworked_at is None else f"{self.text} for {duration(now - self.unworked_at)}"


def problems_of(one: QueueSnapshot, past: Sequence[RingSample], unworked: float | None, now: float) -> list[Problem]:
    """Return the problems of a queue, the worst first.

    Args:
        one: Its sample.
        past: Its samples of the last hour.
        unworked: Unix seconds since when messages wait although no worker is seen. None: that is not so.
        now: Unix seconds.
    """
    if one.problem is not None:
        return [Problem(one.queue, one.problem)]
    if one.counted is None:
        return []
    stats = one.counted.count.stats
    found: list[Problem] = []
    if stats.paused and stats.ready:
        found.append(Problem(one.queue, f"paused, {stats.ready:,} waiting"))
    elif unworked is not None and now - unworked >= _UNWORKED_S:
        found.append(Problem(one.queue, f"{stats.ready:,} waiting, no worker", unworked_at=unworked))
    if stats.blocked:
        found.append(Problem(one.queue, f"{counted(stats.blocked, 'message')} cannot be read by workers"))
    recent = [sample for sample in past if sample.at >= now - _RECENT_S]
    failures, acked = sum(sample.failures for sample in recent), sum(sample.acked for sample in recent)
    if failures > _MOST_FAILURES and failures > _MOST_SHARE * (failures + acked):
        found.append(Problem(one.queue, f"{counted(failures, 'failure')} in 10 min", "failed"))
    return found
