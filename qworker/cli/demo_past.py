"""A made-up past for `qworker demo --ui`: the samples of a week, from which the dashboard draws its charts."""

from __future__ import annotations

import math
import random

import msgspec

from qworker.sampling.ring import HEADER, LEVELS, RING_SIZE, RingSample, encode_sample
from qworker.sampling.snapshot import Percentiles

__all__ = ["Past", "ring_of"]

_DAY_S = 86_400.0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """How a queue was used until now.

    Attributes:
        per_second: Messages that were published per second, on average over the day.
        run_s: Seconds that half of the handlers took.
        waiting: Messages that usually wait.
        failed: Part of the attempts that failed.
        retried: Part of the attempts that were repeated.
        stopped_s: Seconds for which messages have been published, but not leased. 0: it works.
        paused: Whether that is because the queue is paused.
        batch: Messages that were published at once.
        batch_s: Seconds since then.
    """

    per_second: float
    run_s: float
    waiting: float = 0.0
    failed: float = 0.0
    retried: float = 0.0
    stopped_s: float = 0.0
    paused: bool = False
    batch: int = 0
    batch_s: float = 0.0

    @property
    def ready(self) -> int:
        """How many messages wait now because nothing leases them, or because a batch is not done yet."""
        return self._piled_up(0.0)

    def sample(self, at: float, ago: float, step: float, chance: random.Random) -> RingSample:
        """Return one period.

        Args:
            at: Unix seconds of its start.
            ago: Seconds since its end.
            step: Seconds that it covers.
            chance: What makes it differ from the others.
        """
        # A shop has more to do in the evening than in the early morning.
        busy = 1.0 + 0.6 * math.sin((at % _DAY_S / _DAY_S - 0.55) * math.tau) + 0.25 * math.sin(at / 700.0)
        busy *= chance.uniform(0.85, 1.15)
        is_stopped = ago < self.stopped_s
        ended = 0.0 if is_stopped else self.per_second * busy * step
        usual = 0.0 if is_stopped else self.waiting * busy**3 * chance.uniform(0.6, 1.4)
        ready = int(usual + self._piled_up(ago))
        run = self.run_s * chance.uniform(0.9, 1.2)
        wait = ready / self.per_second * 0.7 + 0.01
        return RingSample(
            at=at,
            ready=ready,
            leased=0 if is_stopped else max(1, round(self.per_second * busy * run)),
            oldest_age_s=(self.stopped_s - ago if is_stopped else wait) if ready else None,
            acked=round(ended * (1 - self.failed - self.retried)),
            failures=round(ended * self.failed * chance.uniform(0, 2)),
            retried=round(ended * self.retried * chance.uniform(0.3, 1.7)),
            wait=None if is_stopped else Percentiles(wait / 3, wait, wait * 1.6),
            run=None if is_stopped else Percentiles(run, run * 2.2, run * 4),
            workers=0 if is_stopped else 2,
            paused=self.paused and is_stopped,
        )

    def _piled_up(self, ago: float) -> int:
        """Return the messages that waited some seconds ago, besides the usual ones."""
        stopped = self.per_second * max(0.0, self.stopped_s - ago)
        batch = self.batch - self.per_second * (self.batch_s - ago) if ago < self.batch_s else 0.0
        return int(stopped + max(0.0, batch))


def ring_of(queue: str, past: Past, now: float) -> bytes:
    """Return the block of samples of a queue with this past."""
    block = bytearray(RING_SIZE)
    block[: len(HEADER)] = HEADER
    # The same numbers in each demo.
    chance = random.Random(queue)
    for level in LEVELS:
        # The current period is left to the process that samples now.
        last = level.start(now) - level.step
        for number in range(level.slots):
            at = last - level.step * number
            sample = encode_sample(past.sample(at, now - at - level.step, level.step, chance))
            place = level.place(at)
            block[place : place + len(sample)] = sample
    return bytes(block)
