"""Tasks beside a block, and races of two: who ended, which error is raised, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import pytest
import uvloop

from qworker.kit.task_groups import background_tasks, run_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from tests.support.waiting import give_turns

T = TypeVar("T")
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    """Run a test on a loop. Fail if it leaves a task behind."""

    def running(test: Callable[[], Awaitable[None]]) -> None:
        async def checked() -> bool:
            await test()
            # What is cancelled ends in the next turn.
            await give_turns(2)
            return asyncio.all_tasks() == {asyncio.current_task()}

        with asyncio.Runner(loop_factory=request.param) as runner:
            assert runner.run(checked()), "a task is left behind"

    return running


class Failed(Exception):
    """The error of a task."""


async def fail(cause: Exception | None = None) -> None:
    await asyncio.sleep(0)
    raise Failed("on purpose") from cause


async def forever(ends: list[str], name: str = "forever") -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ends.append(name)


async def give(result: T) -> T:
    await asyncio.sleep(0)
    return result


def test_the_result_of_the_work_ends_the_wait_for_the_end(run):
    async def test() -> None:
        ends: list[str] = []
        assert await run_until(partial(forever, ends), give("done")) == "done"
        await give_turns(2)
        assert ends == ["forever"]

    run(test)


def test_an_end_that_comes_first_cancels_the_work(run):
    async def test() -> None:
        ends: list[str] = []
        undone: list[Any] = []
        assert await run_until(partial(give, "end"), forever(ends, "work"), partial(undo, undone)) is None
        assert (ends, undone) == (["work"], [])

    run(test)


async def undo(undone: list[Any], result: Any) -> None:
    await asyncio.sleep(0)
    undone.append(result)


def test_a_result_in_the_turn_of_the_end_is_undone_and_not_returned(run):
    async def test() -> None:
        undone: list[Any] = []
        for before in range(10):
            end, work = asyncio.Event(), asyncio.get_running_loop().create_future()
            racing = asyncio.create_task(run_until(end.wait, work, partial(undo, undone)))
            await wait_until_blocked(racing)
            if before % 2:
                end.set()
            work.set_result(before)
            if not before % 2:
                end.set()
            result = await racing
            assert (undone, result) in (([before], None), ([], before))
            undone.clear()

    run(test)


def test_a_work_that_ends_well_although_it_is_cancelled_is_undone(run):
    async def test() -> None:
        undone: list[Any] = []

        async def work() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
            return "lease"

        assert await run_until(partial(give, "end"), work(), partial(undo, undone)) is None
        assert undone == ["lease"]

    run(test)


@pytest.mark.parametrize("turns", range(6))
def test_a_cancelled_caller_is_cancelled_and_a_result_that_it_misses_is_undone(run, turns):
    async def test() -> None:
        undone: list[Any] = []
        ends: list[str] = []
        work = asyncio.get_running_loop().create_future()
        racing = asyncio.create_task(run_until(partial(forever, ends), work, partial(undo, undone)))
        await wait_until_blocked(racing)
        work.set_result("lease")
        for _ in range(turns):
            await asyncio.sleep(0)
        racing.cancel()
        await asyncio.wait([racing])
        await give_turns(2)
        assert ends == ["forever"]
        # With the cancellation in the same turn the future has its result, but the work never sees it.
        received = [] if racing.cancelled() else [racing.result()]
        assert undone + received == (["lease"] if turns else [])

    run(test)


@pytest.mark.parametrize("how", ["task", "scope"])
def test_an_undo_that_has_begun_ends_although_its_caller_is_cancelled(run, how):
    """The lease of a client that has disconnected is released, also if the server ends at that moment."""

    async def test() -> None:
        undone: list[Any] = []
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slow_undo(result: Any) -> None:
            begun.set()
            await may_end.wait()
            await undo(undone, result)

        async def work() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
            return "lease"

        scope = anyio.CancelScope()

        async def call() -> None:
            with scope:
                await run_until(partial(give, "end"), work(), slow_undo)

        calling = asyncio.create_task(call())
        await begun.wait()
        for _ in range(2):
            if how == "task":
                calling.cancel()
            else:
                scope.cancel()
            await give_turns(5)
        assert not calling.done()
        may_end.set()
        await asyncio.wait([calling])
        assert undone == ["lease"]
        assert calling.cancelled() == (how == "task")

    run(test)


def test_a_cancellation_of_the_caller_is_no_end(run):
    async def test() -> None:
        ends: list[str] = []
        racing = asyncio.create_task(run_until(partial(forever, ends), forever(ends, "work")))
        await wait_until_blocked(racing)
        racing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await racing
        await give_turns(2)
        assert sorted(ends) == ["forever", "work"]

    run(test)


def test_a_timeout_around_a_race_is_a_timeout(run):
    async def test() -> None:
        ends: list[str] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await run_until(partial(forever, ends), forever(ends, "work"))
        # After an end the task can wait again, and its timeout still counts.
        async with asyncio.timeout(30):
            assert await run_until(partial(give, "end"), forever(ends, "work")) is None
            assert await give("next") == "next"
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(test)


def test_the_error_of_the_work_is_raised_with_its_cause_and_in_no_group(run):
    async def test() -> None:
        ends: list[str] = []
        cause = ValueError("the cause")
        with pytest.raises(Failed) as raised:
            await run_until(partial(forever, ends), fail(cause))
        await give_turns(2)
        assert raised.value.__cause__ is cause
        assert ends == ["forever"]

    run(test)


def test_an_end_that_fails_cancels_the_work_and_its_error_is_raised(run):
    async def test() -> None:
        ends: list[str] = []
        with pytest.raises(Failed):
            await run_until(fail, forever(ends, "work"))
        assert ends == ["work"]

    run(test)


def test_a_failed_background_task_cancels_the_block_and_the_others(run):
    async def test() -> None:
        ends: list[str] = []
        cause = ValueError("the cause")
        with pytest.raises(Failed) as raised:
            async with background_tasks(partial(forever, ends), partial(fail, cause)):
                await forever(ends, "block")
        assert raised.value.__cause__ is cause
        assert sorted(ends) == ["block", "forever"]

    run(test)


def test_background_tasks_end_with_the_block(run):
    async def test() -> None:
        ends: list[str] = []
        async with background_tasks(partial(forever, ends)) as group:
            group.start_soon(forever, ends, "later")
            await asyncio.sleep(0)
        assert sorted(ends) == ["forever", "later"]
        with pytest.raises(Failed):
            async with background_tasks(partial(forever, ends, "third")):
                await fail()
        assert ends[2:] == ["third"]

    run(test)


def test_a_group_of_errors_from_the_block_stays_a_group(run):
    async def test() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with background_tasks():
                raise ExceptionGroup("of the user", [Failed(), ValueError()])
        assert raised.value.message == "of the user"
        assert len(raised.value.exceptions) == 2

    run(test)
