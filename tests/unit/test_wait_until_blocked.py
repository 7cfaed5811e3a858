"""`wait_until_blocked`: when a task waits for something, and what does not count as waiting."""

from __future__ import annotations

import asyncio

import pytest

from qworker.testing import wait_until_blocked


async def test_a_task_is_blocked_when_it_waits_for_an_event() -> None:
    event, steps = asyncio.Event(), []

    async def work() -> None:
        for step in range(50):
            await asyncio.sleep(0)
            steps.append(step)
        await event.wait()

    task = asyncio.create_task(work())
    assert await wait_until_blocked(task)
    assert len(steps) == 50
    event.set()
    await task


async def test_a_task_that_has_ended_is_not_blocked() -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    task = asyncio.create_task(work())
    assert not await wait_until_blocked(task)
    assert task.done()
    assert not await wait_until_blocked(task)


async def test_a_task_that_waits_for_a_task_that_runs_is_not_blocked() -> None:
    event, steps = asyncio.Event(), []

    async def inner() -> None:
        for step in range(50):
            await asyncio.sleep(0)
            steps.append(step)
        await event.wait()

    async def outer() -> None:
        await asyncio.create_task(inner())

    task = asyncio.create_task(outer())
    assert await wait_until_blocked(task)
    assert len(steps) == 50
    event.set()
    await task


async def test_a_future_that_is_done_blocks_nobody() -> None:
    passed = []

    async def work() -> None:
        for _ in range(50):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(future.set_result, None)
            await future
            passed.append(future)

    assert not await wait_until_blocked(asyncio.create_task(work()))
    assert len(passed) == 50


async def test_a_task_that_never_comes_to_a_halt_is_a_failure() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    task = asyncio.create_task(spin())
    with pytest.raises(AssertionError, match="not blocked within"):
        await wait_until_blocked(task, timeout=0.05)
    task.cancel()
