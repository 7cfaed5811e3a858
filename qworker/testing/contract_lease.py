"""The contract of `lease` and `extend`: exclusivity, limits, fencing tokens and cancellation."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable

import anyio
import pytest

from qworker.errors import InvalidName, UsageError
from qworker.message import Lease, SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.contract_publish import HOSTILE_NAMES
from qworker.testing.contract_reap import leases_outlive_the_clock
from qworker.testing.harness import Case
from qworker.testing.rules import rule
from qworker.testing.wait_until import wait_until

__all__ = ["LeasingContract"]


class LeasingContract(Contract):
    """The tests of `lease` and `extend`."""

    async def test_an_absent_queue_gives_nothing(self, case: Case) -> None:
        assert await case.lease(10) == []
        assert await case.backend.lease(case.queue, 10, case.long, 0.01) == []
        assert case.queue not in await case.backend.queues()

    async def test_an_empty_queue_gives_nothing(self, case: Case) -> None:
        await case.backend.create(case.queue)
        assert await case.lease(10) == []

    async def test_hostile_queue_names_give_nothing(self, case: Case) -> None:
        for name in HOSTILE_NAMES:
            try:
                assert await case.backend.lease(name, 10, case.long) == []
            except InvalidName:
                pass

    async def test_no_more_than_the_limit_is_leased(self, case: Case) -> None:
        await case.publish(*[b"x"] * 5)
        assert len(await case.lease(2)) == 2
        assert len(await case.lease(10)) == 3

    async def test_a_lease_of_no_messages_is_refused(self, case: Case) -> None:
        await case.publish(b"x")
        for limit in (0, -1):
            for timeout in (0.0, 0.01):
                with pytest.raises(UsageError, match="at least 1"):
                    await case.backend.lease(case.queue, limit, case.long, timeout)
        assert (await case.counts())[:2] == (1, 0)

    async def test_a_leased_message_is_leased_by_nobody_else(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        await case.lease_one()
        assert await case.lease(10) == []
        assert await case.lease(10, by=other) == []

    async def test_another_worker_leases_what_is_left(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3", b"4")
        other = await case.open()
        first = await case.lease(2)
        second = await wait_until(lambda: case.lease(2, by=other))
        assert {lease.message.body for lease in first + second} == {b"1", b"2", b"3", b"4"}

    async def test_of_many_concurrent_leases_one_wins_each_message(self, case: Case) -> None:
        ids = await case.publish(*[b"x"] * 120)
        workers = [case.backend, *[await case.open() for _ in range(3)]]
        won: list[str] = []

        async def take_all() -> bool:
            calls = [case.lease(limit, by=worker) for worker in workers for limit in (1, 3, 7)]
            won.extend(lease.message.id for leases in await asyncio.gather(*calls) for lease in leases)
            return len(won) >= len(ids)

        await wait_until(take_all)
        assert sorted(won) == sorted(ids)

    async def test_a_lease_tells_its_expiry(self, case: Case) -> None:
        await case.publish(b"1", b"2")
        short = await case.lease_one(visibility=case.tick)
        long = await case.lease_one(visibility=case.tick * 3)
        assert abs(long.expires_at - short.expires_at - case.tick * 2) < case.tick

    async def test_tokens_rise_with_each_delivery(self, case: Case) -> None:
        await case.publish(b"x")
        tokens: list[int] = []
        for action in (SettleAction.RELEASE, SettleAction.FAIL_TMP, SettleAction.RELEASE):
            lease = await case.lease_one()
            tokens.append(lease.token)
            assert await case.settle(lease, action)
        tokens.append((await case.lease_one()).token)
        assert tokens == sorted(set(tokens))

    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_the_token_rises_when_a_lease_expires(self, case: Case) -> None:
        await case.publish(b"x")
        old = await case.lease_one(visibility=case.tick)
        await case.expire(case.tick)
        assert (await case.lease_one()).token > old.token

    async def test_a_lease_with_a_timeout_leases_what_is_ready(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3")
        leases = await case.backend.lease(case.queue, 2, case.long, 30.0)
        assert [lease.message.body for lease in leases] == [b"1", b"2"]
        assert (await case.counts())[:2] == (1, 2)

    @rule("extend")
    async def test_an_extended_lease_outlives_its_first_expiry(self, case: Case) -> None:
        await case.publish(b"x")
        lease = await case.lease_one(visibility=case.tick)
        before = lease.expires_at
        assert case.backend.extend([lease], case.long) == []
        assert lease.expires_at > before + case.tick
        assert await case.expire(case.tick) == 0
        assert await case.lease() == []
        assert await case.settle(lease, SettleAction.ACK)

    @rule("extend")
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_an_extension_that_ends_is_an_expiry(self, case: Case) -> None:
        await case.publish(b"x")
        lease = await case.lease_one(visibility=case.tick)
        assert case.backend.extend([lease], case.tick * 2) == []
        assert case.backend.extend([lease], case.tick * 2) == []
        assert await case.expire(case.tick * 2) == 1
        assert (await case.lease_one()).message.tries == 1

    @rule("extend")
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_extending_says_which_leases_are_lost(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3")
        lost = await case.lease_one(visibility=case.tick)
        kept = await case.lease(2)
        await case.expire(case.tick)
        assert case.backend.extend([kept[0], lost, kept[1]], case.long) == [lost]
        assert (await case.counts())[:2] == (1, 2)

    @rule("extend")
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_a_stale_holder_extends_nothing_after_the_next_delivery(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        stale = await case.lease_one(visibility=case.tick)
        await case.expire(case.tick, by=other)
        held = await case.lease_one(visibility=case.tick, by=other)
        assert case.backend.extend([stale], case.long) == [stale]
        assert other.extend([held], case.tick) == []
        assert await case.expire(case.tick, by=other) == 1

    @rule("extend")
    async def test_an_ended_lease_is_not_extended(self, case: Case) -> None:
        await case.publish(*[b"x"] * 4)
        leases = await case.lease(4)
        for lease, action in zip(leases, SettleAction, strict=True):
            assert await case.settle(lease, action)
        assert case.backend.extend(leases, case.long) == leases

    @rule("extend")
    async def test_a_thread_extends_while_the_loop_is_blocked(self, case: Case) -> None:
        await case.publish(*[b"x"] * 8)
        leases = await case.lease(8, visibility=case.tick)
        lost: list[Lease] = []
        thread = threading.Thread(target=lambda: lost.extend(case.backend.extend(leases, case.long)))
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "extend needs the event loop that it must work without"
        assert lost == []
        assert await case.expire(case.tick) == 0

    @rule("extend")
    async def test_threads_extend_while_the_loop_leases_and_settles(self, case: Case) -> None:
        await case.publish(*[b"x"] * 60)
        held = await case.lease(10)
        stop = threading.Event()
        lost: list[Lease] = []

        def keep() -> None:
            while not stop.is_set():
                lost.extend(case.backend.extend(held, case.long))

        thread = threading.Thread(target=keep)
        thread.start()
        try:
            for _ in range(10):
                leases = await case.lease(5)
                assert await case.backend.settle(case.settlements(leases, SettleAction.ACK)) == []
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
        assert lost == []
        assert await case.backend.settle(case.settlements(held, SettleAction.ACK)) == []
        assert await case.counts() == (0, 0, 0, 0)

    async def test_a_lease_for_a_remote_holder_ends_at_its_expiry(self, case: Case) -> None:
        server = await case.open(remote_leases=True)
        await case.publish(b"x")
        lease = await case.lease_one(visibility=case.tick, by=server)
        assert await case.expire(case.tick, by=server) == 1
        assert not await case.settle(lease, SettleAction.ACK, by=server)
        assert (await case.lease_one(by=server)).message.tries == 1

    async def test_a_remote_lease_outlives_the_process_that_took_it(self, case: Case) -> None:
        first, second = [await case.open(remote_leases=True) for _ in range(2)]
        assert case.backend.remote_leases is None
        if second.remote_leases is None:
            return
        await case.publish(b"x")
        held = await case.lease_one(by=first)
        await first.aclose()
        assert (await case.backend.reap(case.queue)).returned == 0
        assert await second.remote_leases.find(case.queue, "unknown", held.token) is None
        stale = await second.remote_leases.find(case.queue, held.message.id, held.token + 1)
        assert stale is None or not await case.settle(stale, SettleAction.ACK, by=second)
        found = await second.remote_leases.find(case.queue, held.message.id, held.token)
        assert found is not None
        assert (found.message, found.token) == (held.message, held.token)
        assert abs(found.expires_at - held.expires_at) < 0.01
        assert await asyncio.to_thread(second.extend, [found], case.long) == []
        assert await case.settle(found, SettleAction.ACK, by=second)
        assert await second.remote_leases.find(case.queue, held.message.id, held.token) is None

    async def test_a_cancelled_lease_holds_no_message(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3")
        for turns in range(20):
            call = asyncio.create_task(case.lease(3))
            await self.cancel_after(turns, call, case)
        assert (await case.counts())[:2] == (3, 0)

    async def test_a_lease_that_is_cancelled_while_it_waits_holds_no_message(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3")
        for turns in range(20):
            call = asyncio.create_task(case.backend.lease(case.queue, 3, case.long, 5.0))
            await self.cancel_after(turns, call, case)
        assert (await case.counts())[:2] == (3, 0)

    async def test_a_lease_that_is_cancelled_as_a_message_arrives_holds_none(self, case: Case) -> None:
        await case.backend.create(case.queue)
        for turns in range(20):
            await self.cancel_as_a_message_arrives(turns, case, None)

    async def test_a_lease_in_a_scope_that_is_cancelled_holds_no_message(self, case: Case) -> None:
        # anyio cancels again in each turn of the loop, also while the call cleans up.
        await case.publish(b"1", b"2", b"3")
        for turns in range(20):
            scope = anyio.CancelScope()
            call = asyncio.create_task(self.lease_in(scope, case.lease(3)))
            await self.cancel_after(turns, call, case, scope)
        assert (await case.counts())[:2] == (3, 0)

    async def test_a_lease_in_a_scope_that_is_cancelled_as_a_message_arrives_holds_none(self, case: Case) -> None:
        await case.backend.create(case.queue)
        for turns in range(20):
            await self.cancel_as_a_message_arrives(turns, case, anyio.CancelScope())

    async def cancel_as_a_message_arrives(self, turns: int, case: Case, scope: anyio.CancelScope | None) -> None:
        """Cancel a call that waits, some turns of the loop after a message arrived. Check that the message is ready."""
        lease = case.backend.lease(case.queue, 3, case.long, 20.0)
        call = asyncio.create_task(lease if scope is None else self.lease_in(scope, lease))
        await case.until_waiting(call)
        (message_id,) = await case.publish(b"x")
        await self.cancel_after(turns, call, case, scope)
        await wait_until(functools.partial(self.is_ready, case, message_id))
        (found,) = await wait_until(case.lease)
        assert found.message.tries == 0
        assert await case.settle(found, SettleAction.ACK)

    @staticmethod
    async def lease_in(scope: anyio.CancelScope, lease: Awaitable[list[Lease]]) -> list[Lease]:
        """Return the leases of a call, or none if the scope was cancelled."""
        with scope:
            return await lease
        return []

    @staticmethod
    async def cancel_after(
        turns: int, call: asyncio.Task[list[Lease]], case: Case, scope: anyio.CancelScope | None = None
    ) -> None:
        """Cancel a call or its scope after some turns of the loop. Release the leases that it got before."""
        for _ in range(turns):
            await asyncio.sleep(0)
        (scope or call).cancel()
        await asyncio.wait([call])
        if not call.cancelled():
            assert await case.backend.settle(case.settlements(call.result(), SettleAction.RELEASE)) == []

        async def nothing_is_held() -> bool:
            return (await case.stats()).leased == 0

        await wait_until(nothing_is_held, what="a cancelled call gave its messages back")

    @staticmethod
    async def is_ready(case: Case, message_id: str) -> bool:
        """Return whether a message can be leased."""
        return await case.state(message_id) is State.READY
