"""An answer is looked for instead of slept for where that pays, and only there."""

from __future__ import annotations

from qworker_redis.spin_wait import CLOSE, LONGEST, SpinWait


class Ticking:
    """A clock that each look moves on."""

    def __init__(self, step: float = LONGEST / 20) -> None:
        self.now = 0.0
        self.step = step
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += self.step
        return self.now


async def one_call(spin: SpinWait, clock: Ticking, passes: int) -> int:
    """A call whose answer takes some passes of the loop; how often the clock was looked at."""
    left = passes

    async def can_read() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    before = clock.looks
    if spin.is_worth_it():
        await spin.poll(can_read)
    spin.answered()
    return clock.looks - before


# The look at the beginning, and the one at the end.
SLEPT = 2


async def test_answers_that_come_at_once_are_looked_for_in_every_call_but_the_first() -> None:
    clock = Ticking()
    spin = SpinWait(clock, processors=2)
    assert await one_call(spin, clock, 5) == SLEPT
    for _ in range(100):
        assert await one_call(spin, clock, 5) > SLEPT


async def test_answers_that_take_longer_are_looked_for_ever_more_seldom() -> None:
    clock = Ticking()
    spin = SpinWait(clock, processors=2)
    looked = [await one_call(spin, clock, 50) > SLEPT for _ in range(200)]
    assert [number for number, one in enumerate(looked) if one] == [1, 3, 7, 15, 31, 63, 127]
    # And again in each, once it has helped.
    for _ in range(130):
        await one_call(spin, clock, 5)
    assert await one_call(spin, clock, 5) > SLEPT


async def test_calls_that_are_far_apart_leave_the_processor_to_others() -> None:
    clock = Ticking()
    spin = SpinWait(clock, processors=2)
    for _ in range(10):
        assert await one_call(spin, clock, 5) == SLEPT
        clock.now += CLOSE


async def test_a_single_processor_is_left_to_the_server() -> None:
    clock = Ticking()
    spin = SpinWait(clock, processors=1)
    for _ in range(10):
        assert await one_call(spin, clock, 5) <= SLEPT
