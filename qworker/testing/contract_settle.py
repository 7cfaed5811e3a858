"""The contract of `settle`: the four actions, and which holders can settle."""

from __future__ import annotations

import asyncio

from qworker.message import Lease, SettleAction, Settlement, State, StoredMessage
from qworker.testing.base import Contract
from qworker.testing.contract_reap import deaths_stay_zero, leases_outlive_the_clock
from qworker.testing.harness import Case
from qworker.testing.rules import rule
from qworker.testing.wait_until import wait_until

__all__ = ["SettlingContract"]

# An error with its traceback.
REASON = "no such file: 'ä\\x00'\nTraceback:\n" + "  line\n" * 200


async def tries_stay_zero(case: Case) -> None:
    """Prove a deviation from `tries_counted`."""
    await case.publish(b"x")
    await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, error="once")
    assert (await wait_until(case.lease))[0].message.tries == 0


async def ready_without_a_delay(case: Case, action: SettleAction) -> None:
    """Prove a deviation from `retry_delay` or `release_delay`."""
    await case.publish(b"x")
    await case.settle(await case.lease_one(), action, delay=case.long)
    assert len(await case.lease(10)) == 1


async def failed_is_retried_at_once(case: Case) -> None:
    """Prove a deviation from `retry_delay`."""
    await ready_without_a_delay(case, SettleAction.FAIL_TMP)


async def released_is_ready_at_once(case: Case) -> None:
    """Prove a deviation from `release_delay`."""
    await ready_without_a_delay(case, SettleAction.RELEASE)


async def failures_are_gone(case: Case) -> None:
    """Prove a deviation from `fail_kept`."""
    (message_id,) = await case.fail(b"x")
    assert await case.lease(10) == []
    assert await case.find(message_id) is None


async def errors_are_not_kept(case: Case) -> None:
    """Prove a deviation from `errors_kept`."""
    (message_id,) = await case.fail(b"x", error="the reason")
    found = await case.find(message_id)
    assert found is not None
    assert found.error is None


async def retry_errors_are_not_kept(case: Case) -> None:
    """Prove a deviation from `retry_errors`."""
    found = await waiting_after_failure(case)
    assert len(found.error or "") < len(REASON)


async def waiting_after_failure(case: Case) -> StoredMessage:
    """Return a message that has failed with `REASON` and waits for its next attempt."""
    await case.publish(b"x")
    lease = await case.lease_one()
    assert await case.settle(lease, SettleAction.FAIL_TMP, delay=case.tick, error=REASON)
    found = await case.find(lease.message.id)
    assert found is not None
    return found


async def released_comes_back_somewhere(case: Case) -> None:
    """Prove a deviation from `release_in_place`."""
    await case.publish(b"1", b"2", b"3")
    await case.settle(await case.lease_one(), SettleAction.RELEASE)
    assert sorted(await case.leased_bodies()) == [b"1", b"2", b"3"]


async def stale_ends_are_accepted(case: Case) -> None:
    """Prove a deviation from `fencing`."""
    await case.publish(b"x")
    stale = await case.lease_one(visibility=case.tick)
    await case.expire(case.tick)
    await case.lease_one()
    assert await case.settle(stale, SettleAction.ACK)


class SettlingContract(Contract):
    """The tests of `settle`."""

    async def test_an_acked_message_never_comes_back(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        assert await case.settle(await case.lease_one(visibility=case.tick), SettleAction.ACK)
        assert await case.expire(case.tick) == 0
        assert await case.lease(10) == []
        assert await case.state(message_id) in {None, State.DONE}
        assert await case.counts() == (0, 0, 0, 0)

    @rule("tries_counted", otherwise=tries_stay_zero)
    async def test_a_temporary_failure_is_retried_with_one_more_try(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        for tries in range(4):
            (lease,) = await wait_until(case.lease)
            assert lease.message.id == message_id
            assert lease.message.tries == tries
            assert lease.message.body == b"x"
            assert await case.settle(lease, SettleAction.FAIL_TMP, error="again")

    @rule("deaths", otherwise=deaths_stay_zero)
    async def test_a_message_is_a_suspect_until_an_attempt_ends_by_itself(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        steps = [
            (SettleAction.FAIL_TMP, "died", (1, 1)),
            (SettleAction.FAIL_TMP, "died", (2, 2)),
            (SettleAction.RELEASE, "", (2, 2)),
            (SettleAction.FAIL_TMP, "", (3, 0)),
            (SettleAction.FAIL_TMP, "died", (4, 1)),
            (SettleAction.RELEASE, "survived", (4, 0)),
        ]
        (lease,) = await wait_until(case.lease)
        for action, end, expected in steps:
            assert await case.settle(lease, action, died=end == "died", survived=end == "survived")
            (lease,) = await wait_until(case.lease)
            assert lease.message.id == message_id
            assert (lease.message.tries, lease.message.deaths) == expected

    @rule("retry_delay", otherwise=failed_is_retried_at_once)
    async def test_a_temporary_failure_waits_for_its_delay(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, delay=case.tick)
        assert await case.state(message_id) is State.DELAYED
        assert await case.lease() == []
        await case.harness.advance(case.tick * 1.5)
        assert (await case.lease_one()).message.id == message_id

    @rule("fail_kept", otherwise=failures_are_gone)
    async def test_a_permanent_failure_is_kept_and_not_run_again(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        await case.settle(await case.lease_one(visibility=case.tick), SettleAction.FAIL_PERM, error="no such file")
        assert await case.expire(case.tick) == 0
        assert await case.lease(10) == []
        found = await case.find(message_id)
        assert found is not None
        assert found.state is State.FAILED
        assert found.message.body == b"x"

    @rule("errors_kept", otherwise=errors_are_not_kept)
    async def test_a_permanent_failure_keeps_its_reason(self, case: Case) -> None:
        (message_id,) = await case.fail(b"x", error=REASON)
        found = await case.find(message_id)
        assert found is not None
        assert found.error == REASON
        (listed,) = await case.messages(State.FAILED)
        assert listed.error == REASON

    @rule("retry_errors", otherwise=retry_errors_are_not_kept)
    async def test_a_failed_attempt_keeps_its_reason_while_the_message_waits(self, case: Case) -> None:
        found = await waiting_after_failure(case)
        assert (found.message.tries, found.error) == (
            1 if "tries_counted" not in case.harness.deviations else 0,
            REASON,
        )

    async def test_a_permanent_failure_without_a_reason_is_one(self, case: Case) -> None:
        await case.publish(b"x")
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_PERM)
        assert await case.lease(10) == []

    async def test_a_release_leaves_tries_unchanged(self, case: Case) -> None:
        await case.publish(b"x")
        for _ in range(3):
            (lease,) = await wait_until(case.lease)
            assert lease.message.tries == 0
            assert await case.settle(lease, SettleAction.RELEASE)

    @rule("release_in_place", otherwise=released_comes_back_somewhere)
    async def test_a_released_message_is_where_it_was(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3")
        leases = await case.lease(2)
        assert await case.backend.settle(case.settlements(leases, SettleAction.RELEASE)) == []
        assert await case.leased_bodies() == [b"1", b"2", b"3"]

    @rule("release_delay", otherwise=released_is_ready_at_once)
    async def test_a_release_waits_for_its_delay(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        await case.settle(await case.lease_one(), SettleAction.RELEASE, delay=case.tick)
        assert await case.state(message_id) is State.DELAYED
        assert await case.lease() == []
        await case.harness.advance(case.tick * 1.5)
        assert (await case.lease_one()).message.tries == 0

    async def test_a_released_message_is_leased_by_another_worker(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        await case.settle(await case.lease_one(), SettleAction.RELEASE)
        (lease,) = await wait_until(lambda: case.lease(by=other))
        assert lease.message.body == b"x"
        assert await case.settle(lease, SettleAction.ACK, by=other)

    async def test_a_batch_settles_each_message_its_own_way(self, case: Case) -> None:
        ids = await case.publish(b"0", b"1", b"2", b"3")
        leases = await case.lease(4)
        ends = (SettleAction.ACK, SettleAction.FAIL_TMP, SettleAction.FAIL_PERM, SettleAction.RELEASE)
        batch = [Settlement(lease=lease, action=action, error="e") for lease, action in zip(leases, ends, strict=True)]
        assert await case.backend.settle(batch) == []
        assert await case.state(ids[0]) in {None, State.DONE}
        assert (await case.stats()).leased == 0
        again: list[Lease] = []

        async def both_are_back() -> bool:
            again.extend(await case.lease(10))
            return len(again) == 2

        await wait_until(both_are_back)
        assert {lease.message.id for lease in again} == {ids[1], ids[3]}

    async def test_settling_nothing_is_nothing(self, case: Case) -> None:
        assert await case.backend.settle([]) == []

    async def test_a_lease_that_was_settled_settles_nothing_more(self, case: Case) -> None:
        await case.publish(b"x")
        lease = await case.lease_one()
        assert await case.settle(lease, SettleAction.RELEASE)
        (held,) = await wait_until(case.lease)
        for action in SettleAction:
            # A store that remembers the release can accept it a second time.
            assert not await case.settle(lease, action, error="stale") or action is SettleAction.RELEASE
            assert (await case.counts())[:2] == (0, 1)
        assert await case.settle(held, SettleAction.ACK)

    @rule("fencing", otherwise=stale_ends_are_accepted)
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_a_stale_holder_can_settle_nothing(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        stale = await case.lease_one(visibility=case.tick)
        assert await case.expire(case.tick, by=other) == 1
        for action in SettleAction:
            assert not await case.settle(stale, action, error="stale"), (
                "the message was ready, and a stale holder moved it"
            )
        held = await case.lease_one(by=other)
        for action in SettleAction:
            assert not await case.settle(stale, action, error="stale")
        found = await case.find(held.message.id)
        assert found is not None
        assert (found.state, found.message.tries) == (State.LEASED, 1)
        assert await case.settle(held, SettleAction.ACK, by=other)
        for action in SettleAction:
            assert not await case.settle(stale, action, error="stale") or action is SettleAction.ACK
        assert await case.lease(10) == []

    @rule("fencing", otherwise=stale_ends_are_accepted)
    @rule("expiry", otherwise=leases_outlive_the_clock)
    async def test_a_batch_refuses_the_stale_and_does_the_rest(self, case: Case) -> None:
        await case.publish(b"0", b"1", b"2")
        stale = await case.lease_one(visibility=case.tick)
        rest = await case.lease(2)
        assert await case.expire(case.tick) == 1
        batch = case.settlements([rest[0], stale, rest[1]], SettleAction.ACK)
        assert await case.backend.settle(batch) == [batch[1]]
        assert (await case.counts())[:2] == (1, 0)

    async def test_concurrent_ends_of_one_lease_happen_once(self, case: Case) -> None:
        await case.publish(*[b"x"] * 10)
        leases = await case.lease(10)
        calls = [
            case.backend.settle(case.settlements(leases, action, error="e"))
            for action in SettleAction
            for _ in range(2)
        ]
        accepted = [10 - len(result) for result in await asyncio.gather(*calls)]
        # A store can accept a repeated settlement: two of eight calls have the same action.
        assert sum(accepted) in range(10, 21)
        stats = await case.stats()
        assert stats.leased == 0
        # A batch is not atomic: some messages can have one outcome, and some another. The first two calls ack.
        acked = 10 - (stats.ready + stats.delayed + stats.failed)
        assert max(accepted[:2]) <= acked <= sum(accepted[:2])

    async def test_a_cancelled_settle_has_happened_or_can_be_repeated(self, case: Case) -> None:
        for turns in range(20):
            (message_id,) = await case.publish(b"x")
            lease = await case.lease_one()
            call = asyncio.create_task(case.settle(lease, SettleAction.ACK))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            await case.settle(lease, SettleAction.ACK)
            assert await case.state(message_id) in {None, State.DONE}
        assert await case.counts() == (0, 0, 0, 0)
