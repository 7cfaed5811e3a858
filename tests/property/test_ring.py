"""The ring of samples: what is stored is what is read, whatever a crash has left of a write."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.kit.samples import MemorySamples
from qworker.sampling.ring import HEADER, LEVELS, RING_SIZE, Ring, RingSample, decode_sample, encode_sample, fold
from qworker.sampling.snapshot import Percentiles

QUEUE = "jobs"
_STEP = LEVELS[0].step
# Records have 32-bit seconds.
_SECONDS = st.integers(0, 2**20).map(lambda eighths: eighths / 8)
_COUNT = st.integers(0, 2**32 - 1)
_TIMES = st.none() | st.builds(Percentiles, _SECONDS, _SECONDS, _SECONDS)
_PERIODS = st.integers(170_000_000, 170_100_000)
_SAMPLES = st.builds(
    RingSample,
    at=_PERIODS.map(lambda period: float(period * _STEP)),
    ready=_COUNT,
    leased=_COUNT,
    delayed=_COUNT,
    failed=_COUNT,
    oldest_age_s=st.none() | _SECONDS,
    acked=st.integers(0, 1000),
    failures=st.integers(0, 1000),
    retried=st.integers(0, 1000),
    lost=st.integers(0, 1000),
    wait=_TIMES,
    run=_TIMES,
    workers=st.integers(0, 2**16 - 1),
    exact=st.booleans(),
    paused=st.booleans(),
)


def sample(period: int, ready: int = 0, acked: int = 0, workers: int = 0) -> RingSample:
    return RingSample(at=float(period * _STEP), ready=ready, acked=acked, workers=workers)


@given(_SAMPLES)
def test_a_record_has_every_field_in_80_bytes(one: RingSample) -> None:
    record = encode_sample(one)
    assert len(record) == 80
    assert decode_sample(record) == one


@given(_SAMPLES, st.integers(0, 79), st.integers(1, 255))
def test_a_record_with_a_changed_byte_is_no_sample(one: RingSample, place: int, change: int) -> None:
    record = bytearray(encode_sample(one))
    record[place] ^= change
    assert decode_sample(bytes(record)) is None
    assert decode_sample(bytes(80)) is None


def test_a_number_that_does_not_fit_is_the_largest_that_does() -> None:
    stored = decode_sample(encode_sample(sample(1, ready=2**40, workers=10**6)))
    assert stored is not None
    assert (stored.ready, stored.workers) == (2**32 - 1, 2**16 - 1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 800), min_size=1, max_size=40))
async def test_a_ring_has_the_newest_period_of_each_place_and_the_sums_of_coarser_ones(steps: list[int]) -> None:
    ring, now = Ring(MemorySamples(), QUEUE), 170_000_000
    added: dict[int, RingSample] = {}
    for step in steps:
        # The coarser samples are renewed when a minute begins.
        now += step * 6
        # The same period again is another process, whose sample comes too late.
        late = sample(now, ready=999, acked=999)
        await ring.add(late if now in added else added.setdefault(now, sample(now, ready=step, acked=1)))
    end = now * _STEP
    finest = LEVELS[0]
    expected = [one for one in added.values() if one.at > end - finest.step * finest.slots]
    assert await ring.read(finest, end) == expected
    for level in LEVELS[1:]:
        for stored in await ring.read(level, end):
            within = [one for one in added.values() if stored.at <= one.at < stored.at + level.step]
            # What the finer ring had lost by then is not in the sum any more.
            assert 1 <= stored.acked <= len(within)
            assert stored.ready == within[-1].ready


def test_a_fold_has_the_last_counts_the_sums_and_the_largest_times() -> None:
    slow, fast = Percentiles(2.0, 3.0, 4.0), Percentiles(1.0, 5.0, 1.0)
    folded = fold(
        [
            RingSample(at=0.0, ready=9, acked=2, lost=1, wait=slow, workers=3, exact=False),
            RingSample(at=10.0, ready=4, acked=5, wait=fast, workers=1, paused=True),
        ],
        0.0,
    )
    assert folded == RingSample(
        at=0.0, ready=4, acked=7, lost=1, wait=Percentiles(2.0, 5.0, 4.0), workers=3, exact=False, paused=True
    )


async def test_coarser_samples_are_written_once_a_minute_and_have_all_of_a_period_that_has_ended() -> None:
    store, coarser = MemorySamples(), LEVELS[1]
    ring, first = Ring(store, QUEUE), 170_000_010
    for number in range(7):
        await ring.add(sample(first + number, acked=1))
        (folded,) = await ring.read(coarser, float(first * _STEP))
        assert folded.acked == (1 if number < 6 else 7)
    # Nothing is added from here to the next period. The one that has ended gets what it had.
    await ring.add(sample(first + 8, acked=1))
    await ring.add(sample(first + 200, acked=1))
    assert [one.acked for one in await ring.read(coarser, float((first + 200) * _STEP))] == [8, 1]
    # And so it does if another process goes on.
    await ring.add(sample(first + 205, acked=1))
    await Ring(store, QUEUE).add(sample(first + 211, acked=1))
    assert [one.acked for one in await ring.read(coarser, float((first + 211) * _STEP))] == [8, 2, 1]


class _Cut(MemorySamples):
    """Blocks whose process dies after some bytes of a write."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left: int | None = left

    async def write(self, queue: str, offset: int, data: bytes) -> None:
        if self.left is not None:
            data, self.left = data[: self.left], self.left - len(data)
            if self.left <= 0:
                await super().write(queue, offset, data)
                self.left = None
                raise ConnectionResetError
        await super().write(queue, offset, data)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, len(HEADER) + 80 * 6))
async def test_a_write_that_is_cut_loses_at_most_its_own_sample(left: int) -> None:
    store = _Cut(left)
    ring = Ring(store, QUEUE)
    # One a minute, in one period of the coarser levels.
    given_samples = [sample(170_000_010 + number * 6, ready=number, acked=1) for number in range(4)]
    kept: list[RingSample] = []
    for one in given_samples:
        try:
            await ring.add(one)
        except ConnectionResetError:
            # A cut in a coarser sample leaves the finer one.
            kept = await ring.read(LEVELS[0], given_samples[-1].at)
    found = await ring.read(LEVELS[0], given_samples[-1].at)
    assert found[-1] == given_samples[-1]
    assert len(found) >= len(given_samples) - 1
    assert [one for one in kept if one not in found] == []
    (folded,) = await ring.read(LEVELS[1], given_samples[-1].at)
    assert folded.acked == len(found)


@given(st.binary(min_size=1, max_size=len(HEADER)).filter(lambda start: start != HEADER))
async def test_a_block_that_is_not_a_ring_is_thrown_away(start: bytes) -> None:
    store = MemorySamples()
    await store.write(QUEUE, 0, start + struct.pack("<d", 1.0) * 20)
    ring = Ring(store, QUEUE)
    assert await ring.read(LEVELS[0], 1_700_000_000.0) == []
    await ring.add(sample(170_000_000))
    assert await ring.read(LEVELS[0], 1_700_000_000.0) == [sample(170_000_000)]
    assert RING_SIZE == 64 + (360 + 288 + 336) * 80


async def test_a_new_ring_keeps_the_count_that_follows_it() -> None:
    store = MemorySamples()
    await store.write(QUEUE, RING_SIZE, b"count")
    await Ring(store, QUEUE).add(sample(170_000_000))
    assert await store.read(QUEUE, RING_SIZE, 10) == b"count"
