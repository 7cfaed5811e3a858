"""The past of a queue: an hour, a day and a week of samples, in one block of fixed size (docs/samples.md).

The place of a sample follows from its time. So a sample that is written twice is stored once, a pause is a gap, and no
pointer has to be right. Each sample has a checksum: one that a crash has cut is a gap as well.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from qworker.kit.samples import SampleStore
from qworker.sampling.snapshot import Percentiles

__all__ = ["HEADER", "LEVELS", "RING_SIZE", "Level", "Ring", "RingSample", "decode_sample", "encode_sample", "fold"]

HEADER = b"qworker samples 1\n".ljust(64, b"\0")
# Time, five counts of which one is reserved, age of the oldest, four outcomes, waits, runs, workers, flags, checksum.
_RECORD = struct.Struct("<d5If4I6fHHI")
_SIZE = _RECORD.size
_CHECKED = _SIZE - 4
_EXACT, _PAUSED = 1, 2
_NONE = math.nan
_MOST, _MOST_WORKERS = 2**32 - 1, 2**16 - 1


class Level(msgspec.Struct, frozen=True, gc=False):
    """One resolution of a ring.

    Attributes:
        step: Seconds that one sample covers.
        slots: The number of samples.
        offset: The place of the first one in the block.
    """

    step: int
    slots: int
    offset: int

    def place(self, at: float) -> int:
        """Return the offset of the sample of a moment."""
        return self.offset + int(at // self.step) % self.slots * _SIZE

    def start(self, at: float) -> float:
        """Return the start of the period that has a moment."""
        return at // self.step * self.step


# An hour, a day and a week.
LEVELS = (
    Level(10, 360, len(HEADER)),
    Level(300, 288, len(HEADER) + 360 * _SIZE),
    Level(1800, 336, len(HEADER) + (360 + 288) * _SIZE),
)
# Seconds between two renewals of the coarser levels. Their steps are multiples of it.
_RENEW_S = 60
RING_SIZE = len(HEADER) + sum(level.slots for level in LEVELS) * _SIZE


class RingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One period of a queue.

    Attributes:
        at: Unix seconds of its start.
        ready: Ready messages at its end, as last counted.
        leased: Leased messages.
        delayed: Delayed messages.
        failed: Messages in the state failed.
        oldest_age_s: Seconds that the oldest ready message had waited. None: no message was ready.
        acked: Messages that were acked in the period. This and the next three are 0 without a history.
        failures: Messages that failed.
        retried: Attempts that failed and were repeated.
        lost: Leases that ended without an outcome.
        wait: Time from the publish to the first lease. In a period of several samples: the largest of each.
        run: Time in the handler, in the same way.
        workers: Workers that recorded an event.
        exact: Whether the counts are exact.
        paused: Whether the queue was paused.
    """

    at: float
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    failed: int = 0
    oldest_age_s: float | None = None
    acked: int = 0
    failures: int = 0
    retried: int = 0
    lost: int = 0
    wait: Percentiles | None = None
    run: Percentiles | None = None
    workers: int = 0
    exact: bool = True
    paused: bool = False


def encode_sample(sample: RingSample) -> bytes:
    """Return the record of a sample."""
    counts = (sample.ready, sample.leased, sample.delayed, 0, sample.failed)
    outcomes = (sample.acked, sample.failures, sample.retried, sample.lost)
    packed = _RECORD.pack(
        sample.at,
        *[min(count, _MOST) for count in counts],
        _NONE if sample.oldest_age_s is None else sample.oldest_age_s,
        *[min(count, _MOST) for count in outcomes],
        *_seconds(sample.wait),
        *_seconds(sample.run),
        min(sample.workers, _MOST_WORKERS),
        sample.exact * _EXACT | sample.paused * _PAUSED,
        0,
    )[:_CHECKED]
    return packed + zlib.crc32(packed).to_bytes(4, "little")


def decode_sample(record: bytes) -> RingSample | None:
    """Read a record. None: it is empty, or was written in part."""
    if len(record) != _SIZE or zlib.crc32(record[:_CHECKED]) != int.from_bytes(record[_CHECKED:], "little"):
        return None
    at, ready, leased, delayed, _, failed, oldest, *rest, workers, flags, _ = _RECORD.unpack(record)
    acked, failures, retried, lost, *times = rest
    return RingSample(
        at=at,
        ready=ready,
        leased=leased,
        delayed=delayed,
        failed=failed,
        oldest_age_s=None if math.isnan(oldest) else oldest,
        acked=acked,
        failures=failures,
        retried=retried,
        lost=lost,
        wait=_percentiles(times[:3]),
        run=_percentiles(times[3:]),
        workers=workers,
        exact=bool(flags & _EXACT),
        paused=bool(flags & _PAUSED),
    )


def _seconds(times: Percentiles | None) -> tuple[float, float, float]:
    return (_NONE, _NONE, _NONE) if times is None else (times.p50, times.p95, times.p99)


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    return None if math.isnan(seconds[0]) else Percentiles(*seconds)


def fold(samples: Sequence[RingSample], at: float) -> RingSample:
    """Return one sample for the period of several, of which there is at least one.

    Args:
        samples: The samples, sorted by time.
        at: The start of the period.
    """
    return msgspec.structs.replace(
        samples[-1],
        at=at,
        **{name: sum(getattr(one, name) for one in samples) for name in ("acked", "failures", "retried", "lost")},
        wait=_largest(one.wait for one in samples),
        run=_largest(one.run for one in samples),
        workers=max(one.workers for one in samples),
        exact=all(one.exact for one in samples),
    )


def _largest(times: Iterable[Percentiles | None]) -> Percentiles | None:
    known = [(one.p50, one.p95, one.p99) for one in times if one is not None]
    return Percentiles(*[max(column) for column in zip(*known, strict=True)]) if known else None


class Ring:
    """The ring of one queue.

    Args:
        store: Where its block is.
        queue: The queue.
    """

    def __init__(self, store: SampleStore, queue: str) -> None:
        self._store = store
        self._queue = queue
        # The time of the last sample that this object added completely.
        self._last_at: float | None = None

    async def add(self, sample: RingSample) -> None:
        """Store a sample of the finest level, and renew the coarser ones about once a minute.

        A sample of the same period that another process has stored stays.

        Raises:
            BackendError: It cannot be stored.
        """
        last = self._last_at
        is_due = last is None or last // _RENEW_S != sample.at // _RENEW_S
        if is_due:
            await self._prepare()
        finest = LEVELS[0]
        stored = decode_sample(await self._store.read(self._queue, finest.place(sample.at), _SIZE))
        if stored is None or stored.at != sample.at:
            await self._store.write(self._queue, finest.place(sample.at), encode_sample(sample))
        if is_due:
            await self._renew_coarser(last, sample.at)
        self._last_at = sample.at

    async def _renew_coarser(self, last: float | None, at: float) -> None:
        """Renew the coarser samples of a moment, and those of the last sample, which may be in an earlier period."""
        for finer, coarser in pairwise(LEVELS):
            start = coarser.start(at)
            # The process that stored the last sample may have died before it renewed the coarser ones.
            before = start - coarser.step if last is None else coarser.start(last)
            for period in dict.fromkeys((before, start)):
                found = await self._read(finer, period, period + coarser.step)
                if found:
                    await self._store.write(self._queue, coarser.place(period), encode_sample(fold(found, period)))

    async def read(self, level: Level, now: float) -> list[RingSample]:
        """Return the samples of a level up to a moment, sorted by time. A period without a sample is left out.

        Raises:
            BackendError: They cannot be read.
        """
        if await self._store.read(self._queue, 0, len(HEADER)) != HEADER:
            return []
        end = level.start(now) + level.step
        return await self._read(level, end - level.step * level.slots, end)

    async def _prepare(self) -> None:
        """Make an empty ring if there is none. A ring that is damaged, or has another format, is thrown away."""
        if await self._store.read(self._queue, 0, len(HEADER)) == HEADER:
            return
        # The count that follows the ring stays: it may have been stored before.
        await self._store.write(self._queue, len(HEADER), bytes(RING_SIZE - len(HEADER)))
        await self._store.write(self._queue, 0, HEADER)

    async def _read(self, level: Level, start: float, end: float) -> list[RingSample]:
        """Return the samples from `start` to before `end`."""
        first, last = level.place(start), level.place(end - level.step)
        if first <= last and end - start < level.step * level.slots:
            block = await self._store.read(self._queue, first, last + _SIZE - first)
        else:
            block = await self._store.read(self._queue, level.offset, level.slots * _SIZE)
        records = (block[place : place + _SIZE] for place in range(0, len(block), _SIZE))
        found = [one for record in records if (one := decode_sample(record)) is not None and start <= one.at < end]
        return sorted(found, key=lambda one: one.at)
