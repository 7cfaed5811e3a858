"""Handlers in threads: how a call ends, and when a thread starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qworker import Tasks
from qworker.attempt.providers import WorkerProviders
from qworker.message import Lease, Message
from qworker.worker.delivery import CancelReason, Delivery
from qworker.worker.handlers.thread_runner import ThreadRunner
from tests.support.waiting import give_turns


def deliver(function: Callable[[], Any]) -> Delivery:
    lease = Lease(message=Message(id="a", queue="q", body=b""), token=1, expires_at=0.0)
    return Delivery(lease, 0.0, 30.0, handler=Tasks("memory://").task(function))


def make_runner(limit: int = 1) -> ThreadRunner:
    return ThreadRunner(limit, WorkerProviders(lambda *_: None))


@pytest.mark.parametrize("cancel_first", [False, True])
async def test_a_thread_that_ends_in_the_turn_of_its_cancellation_is_not_waited_for(cancel_first: bool) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(20)

    runner, delivery = make_runner(), deliver(work)
    wake = runner._wake_loop

    def note() -> bool:
        woken = wake()
        ended.set()
        return woken

    runner._wake_loop = note  # type: ignore[method-assign]
    running = asyncio.create_task(runner.run(delivery))
    await give_turns()
    if cancel_first:
        running.cancel()
    may_end.set()
    # The loop stands still, so that both are reported to it in one turn.
    assert ended.wait(20)
    if not cancel_first:
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await give_turns()
    assert delivery.leftover is None or delivery.leftover.done()
    runner.close()


async def test_a_call_in_the_queue_gets_a_thread_when_a_handler_begins_to_wait() -> None:
    may_end = threading.Event()

    def parent() -> None:
        may_end.wait(20)

    def child() -> None: ...

    runner = make_runner()
    first = asyncio.create_task(runner.run(deliver(parent)))
    await give_turns()
    second = asyncio.create_task(runner.run(deliver(child)))
    await give_turns()
    assert not second.done()
    runner.set_waiting(1)
    async with asyncio.timeout(20):
        assert await second is None
    may_end.set()
    assert await first is None
    runner.close()


async def test_a_second_reason_does_not_cancel_the_clean_up_of_the_first() -> None:
    def work() -> None: ...

    delivery = deliver(work)
    delivery.consumer = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    delivery.cancel(CancelReason.TIMEOUT)
    delivery.cancel(CancelReason.LEASE_LOST)
    assert delivery.consumer.cancelling() == 1
    assert delivery.cancel_reason is CancelReason.TIMEOUT
    await asyncio.wait([delivery.consumer])
