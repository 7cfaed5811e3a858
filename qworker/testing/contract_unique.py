"""The contract of unique keys: what another message with a key does, and when the key is free again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qworker.errors import AlreadyEnqueued, InvalidName, UsageError
from qworker.message import Draft, KeyHolder, Selection, SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule
from qworker.unique import Unique

__all__ = ["UniqueContract"]

_STARTED = Unique(until="started")
_REPLACE = Unique(again="replace")
_ERROR = Unique(again="error")
_APP = Unique(scope="app")


async def publish(case: Case, body: bytes, unique: Unique | None = None, **options: Any) -> str:
    """Publish one message with the key `k` and return the id."""
    (message_id,) = await case.publish(body, **{"unique_key": "k", **options}, unique=unique)
    return message_id


def debounce(case: Case, wait: float = 2.0, at_most: float | None = None) -> Unique:
    """Return a debounce with times in ticks."""
    return Unique(again="debounce", wait=wait * case.tick, at_most=None if at_most is None else at_most * case.tick)


class UniqueContract(Contract):
    """The tests of unique keys."""

    # -- the table: what another message does, if the first one waits, and if it is leased -------------------------

    @rule("unique_key")
    async def test_keep_stores_nothing_while_one_waits_or_is_leased(self, case: Case) -> None:
        first = await publish(case, b"first")
        assert await publish(case, b"second") == first
        lease = await case.lease_one()
        assert await publish(case, b"third") == first
        await case.settle(lease, SettleAction.FAIL_TMP, delay=case.tick)
        assert await publish(case, b"fourth") == first
        await case.harness.advance(case.tick * 1.5)
        assert await case.leased_bodies() == [b"first"]

    @rule("unique_key")
    async def test_error_is_refused_while_one_waits_or_is_leased(self, case: Case) -> None:
        first = await publish(case, b"first", _ERROR)
        with pytest.raises(AlreadyEnqueued, match=first) as refused:
            await publish(case, b"second", _ERROR)
        assert refused.value.id == first
        lease = await case.lease_one()
        with pytest.raises(AlreadyEnqueued):
            await publish(case, b"third", _ERROR)
        await case.settle(lease, SettleAction.ACK)
        assert await publish(case, b"fourth", _ERROR) != first
        assert await case.leased_bodies() == [b"fourth"]

    @rule("unique_key")
    async def test_error_stores_the_other_messages_of_its_batch(self, case: Case) -> None:
        await publish(case, b"first")
        drafts = [Draft(body=b"a"), Draft(body=b"b", unique_key="k", unique=_ERROR), Draft(body=b"c")]
        with pytest.raises(AlreadyEnqueued):
            await case.backend.publish(case.queue, drafts)
        assert sorted(await case.leased_bodies()) == [b"a", b"c", b"first"]

    @rule("unique_key")
    async def test_the_same_message_again_is_not_an_error(self, case: Case) -> None:
        assert await publish(case, b"x", _ERROR, id="one") == await publish(case, b"x", _ERROR, id="one") == "one"
        assert await case.leased_bodies() == [b"x"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_replace_changes_the_one_that_waits_and_keeps_its_id(self, case: Case) -> None:
        first = await publish(case, b"first", task="a")
        await publish(case, b"other", unique_key="o")
        assert await publish(case, b"second", _REPLACE, task="b") == first
        assert await case.counts() == (2, 0, 0, 0)
        leases = await case.lease(10)
        assert [(lease.message.id, lease.message.body) for lease in leases][:1] == [(first, b"second")]
        assert [lease.message.body for lease in leases] == [b"second", b"other"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_replace_sets_the_due_time_later_and_earlier(self, case: Case) -> None:
        first = await publish(case, b"1")
        assert await publish(case, b"2", _REPLACE, delay=case.tick) == first
        assert await case.counts() == (0, 0, 1, 0)
        assert await publish(case, b"3", _REPLACE, delay=case.tick * 50) == first
        await case.harness.advance(case.tick * 2)
        assert await case.lease() == []
        assert await publish(case, b"4", _REPLACE) == first
        assert await case.leased_bodies() == [b"4"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_a_replaced_message_counts_from_the_last_call_and_at_most_from_the_first(self, case: Case) -> None:
        first = await publish(case, b"1", debounce(case, 2, 4))
        (before,) = await case.backend.find(case.queue, [first])
        for body in (b"2", b"3"):
            await case.harness.advance(case.tick * 1.5)
            assert await publish(case, body, debounce(case, 2, 4)) == first
        (after,) = await case.backend.find(case.queue, [first])
        assert after.message.enqueued_at >= before.message.enqueued_at + case.tick * 2.9
        await case.harness.advance(case.tick * 1.2)
        assert await case.leased_bodies() == [b"3"]

    @rule("unique_key")
    @rule("unique_replace")
    @rule("hold")
    async def test_a_replaced_message_has_the_longer_hold(self, case: Case) -> None:
        assert await publish(case, b"1", id="one") == "one"
        assert await publish(case, b"2", _REPLACE, id="two", hold=case.long) == "one"
        assert await publish(case, b"3", _REPLACE, id="two") == "one"
        await case.settle(await case.lease_one(), SettleAction.ACK)
        assert await publish(case, b"4", id="one") == "one"
        assert await case.counts() == (0, 0, 0, 0)

    @rule("unique_key")
    @rule("unique_replace")
    async def test_replace_changes_a_retry_which_has_all_its_tries_again(self, case: Case) -> None:
        first = await publish(case, b"first")
        await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, delay=case.long, error="broken")
        assert await publish(case, b"second", _REPLACE) == first
        lease = await case.lease_one()
        assert (lease.message.id, lease.message.body, lease.message.tries) == (first, b"second", 0)
        await case.settle(lease, SettleAction.ACK)
        assert await publish(case, b"third") != first

    @rule("unique_key")
    @rule("unique_replace")
    async def test_replace_while_one_is_leased_waits_with_the_key(self, case: Case) -> None:
        first = await publish(case, b"first")
        lease = await case.lease_one()
        second = await publish(case, b"second", _REPLACE)
        assert second != first
        # One runs, and at most one waits.
        assert await publish(case, b"third", _REPLACE) == second
        assert await case.counts() == (1, 1, 0, 0)
        assert await case.settle(lease, SettleAction.ACK)
        assert await publish(case, b"x") == second
        assert await case.leased_bodies() == [b"third"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_a_replaced_message_can_fail_be_requeued_and_removed(self, case: Case) -> None:
        first = await publish(case, b"first")
        await publish(case, b"second", _REPLACE)
        await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
        assert await case.state(first) is State.FAILED
        assert await case.backend.requeue(case.queue, Selection(ids=[first])) == 1
        assert await publish(case, b"third", _REPLACE) == first
        assert (await case.find(first) or pytest.fail("it is gone")).message.body == b"third"
        assert await case.backend.remove(case.queue, Selection(ids=[first])) == 1
        assert await publish(case, b"fourth") != first
        assert await case.leased_bodies() == [b"fourth"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_the_last_one_of_a_batch_replaces_the_others(self, case: Case) -> None:
        assert len(set(await case.publish(b"1", b"2", b"3", unique_key="k", unique=_REPLACE))) == 1
        assert await case.leased_bodies() == [b"3"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_debounce_is_due_after_the_last_one(self, case: Case) -> None:
        first = await publish(case, b"1", debounce(case))
        await case.harness.advance(case.tick)
        assert await publish(case, b"2", debounce(case)) == first
        await case.harness.advance(case.tick * 1.5)
        assert await case.lease() == []
        assert await case.counts() == (0, 0, 1, 0)
        await case.harness.advance(case.tick)
        assert await case.leased_bodies() == [b"2"]

    @rule("unique_key")
    @rule("unique_replace")
    async def test_debounce_waits_no_longer_than_at_most(self, case: Case) -> None:
        first = await publish(case, b"1", debounce(case, 20, 20.5))
        assert await publish(case, b"2", debounce(case, 20, 20.5)) == first
        stored = await case.find(first) or pytest.fail("it is gone")
        first_due = stored.due_at or 0
        await case.harness.advance(case.tick)
        assert await publish(case, b"3", debounce(case, 20, 20.5)) == first
        stored = await case.find(first) or pytest.fail("it is gone")
        assert 0 <= (stored.due_at or 0) - first_due < case.tick
        assert stored.message.body == b"3"

    @rule("unique_key")
    @rule("unique_replace")
    async def test_debounce_while_one_is_leased_waits_with_the_key(self, case: Case) -> None:
        first = await publish(case, b"first")
        lease = await case.lease_one()
        second = await publish(case, b"second", debounce(case))
        assert second != first
        assert await publish(case, b"third", debounce(case)) == second
        assert await case.counts() == (0, 1, 1, 0)
        await case.settle(lease, SettleAction.ACK)
        await case.harness.advance(case.tick * 2.5)
        assert await case.leased_bodies() == [b"third"]

    # -- when a key is free ----------------------------------------------------------------------------------------

    @rule("unique_key")
    async def test_until_started_the_key_is_free_at_the_lease_and_stays_free(self, case: Case) -> None:
        first = await publish(case, b"first", _STARTED)
        assert await publish(case, b"x", _STARTED) == first
        lease = await case.lease_one()
        assert lease.message.unique_key == "k"
        second = await publish(case, b"second", _STARTED)
        assert second != first
        # The first one waits again, and does not take the key again.
        await case.settle(lease, SettleAction.RELEASE)
        assert await publish(case, b"x", _STARTED) == second
        leases = await case.lease(10)
        assert {lease.message.body for lease in leases} == {b"first", b"second"}
        third = await publish(case, b"third", _STARTED)
        assert third not in {first, second}
        for lease in leases:
            await case.settle(lease, SettleAction.FAIL_TMP)
        assert await publish(case, b"x", _STARTED) == third

    @rule("unique_key")
    async def test_a_lost_lease_frees_no_key_until_done_and_takes_none_until_started(self, case: Case) -> None:
        first = await publish(case, b"first")
        other = await publish(case, b"other", _STARTED, unique_key="s")
        assert len(await case.lease(10, case.tick)) == 2
        if not await case.expire(case.tick):
            # The store has no expiry: the holder ends its leases.
            return
        assert await publish(case, b"x") == first
        assert await publish(case, b"new", _STARTED, unique_key="s") != other

    @rule("unique_key")
    @rule("cancel")
    async def test_a_cancelled_message_frees_its_key(self, case: Case) -> None:
        first = await publish(case, b"first")
        await case.backend.cancel(case.queue, Selection(ids=[first]))
        second = await publish(case, b"second")
        assert second != first
        await case.lease_one()
        await case.backend.cancel(case.queue, Selection(ids=[second]))
        assert await publish(case, b"third") not in {first, second}

    @rule("unique_key")
    async def test_a_removed_message_frees_its_key_also_if_it_is_leased(self, case: Case) -> None:
        first = await publish(case, b"first")
        await case.lease_one()
        await case.backend.remove(case.queue, Selection(ids=[first]))
        second = await publish(case, b"second")
        assert second != first
        await case.backend.remove(case.queue, Selection(state=State.READY))
        assert await publish(case, b"third") not in {first, second}

    @rule("unique_key")
    async def test_a_requeued_message_takes_its_key_again(self, case: Case) -> None:
        first = await publish(case, b"first")
        await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
        assert await case.backend.requeue(case.queue, Selection(ids=[first])) == 1
        assert await publish(case, b"second") == first
        assert await case.leased_bodies() == [b"first"]

    @rule("unique_key")
    async def test_a_requeue_is_refused_while_another_message_has_the_key(self, case: Case) -> None:
        first = await publish(case, b"first")
        await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
        (plain,) = await case.fail(b"plain")
        second = await publish(case, b"second")
        text = f"unique key 'k' is held by {second}: remove that message first"
        with pytest.raises(AlreadyEnqueued, match=text) as refused:
            await case.backend.requeue(case.queue, Selection(ids=[first, plain]))
        assert refused.value.id == second
        # The others are requeued, and the refused one stays failed.
        assert (await case.state(first), await case.state(plain)) == (State.FAILED, State.READY)
        assert sorted(await case.leased_bodies()) == [b"plain", b"second"]
        with pytest.raises(AlreadyEnqueued):
            await case.backend.requeue(case.queue, Selection(state=State.FAILED))
        await case.backend.remove(case.queue, Selection(ids=[second]))
        assert await case.backend.requeue(case.queue, Selection(state=State.FAILED)) == 1
        assert await publish(case, b"third") == first

    @rule("unique_key")
    async def test_of_two_failed_messages_with_one_key_one_is_requeued(self, case: Case) -> None:
        for body in (b"1", b"2"):
            await publish(case, body)
            await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
        with pytest.raises(AlreadyEnqueued):
            await case.backend.requeue(case.queue, Selection(state=State.FAILED))
        ready, _, _, failed = await case.counts()
        assert (ready, failed) == (1, 1)

    # -- all together ----------------------------------------------------------------------------------------------

    @rule("unique_key")
    async def test_of_many_publishers_at_once_one_stores(self, case: Case) -> None:
        others = [await case.open() for _ in range(3)]
        calls = [
            by.publish(case.queue, [Draft(body=b"x", unique_key="k"), Draft(body=b"y", unique_key=f"{number % 2}")])
            for by in (case.backend, *others)
            for number in range(6)
        ]
        answers = await asyncio.gather(*calls)
        assert len({answer[0] for answer in answers}) == 1
        assert len({answer[1] for answer in answers}) == 2
        assert sorted(await case.leased_bodies()) == [b"x", b"y", b"y"]

    @rule("unique_key")
    async def test_a_batch_stores_the_first_message_of_a_key(self, case: Case) -> None:
        ids = await case.publish(b"1", b"2", b"3", unique_key="k")
        assert len(set(ids)) == 1
        assert await case.leased_bodies() == [b"1"]

    @rule("unique_key")
    async def test_an_id_and_a_key_are_both_unique(self, case: Case) -> None:
        assert await publish(case, b"1", id="one") == "one"
        assert await publish(case, b"2", id="two") == "one"
        assert await publish(case, b"3", id="one", unique_key="other") == "one"
        # Nothing has taken the other key and the other id.
        assert await publish(case, b"4", id="two", unique_key="other") == "two"
        assert await case.leased_bodies() == [b"1", b"4"]

    @rule("unique_key")
    async def test_find_and_browse_show_the_key(self, case: Case) -> None:
        first = await publish(case, b"first")
        other = await publish(case, b"other", _STARTED, unique_key="s", delay=case.tick)
        found = await case.backend.find(case.queue, [first, other])
        assert {(one.message.unique_key, one.message.unique) for one in found} == {("k", None), ("s", _STARTED)}
        (stored,) = await case.messages(State.READY)
        assert stored.message.unique_key == "k"
        lease = await case.lease_one()
        assert (await case.messages(State.LEASED))[0].message.unique_key == "k"
        await case.settle(lease, SettleAction.FAIL_PERM, error="no")
        assert (await case.messages(State.FAILED))[0].message.unique_key == "k"

    @rule("unique_key")
    async def test_options_of_a_key_need_a_key(self, case: Case) -> None:
        await publish(case, b"x")
        with pytest.raises(UsageError, match="unique= needs unique_key=: give the message a key"):
            await case.publish(b"x", unique=_STARTED)

    @rule("unique_key")
    async def test_a_key_that_is_not_valid_is_refused(self, case: Case) -> None:
        for key in ("", "k" * 256, "\ud800"):
            with pytest.raises(InvalidName):
                await publish(case, b"x", unique_key=key)
        await publish(case, b"x", unique_key="k" * 255)
        assert await case.counts() == (1, 0, 0, 0)

    @rule("unique_key")
    @rule("unique_app")
    async def test_a_key_of_the_app_counts_in_all_queues(self, case: Case) -> None:
        other = case.queue + "-2"
        try:
            first = await publish(case, b"first", _APP)
            # A key of a queue is another one.
            own = await publish(case, b"own")
            assert own != first
            drafts = [Draft(body=b"second", unique_key="k", unique=_APP)]
            (held,) = await case.backend.publish(other, drafts)
            assert (held, isinstance(held, KeyHolder) and held.queue) == (first, case.queue)
            assert await case.backend.lease(other, 10, case.long) == []
            for lease in await case.lease(10):
                await case.settle(lease, SettleAction.ACK)
            (free,) = await case.backend.publish(other, drafts)
            assert free not in {first, own}
            assert await publish(case, b"third", _APP) == free
            # A queue that is deleted has no messages.
            await case.backend.delete(other)
            assert await publish(case, b"fourth", _APP) not in {first, free}
        finally:
            await case.backend.delete(other)

    @rule("unique_key")
    @rule("unique_app")
    async def test_a_requeue_is_refused_while_a_message_of_another_queue_has_the_key_of_the_app(
        self, case: Case
    ) -> None:
        other = case.queue + "-2"
        try:
            first = await publish(case, b"first", _APP)
            await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
            (second,) = await case.backend.publish(other, [Draft(body=b"second", unique_key="k", unique=_APP)])
            assert second != first
            with pytest.raises(AlreadyEnqueued, match=f"unique key 'k' is held by {second}"):
                await case.backend.requeue(case.queue, Selection(ids=[first]))
            await case.backend.remove(other, Selection(ids=[second]))
            assert await case.backend.requeue(case.queue, Selection(ids=[first])) == 1
            (held,) = await case.backend.publish(other, [Draft(body=b"third", unique_key="k", unique=_APP)])
            assert held == first
        finally:
            await case.backend.delete(other)

    @rule("unique_key")
    @rule("unique_app")
    async def test_a_key_of_the_app_can_be_free_from_the_first_lease_on(self, case: Case) -> None:
        other = case.queue + "-2"
        started = Unique(scope="app", until="started")
        draft = Draft(body=b"second", unique_key="k", unique=started)
        try:
            first = await publish(case, b"first", started)
            assert await case.backend.publish(other, [draft]) == [first]
            lease = await case.lease_one()
            assert (lease.message.unique_key, lease.message.unique) == ("k", started)
            (second,) = await case.backend.publish(other, [draft])
            assert second != first
            await case.settle(lease, SettleAction.RELEASE)
            assert await publish(case, b"x", started) == second
        finally:
            await case.backend.delete(other)
