"""The contract of `reap`: an expired message becomes ready once, with one more try."""

from __future__ import annotations

import asyncio

from qworker.message import SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule
from qworker.testing.wait_until import wait_until

__all__ = ["ReapingContract"]


async def leases_outlive_the_clock(case: Case) -> None:
    """Prove a deviation from `expiry`."""
    await case.publish(b"x")
    lease = await case.lease_one(visibility=case.tick)
    assert await case.expire(case.tick) == 0
    assert await case.lease(10) == []
    assert await case.settle(lease, SettleAction.ACK)


async def expiries_count_no_try(case: Case) -> None:
    """Prove a deviation from `tries_counted`."""
    await case.publish(b"x")
    await case.lease_one(visibility=case.tick)
    await case.expire(case.tick)
    assert (await case.lease_one()).message.tries == 0


async def deaths_stay_zero(case: Case) -> None:
    """Prove a deviation from `deaths`."""
    await case.publish(b"x")
    lease = await case.lease_one()
    assert await case.settle(lease, SettleAction.FAIL_TMP, died=True)
    assert (await wait_until(case.lease))[0].message.deaths == 0


class ReapingContract(Contract):
    """The tests of `reap`."""

    async def test_there_is_nothing_to_reap_in_an_absent_queue(self, case: Case) -> None:
        assert (await case.backend.reap(case.queue)).returned == 0

    async def test_there_is_nothing_to_reap_while_leases_live(self, case: Case) -> None:
        await case.publish(b"1", b"2")
        await case.lease_one()
        for _ in range(3):
            assert (await case.backend.reap(case.queue)).returned == 0
        assert (await case.counts())[:2] == (1, 1)

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_an_expired_lease_returns_to_ready(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        await case.lease_one(visibility=case.tick)
        assert await case.expire(case.tick) == 1
        assert await case.state(message_id) is State.READY
        lease = await case.lease_one()
        assert (lease.message.id, lease.message.body) == (message_id, b"x")

    @rule("tries_counted", otherwise=expiries_count_no_try)
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_each_expiry_is_one_more_try(self, case: Case) -> None:
        await case.publish(b"x")
        for tries in range(3):
            assert (await case.lease_one(visibility=case.tick)).message.tries == tries
            assert await case.expire(case.tick) == 1

    @rule("deaths", otherwise=deaths_stay_zero)
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_each_expiry_in_a_row_is_one_more_death(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        for deaths in range(3):
            lease = await case.lease_one(visibility=case.tick)
            assert (lease.message.tries, lease.message.deaths) == (deaths, deaths)
            assert await case.expire(case.tick) == 1
        (stored,) = await case.backend.find(case.queue, [message_id])
        assert (stored.message.tries, stored.message.deaths) == (3, 3)

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_another_worker_reaps_what_expired(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        await case.lease_one(visibility=case.tick)
        assert await case.expire(case.tick, by=other) == 1
        assert (await case.lease_one(by=other)).message.body == b"x"

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_an_expired_lease_is_reaped_once(self, case: Case) -> None:
        await case.publish(*[b"x"] * 20)
        workers = [case.backend, await case.open(), await case.open()]
        await case.lease(20, visibility=case.tick)
        counts = [(await worker.reap(case.queue)).returned for worker in workers]
        await case.harness.advance(case.tick * 1.5)
        for _ in range(2):
            results = await asyncio.gather(*[worker.reap(case.queue) for worker in workers])
            counts.extend(result.returned for result in results)
        assert sum(counts) == 20
        leases = await case.lease(100)
        assert [lease.message.tries for lease in leases] == [1] * 20

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_only_what_expired_is_reaped(self, case: Case) -> None:
        await case.publish(b"short", b"long")
        await case.lease_one(visibility=case.tick)
        held = await case.lease_one()
        assert await case.expire(case.tick) == 1
        assert await case.leased_bodies() == [b"short"]
        assert await case.settle(held, SettleAction.ACK)

    @rule("delay")
    async def test_due_messages_are_ready_after_a_reap(self, case: Case) -> None:
        ids = await case.publish(b"1", b"2", delay=case.tick)
        await case.publish(b"later", delay=case.long)
        assert (await case.backend.reap(case.queue)).returned == 0
        await case.harness.advance(case.tick * 1.5)
        await case.backend.reap(case.queue)
        assert [await case.state(message_id) for message_id in ids] == [State.READY] * 2
        assert sorted(await case.leased_bodies()) == [b"1", b"2"]
        assert (await case.counts())[2] == 1

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_a_paused_queue_still_reaps(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        await case.lease_one(visibility=case.tick)
        await case.backend.pause(case.queue)
        assert await case.expire(case.tick) == 1
        assert await case.state(message_id) is State.READY

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_the_leases_of_a_closed_worker_come_back(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        await case.lease_one(visibility=case.tick, by=other)
        await other.aclose()
        assert await case.expire(case.tick) == 1
        assert (await case.lease_one()).message.body == b"x"

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_a_cancelled_reap_loses_nothing(self, case: Case) -> None:
        await case.publish(*[b"x"] * 20)
        await case.lease(20, visibility=case.tick)
        await case.backend.reap(case.queue)
        await case.harness.advance(case.tick * 1.5)
        for turns in range(20):
            call = asyncio.create_task(case.backend.reap(case.queue))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])

        async def all_are_back() -> bool:
            await case.backend.reap(case.queue)
            return (await case.counts())[:2] == (20, 0)

        await wait_until(all_are_back)
        leases = await case.lease(100)
        assert [lease.message.tries for lease in leases] == [1] * 20
