"""The contract of `wait`, and of `lease` with a timeout: what wakes them, and what ends them.

No test asserts a speed. If a wake-up is missing, the wait lasts until its own long timeout, which is longer than the
deadline of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from qworker.backend import Backend
from qworker.message import Draft, Lease, Selection, SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.contract_reap import leases_outlive_the_clock
from qworker.testing.harness import Case
from qworker.testing.rules import rule
from qworker.testing.wait_until import wait_until

__all__ = ["WaitingContract"]

# Seconds. `_ENDLESS` is the timeout of a wait, which must return before `_DEADLINE`.
_ENDLESS = 600.0
_DEADLINE = 40.0
# Seconds that a loop runs with nothing to lease, and the maximum number of calls in it. Each wait can end early, but a
# loop that spins would have thousands of calls.
_LOOP = 0.2
_MANY = 20


@contextlib.asynccontextmanager
async def woken(case: Case, by: Backend | None = None) -> AsyncGenerator[None]:
    """Prove that the code inside the block wakes a wait that began before it."""
    backend = by or case.backend

    async def wait_for_work() -> list[Lease]:
        # A wake-up is a hint, and the call can return nothing. Only a call that returns a lease counts.
        while not (leases := await backend.lease(case.queue, 1, case.long, _ENDLESS)):
            await asyncio.sleep(0)
        return leases

    async with asyncio.timeout(_DEADLINE):
        waiting = asyncio.create_task(wait_for_work())
        try:
            await case.until_waiting(waiting, by=backend)
            yield
            assert len(await waiting) == 1
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


async def returns_of_a_loop(backend: Backend, queue: str, visibility: float) -> int:
    """Return how often `lease` returns nothing in a loop with a short timeout."""
    ends = asyncio.get_running_loop().time() + _LOOP
    count = 0
    while (left := ends - asyncio.get_running_loop().time()) > 0:
        assert await backend.lease(queue, 10, visibility, left) == []
        count += 1
        # A call that never waits does not give the event loop a turn.
        await asyncio.sleep(0)
    return count


async def nothing_wakes_a_paused_queue(case: Case) -> None:
    """Prove that publishing to a paused queue gives no lease."""
    await case.publish(b"x")
    assert await case.backend.lease(case.queue, 1, case.long, 0.05) == []


class WaitingContract(Contract):
    """The tests of `wait`, and of `lease` with a timeout."""

    async def test_the_timeout_bounds_a_wait(self, case: Case) -> None:
        await case.backend.create(case.queue)
        async with asyncio.timeout(_DEADLINE):
            await case.backend.wait([case.queue], 0.05)
            await case.backend.wait([case.queue, case.queue + "-absent"], 0.05)
            await case.backend.wait([case.queue + "-absent"], 0.05)
            await case.backend.wait([case.queue], 0.0)
            assert await case.backend.lease(case.queue, 1, case.long, 0.05) == []

    async def test_a_lease_waits_for_no_message_that_is_ready(self, case: Case) -> None:
        await case.publish(*[b"x"] * 5)
        other = await case.open()
        async with asyncio.timeout(_DEADLINE):
            for backend, limit in ((case.backend, 2), (case.backend, 1), (other, 1)):
                leases = await backend.lease(case.queue, limit, case.long, _ENDLESS)
                if backend is other and not leases:
                    # If only one process can lease at a time, the other one waits until it dies.
                    continue
                assert len(leases) == limit

    async def test_a_lease_that_gives_nothing_has_waited(self, case: Case) -> None:
        absent = case.queue + "-absent"
        await case.publish(b"x")
        lease = await case.lease_one()
        for queue in (case.queue, absent):
            assert await returns_of_a_loop(case.backend, queue, case.long) <= _MANY
        assert await case.settle(lease, SettleAction.ACK)
        assert await returns_of_a_loop(case.backend, case.queue, case.long) <= _MANY
        assert absent not in await case.backend.queues()

    @rule("pause")
    async def test_a_lease_from_a_paused_queue_has_waited(self, case: Case) -> None:
        await case.publish(b"x")
        await case.backend.pause(case.queue)
        assert await returns_of_a_loop(case.backend, case.queue, case.long) <= _MANY

    async def test_a_ready_message_needs_no_wait(self, case: Case) -> None:
        await case.publish(b"x")
        async with asyncio.timeout(_DEADLINE):
            await case.backend.wait([case.queue], _ENDLESS)
        assert len(await case.lease()) == 1

    async def test_a_message_published_after_an_empty_lease_is_not_missed(self, case: Case) -> None:
        await case.backend.create(case.queue)
        for _ in range(10):
            assert await case.lease() == []
            await case.publish(b"x")
            async with asyncio.timeout(_DEADLINE):
                await case.backend.wait([case.queue], _ENDLESS)
            assert await case.settle(await case.lease_one(), SettleAction.ACK)

    async def test_a_publish_wakes_a_wait(self, case: Case) -> None:
        await case.backend.create(case.queue)
        async with woken(case):
            await case.publish(b"x")

    async def test_a_publish_by_another_worker_wakes_a_wait(self, case: Case) -> None:
        await case.backend.create(case.queue)
        other = await case.open()
        async with woken(case):
            await other.publish(case.queue, [Draft(body=b"x")])

    @rule("many_queues")
    async def test_a_publish_to_any_of_the_queues_wakes_a_wait(self, case: Case) -> None:
        other = case.queue + "-2"
        await case.backend.create(case.queue)
        await case.backend.create(other)
        try:
            waiting = asyncio.create_task(case.backend.wait([case.queue, other], _ENDLESS))
            await case.until_waiting(waiting)
            await case.backend.publish(other, [Draft(body=b"x")])
            async with asyncio.timeout(_DEADLINE):
                await waiting
            assert len(await case.backend.lease(other, 1, case.long)) == 1
        finally:
            await case.backend.delete(other)

    async def test_a_release_wakes_a_wait(self, case: Case) -> None:
        await case.publish(b"x")
        lease = await case.lease_one()
        async with woken(case):
            assert await case.settle(lease, SettleAction.RELEASE)

    async def test_a_retry_that_is_due_now_wakes_a_wait(self, case: Case) -> None:
        await case.publish(b"x")
        lease = await case.lease_one()
        async with woken(case):
            assert await case.settle(lease, SettleAction.FAIL_TMP, error="again")

    @rule("delay")
    async def test_a_message_that_is_due_needs_no_wait(self, case: Case) -> None:
        await case.publish(b"x", delay=case.tick)
        await case.harness.advance(case.tick * 1.5)
        async with asyncio.timeout(_DEADLINE):
            await case.backend.wait([case.queue], _ENDLESS)
        assert len(await case.lease()) == 1

    @rule("delay")
    async def test_a_message_that_becomes_due_ends_a_wait(self, case: Case) -> None:
        await case.publish(b"x", delay=0.5)
        waiting = asyncio.create_task(case.backend.wait([case.queue], _ENDLESS))

        async def advance() -> bool:
            await case.harness.advance(0.05)
            return waiting.done()

        try:
            await wait_until(advance, _DEADLINE)
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])

    @rule("requeue")
    async def test_a_requeue_wakes_a_wait(self, case: Case) -> None:
        await case.fail(b"x")
        async with woken(case):
            assert await case.backend.requeue(case.queue, Selection(state=State.FAILED)) == 1

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_a_reap_wakes_a_wait(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        await case.lease_one(visibility=case.tick)
        async with woken(case, by=other):
            assert await case.expire(case.tick) == 1

    @rule("pause")
    async def test_a_publish_to_a_paused_queue_ends_no_lease(self, case: Case) -> None:
        await case.publish(b"0")
        # A backend that has leased before can have read ahead.
        await case.lease_one()
        other = await case.open()
        await case.backend.pause(case.queue)
        await nothing_wakes_a_paused_queue(case)
        waiting = asyncio.create_task(case.backend.lease(case.queue, 1, case.long, 0.5))
        await case.until_waiting(waiting)
        await other.publish(case.queue, [Draft(body=b"2")])
        assert await waiting == []
        assert (await case.counts())[:2] == (2, 1)

    @rule("pause")
    async def test_up_wakes_a_wait(self, case: Case) -> None:
        await case.publish(b"x")
        await case.backend.pause(case.queue)
        await nothing_wakes_a_paused_queue(case)
        async with woken(case):
            await case.backend.resume(case.queue)

    async def test_every_waiting_worker_may_be_served(self, case: Case) -> None:
        await case.backend.create(case.queue)
        workers = [case.backend, *[await case.open() for _ in range(2)]]
        async with contextlib.AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(woken(case, by=worker))
            await case.publish(*[b"x"] * len(workers))
        assert (await case.counts())[:2] == (0, len(workers))

    async def test_a_cancelled_wait_leaves_nothing_behind(self, case: Case) -> None:
        await case.backend.create(case.queue)
        for turns in range(20):
            call = asyncio.create_task(case.backend.wait([case.queue], _ENDLESS))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        async with woken(case):
            await case.publish(b"x")
