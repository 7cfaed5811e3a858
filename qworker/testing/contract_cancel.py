"""The contract of `cancel`, and of the lost leases that `reap` names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from qworker.backend import Backend
from qworker.cell import Cell, CellOp
from qworker.errors import QueueNotFound, UsageError
from qworker.failure_text import CANCELLED, code_of, summary
from qworker.message import Cancelled, FinishedMessage, LostLease, Selection, SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["CancellingContract"]


async def no_loss_is_named(case: Case) -> None:
    """Prove a deviation from `lost_leases`."""
    await case.publish(b"x")
    await case.lease_one()
    await case.backend.delete(case.queue)
    assert list((await case.backend.reap(case.queue)).lost) == []


async def cancel(case: Case, *ids: str, by: Backend | None = None) -> list[Cancelled]:
    """Cancel messages by their ids."""
    return await (by or case.backend).cancel(case.queue, Selection(ids=ids), "deploy")


async def lost(case: Case, by: Backend | None = None) -> Sequence[LostLease]:
    """Return the lost leases that a reap names."""
    return (await (by or case.backend).reap(case.queue)).lost


class CancellingContract(Contract):
    """The tests of `cancel` and of `ReapResult.lost`."""

    @rule("cancel")
    async def test_a_ready_message_that_is_cancelled_fails_with_a_code_and_never_runs(self, case: Case) -> None:
        message_id, other = await case.publish(b"1", b"2")
        (one,) = await cancel(case, message_id)
        assert (one.id, one.state, one.already) == (message_id, State.READY, False)
        (stored,) = await case.messages(State.FAILED)
        assert (stored.message.id, stored.message.tries) == (message_id, 0)
        assert code_of(stored.error) == CANCELLED
        assert summary(stored.error or "") == "cancelled by deploy"
        assert stored.finished_at is not None
        assert [lease.message.id for lease in await case.lease(10)] == [other]
        assert await case.counts() == (0, 1, 0, 1)

    @rule("cancel")
    async def test_a_delayed_message_that_is_cancelled_never_runs(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x", delay=case.tick)
        (one,) = await cancel(case, message_id)
        assert one.state is State.DELAYED
        await case.harness.advance(case.tick * 1.5)
        await case.backend.reap(case.queue)
        assert await case.lease(10) == []
        assert await case.state(message_id) is State.FAILED

    @rule("cancel")
    @pytest.mark.parametrize("action", list(SettleAction))
    async def test_the_holder_of_a_cancelled_message_can_do_nothing_with_it(
        self, case: Case, action: SettleAction
    ) -> None:
        (message_id,) = await case.publish(b"x")
        lease = await case.lease_one()
        (one,) = await cancel(case, message_id, by=await case.open())
        assert (one.state, one.token >= lease.token) == (State.LEASED, True)
        assert case.backend.extend([lease], case.long) == [lease]
        assert not await case.settle(lease, action, error="mine")
        (stored,) = await case.messages(State.FAILED)
        assert summary(stored.error or "") == "cancelled by deploy"
        assert await case.counts() == (0, 0, 0, 1)

    @rule("lost_leases", otherwise=no_loss_is_named)
    @rule("cancel")
    async def test_the_holder_and_no_other_worker_learns_once_that_its_message_was_cancelled(self, case: Case) -> None:
        mine, _ = await case.publish(b"mine", b"theirs")
        other = await case.open()
        lease = await case.lease_one()
        theirs = await case.lease_one(by=other)
        await cancel(case, mine, by=other)
        assert await lost(case, other) in ([], ())
        assert list(await lost(case)) == [LostLease(mine, lease.token, True)]
        assert list(await lost(case)) == []
        assert await case.settle(theirs, SettleAction.ACK, by=other)

    @rule("lost_leases", otherwise=no_loss_is_named)
    @rule("cancel")
    async def test_a_worker_learns_of_its_own_cancel(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        lease = await case.lease_one()
        await cancel(case, message_id)
        assert list(await lost(case)) == [LostLease(message_id, lease.token, True)]

    @rule("lost_leases", otherwise=no_loss_is_named)
    @rule("cancel")
    async def test_a_loss_that_an_extension_has_shown_is_still_named(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        lease = await case.lease_one()
        await cancel(case, message_id, by=await case.open())
        assert case.backend.extend([lease], case.long) == [lease]
        assert list(await lost(case)) == [LostLease(message_id, lease.token, True)]

    @rule("cancel")
    async def test_a_finished_message_is_reported_and_not_changed(self, case: Case) -> None:
        (failed,) = await case.fail(b"x", error="broken")
        (one,) = await cancel(case, failed)
        assert (one.state, one.already) == (State.FAILED, False)
        assert [stored.error for stored in await case.messages(State.FAILED)] == ["broken"]
        if "keep_done" not in case.backend.deviations:
            keeping = await case.open(keep_done="all")
            (done,) = await case.publish(b"y")
            assert await case.settle(await case.lease_one(by=keeping), SettleAction.ACK, by=keeping)
            (one,) = await cancel(case, done, by=keeping)
            assert (one.state, one.already) == (State.DONE, False)
            assert await case.state(done) is State.DONE

    @rule("cancel")
    async def test_a_repeated_cancel_reports_that_the_message_was_cancelled_before(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        await cancel(case, message_id)
        (one,) = await cancel(case, message_id, by=await case.open())
        assert (one.state, one.already) == (State.FAILED, True)
        assert await case.counts() == (0, 0, 0, 1)

    @rule("cancel")
    async def test_what_is_not_stored_is_not_listed(self, case: Case) -> None:
        first, second = await case.publish(b"1", b"2")
        found = await cancel(case, "unknown", second, "../x", first, second, "")
        assert [one.id for one in found] == [second, first]
        assert await cancel(case) == []

    @rule("cancel")
    async def test_a_cancel_in_an_absent_queue_is_refused(self, case: Case) -> None:
        for selection in (Selection(ids=["x"]), Selection(ids=[]), Selection(state=State.READY)):
            with pytest.raises(QueueNotFound):
                await case.backend.cancel(case.queue, selection)
        assert case.queue not in await case.backend.queues()

    @rule("cancel")
    async def test_only_messages_that_have_not_finished_are_cancelled_by_their_state(self, case: Case) -> None:
        delayed = await case.publish(b"d", delay=case.long)
        ready = await case.publish(*[b"%d" % number for number in range(300)])
        leases = await case.lease(3)
        held = {lease.message.id for lease in leases}
        wanted = {State.LEASED: held, State.READY: set(ready) - held, State.DELAYED: set(delayed)}
        for state, ids in wanted.items():
            found = await case.backend.cancel(case.queue, Selection(state=state))
            assert {one.id for one in found} == ids
            assert {one.state for one in found} == {state}
        assert await case.counts() == (0, 0, 0, 301)
        for selection in (
            Selection(state=State.FAILED),
            Selection(state=State.DONE),
            Selection(unchanged=[FinishedMessage(id="x", state=State.FAILED, finished_at=1.0, location="x")]),
        ):
            with pytest.raises(UsageError, match="only ready, delayed and leased"):
                await case.backend.cancel(case.queue, selection)

    @rule("cells")
    @rule("cancel")
    async def test_a_message_is_cancelled_only_while_its_cell_is_unchanged(self, case: Case) -> None:
        ids = await case.publish(*[b"%d" % number for number in range(5)])
        same, changed, absent, plain, leased = ids
        puts = [CellOp("put", Cell("cancels", one)) for one in ids]
        old = {one: reply.cell for one, reply in zip(ids, await case.backend.cells(case.queue, puts), strict=True)}
        (again, *_) = await case.backend.cells(
            case.queue, [CellOp("put", Cell("cancels", changed)), CellOp("delete", Cell("cancels", absent))]
        )
        assert again.cell is not None
        only = {one: cell for one, cell in old.items() if cell is not None and one != plain}
        other = await case.open()
        found = await other.cancel(case.queue, Selection(ids=[same, changed, absent, plain]), "deploy", only)
        assert [one.id for one in found] == [same, plain]
        assert {lease.message.id for lease in await case.lease(10)} == {changed, absent, leased}
        # It is the same for a leased message. A finished one is reported as ever.
        selection = Selection(ids=[leased, changed, absent, same])
        found = await case.backend.cancel(case.queue, selection, "deploy", only | {changed: again.cell})
        assert [(one.id, one.state) for one in found] == [
            (leased, State.LEASED),
            (changed, State.LEASED),
            (same, State.FAILED),
        ]
        assert await case.counts() == (0, 1, 0, 4)

    @rule("cancel")
    async def test_a_cancelled_message_can_be_requeued_and_its_old_holder_cannot_touch_it(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        old = await case.lease_one()
        (one,) = await cancel(case, message_id, by=await case.open())
        assert await case.backend.requeue(case.queue, Selection(ids=[message_id])) == 1
        lease = await case.lease_one()
        assert (lease.message.id, lease.message.tries, lease.message.body) == (message_id, 0, b"x")
        assert lease.token > one.token
        told = [each.token for each in await lost(case)]
        assert told == ([] if "lost_leases" in case.backend.deviations else [old.token])
        assert not await case.settle(old, SettleAction.ACK)
        assert await case.settle(lease, SettleAction.FAIL_PERM, error="broken")
        assert [stored.error for stored in await case.messages(State.FAILED)] == ["broken"]

    @rule("cancel")
    async def test_a_cancelled_message_keeps_its_tries_and_its_id(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, error="once")
        await cancel(case, message_id)
        (stored,) = await case.messages(State.FAILED)
        assert (stored.message.id, stored.message.tries, stored.message.body) == (message_id, 1, b"x")
        (found,) = await case.backend.find(case.queue, [message_id])
        assert found.error == stored.error
        assert await case.backend.remove(case.queue, Selection(ids=[message_id])) == 1
        assert await case.counts() == (0, 0, 0, 0)

    @rule("cancel")
    async def test_the_id_of_a_cancelled_message_stays_taken(self, case: Case) -> None:
        await case.backend.create(case.queue)
        assert await cancel(case, "order-17") == []
        if "given_ids" in case.backend.deviations:
            return
        await case.publish(b"1", id="order-17")
        await case.lease_one()
        assert [one.id for one in await cancel(case, "order-17")] == ["order-17"]
        assert await case.publish(b"2", id="order-17") == ["order-17"]
        assert await case.counts() == (0, 0, 0, 1)
        assert await case.backend.remove(case.queue, Selection(ids=["order-17"])) == 1
        await case.publish(b"3", id="order-17")
        assert await case.leased_bodies() == [b"3"]

    @rule("cancel")
    async def test_a_cancel_frees_the_unique_key(self, case: Case) -> None:
        await case.backend.create(case.queue)
        assert await cancel(case, "x") == []
        if "unique_key" in case.backend.deviations:
            return
        (message_id,) = await case.publish(b"1", unique_key="k")
        await cancel(case, message_id)
        await case.publish(b"2", unique_key="k")
        assert await case.leased_bodies() == [b"2"]

    @rule("cancel")
    async def test_who_cancels_may_have_any_name(self, case: Case) -> None:
        ids = await case.publish(b"1", b"2", b"3")
        for message_id, by in zip(ids, ("", "a\nb\t\ud800\0", "x" * 10_000), strict=True):
            await case.backend.cancel(case.queue, Selection(ids=[message_id]), by)
        errors = [stored.error or "" for stored in await case.backend.find(case.queue, ids)]
        assert {code_of(error) for error in errors} == {CANCELLED}
        assert summary(errors[0]) == "cancelled"
        assert summary(errors[1]).startswith("cancelled by a b")
        assert len(errors[2]) < 1000

    @rule("cancel")
    async def test_a_message_is_either_acked_or_cancelled(self, case: Case) -> None:
        other = await case.open()
        for number in range(50):
            (message_id,) = await case.publish(b"x")
            lease = await case.lease_one()
            calls = [case.settle(lease, SettleAction.ACK), cancel(case, message_id, by=other)]
            if number % 2:
                calls.reverse()
            results = await asyncio.gather(*calls)
            acked, found = (results[1], results[0]) if number % 2 else (results[0], results[1])
            assert isinstance(found, list)
            cancelled = [one.state for one in found] == [State.LEASED]
            assert acked is not cancelled

    # -- lost leases -------------------------------------------------------------------------------------------------

    @rule("lost_leases", otherwise=no_loss_is_named)
    @rule("remove_leased", otherwise=no_loss_is_named)
    async def test_the_holder_of_a_removed_message_learns_it_once(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        lease = await case.lease_one()
        assert await (await case.open()).remove(case.queue, Selection(ids=[message_id])) == 1
        assert list(await lost(case)) == [LostLease(message_id, lease.token)]
        assert list(await lost(case)) == []

    @rule("lost_leases", otherwise=no_loss_is_named)
    @rule("expiry", otherwise=no_loss_is_named)
    async def test_a_holder_learns_that_its_lease_has_expired_and_not_that_of_the_next_one(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        other = await case.open()
        old = await case.lease_one(visibility=case.tick)
        assert await case.expire(case.tick, by=other) == 1
        lease = await case.lease_one()
        assert list(await lost(case)) == [LostLease(message_id, old.token)]
        assert list(await lost(case)) == []
        assert await case.settle(lease, SettleAction.ACK)

    @rule("lost_leases", otherwise=no_loss_is_named)
    async def test_leases_that_live_or_were_settled_are_not_lost(self, case: Case) -> None:
        await case.publish(*[b"x"] * 8)
        leases = await case.lease(8)
        assert list(await lost(case)) == []
        assert case.backend.extend(leases[:4], case.long) == []
        for lease, action in zip(leases[2:6], SettleAction, strict=True):
            assert await case.settle(lease, action, delay=case.long if action is SettleAction.RELEASE else 0.0)
        assert list(await lost(case)) == []
        assert case.backend.extend(leases[:2], case.long) == []
        assert list(await lost(case)) == []

    async def test_a_reap_tells_the_time_of_the_store(self, case: Case) -> None:
        await case.publish(b"x")
        before = await case.backend.reap(case.queue)
        await case.harness.advance(case.tick)
        after = await case.backend.reap(case.queue)
        assert before.now > 1e9
        assert case.tick * 0.9 <= after.now - before.now < case.tick * 20
        assert (await case.backend.reap("absent")).now >= after.now
