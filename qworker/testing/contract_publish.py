"""The contract of `publish`: order, ids, unique keys, times and bodies."""

from __future__ import annotations

import asyncio

import pytest

from qworker.errors import InvalidName, UsageError
from qworker.message import Draft, MessageRef, Selection, SettleAction, State
from qworker.names import new_id, to_message_id
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["PublishingContract"]

# Texts that cannot be an id.
NO_IDS = ["", "\ud800", "order-\udfff"]
HOSTILE_NAMES = ["", ".", "..", "../other", "a/b", "/etc", "a\0b", "a\nb", "-rf", "_a", "a b", "é", "a" * 300, "%2e%2e"]


async def all_in_any_order(case: Case) -> None:
    """Prove a deviation from `fifo`."""
    bodies = [b"%d" % number for number in range(20)]
    await case.publish(*bodies)
    assert sorted(await case.leased_bodies()) == sorted(bodies)


async def tries_start_afresh(case: Case) -> None:
    """Prove a deviation from `tries_carried`."""
    await case.publish(b"moved", tries=3, enqueued_at=1_600_000_000.0)
    message = (await case.lease_one()).message
    assert message.tries == 0
    assert message.enqueued_at != 1_600_000_000.0


class PublishingContract(Contract):
    """The tests of `publish`."""

    async def test_a_message_is_leased_as_it_was_published(self, case: Case) -> None:
        (message_id,) = await case.publish(b'{"task": "thumbnail"}')
        message = (await case.lease_one()).message
        assert message.id == message_id
        assert message.body == b'{"task": "thumbnail"}'
        assert message.queue == case.queue
        assert message.tries == 0

    async def test_enqueued_at_is_the_time_of_publishing(self, case: Case) -> None:
        await case.publish(b"x")
        lease = await case.lease_one(visibility=case.long)
        now = lease.expires_at - case.long
        assert abs(now - lease.message.enqueued_at) < 60 + case.tick

    async def test_publishing_makes_the_queue(self, case: Case) -> None:
        assert case.queue not in await case.backend.queues()
        await case.publish(b"x")
        assert case.queue in await case.backend.queues()

    async def test_publishing_nothing_stores_nothing(self, case: Case) -> None:
        assert await case.publish() == []
        assert await case.lease(10) == []

    @rule("fifo", otherwise=all_in_any_order)
    async def test_a_batch_is_leased_in_its_order(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(50)]
        ids = await case.publish(*bodies)
        leases = await case.lease(100)
        assert [lease.message.body for lease in leases] == bodies
        assert [lease.message.id for lease in leases] == ids

    @rule("fifo", otherwise=all_in_any_order)
    async def test_batches_are_leased_in_the_order_of_the_calls(self, case: Case) -> None:
        for number in range(12):
            await case.publish(b"%d a" % number, b"%d b" % number)
        expected = [b"%d %c" % (number, letter) for number in range(12) for letter in b"ab"]
        found = [body for _ in range(12) for body in await case.leased_bodies(2)]
        assert found == expected

    async def test_ids_are_unique_within_and_between_batches(self, case: Case) -> None:
        ids = await case.publish(*[b"x"] * 50) + await case.publish(*[b"x"] * 50)
        assert len(set(ids)) == 100

    @rule("given_ids")
    async def test_an_id_that_is_stored_is_not_stored_twice(self, case: Case) -> None:
        chosen = new_id()
        assert await case.publish(b"first", id=chosen) == [chosen]
        assert await case.publish(b"second", id=chosen) == [chosen]
        assert await case.leased_bodies() == [b"first"]

    @rule("given_ids")
    async def test_an_id_given_twice_in_one_batch_is_stored_once(self, case: Case) -> None:
        drafts = [Draft(body=b"first", id="chosen"), Draft(body=b"other"), Draft(body=b"second", id="chosen")]
        ids = await case.backend.publish(case.queue, drafts)
        assert ids[0] == ids[2] == "chosen"
        assert await case.leased_bodies() == [b"first", b"other"]

    @rule("given_ids")
    async def test_an_id_that_people_would_choose_is_kept(self, case: Case) -> None:
        for chosen in ("order-4711", "a", "A.b:c_d-e", "0" * 64):
            assert await case.publish(chosen.encode(), id=chosen) == [chosen]
        leases = await case.lease(10)
        assert {lease.message.id for lease in leases} == {lease.message.body.decode() for lease in leases}
        assert len(leases) == 4

    @rule("given_ids")
    async def test_an_id_is_known_while_its_message_is_leased(self, case: Case) -> None:
        chosen = new_id()
        await case.publish(b"x", id=chosen)
        await case.lease_one()
        assert await case.publish(b"x", id=chosen) == [chosen]
        assert await case.lease(10) == []

    @rule("given_ids")
    async def test_an_id_is_known_while_its_message_is_delayed(self, case: Case) -> None:
        chosen = new_id()
        await case.publish(b"x", id=chosen)
        await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, delay=case.tick)
        assert await case.publish(b"x", id=chosen) == [chosen]
        await case.expire(case.tick)
        assert len(await case.lease(10)) == 1

    @rule("given_ids")
    async def test_an_id_is_known_after_its_message_failed(self, case: Case) -> None:
        chosen = new_id()
        await case.publish(b"x", id=chosen)
        await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
        assert await case.publish(b"x", id=chosen) == [chosen]
        assert await case.lease(10) == []

    @rule("given_ids")
    async def test_another_worker_knows_the_id_too(self, case: Case) -> None:
        chosen = new_id()
        other = await case.open()
        await case.publish(b"x", id=chosen)
        assert await other.publish(case.queue, [Draft(body=b"y", id=chosen)]) == [chosen]
        assert await case.leased_bodies() == [b"x"]

    @rule("given_ids")
    async def test_concurrent_publishes_of_one_id_store_one_message(self, case: Case) -> None:
        other = await case.open()
        chosen = [new_id() for _ in range(10)]
        drafts = [Draft(body=b"x", id=message_id) for message_id in chosen]
        # With a task group, the error of a deviation would be inside an exception group.
        await asyncio.gather(*(backend.publish(case.queue, drafts) for backend in (case.backend, other) * 3))
        assert sorted(lease.message.id for lease in await case.lease(100)) == sorted(chosen)

    @rule("hold")
    async def test_a_held_id_stays_taken_after_its_message_is_gone(self, case: Case) -> None:
        chosen = new_id()
        assert await case.publish(b"first", id=chosen, hold=case.long) == [chosen]
        assert await case.settle(await case.lease_one(), SettleAction.ACK)
        await case.backend.remove(case.queue, Selection(ids=[chosen]))
        other = await case.open()
        assert await case.publish(b"second", id=chosen) == [chosen]
        assert await other.publish(case.queue, [Draft(body=b"third", id=chosen, hold=case.long)]) == [chosen]
        assert await case.lease(10) == []
        assert await case.publish(b"other", id="other") == ["other"]
        assert await case.leased_bodies() == [b"other"]

    @rule("hold")
    async def test_a_hold_ends_at_its_time(self, case: Case) -> None:
        chosen = new_id()
        await case.publish(b"first", id=chosen, hold=case.tick)
        await case.settle(await case.lease_one(), SettleAction.ACK)
        await case.backend.remove(case.queue, Selection(ids=[chosen]))
        await case.expire(case.tick)
        await case.publish(b"second", id=chosen)
        assert await case.leased_bodies() == [b"second"]

    @rule("hold")
    async def test_a_message_with_a_hold_is_retried_as_any_other(self, case: Case) -> None:
        chosen = new_id()
        await case.publish(b"x", id=chosen, hold=case.long)
        await case.settle(await case.lease_one(), SettleAction.FAIL_TMP)
        await case.backend.reap(case.queue)
        lease = await case.lease_one()
        assert (lease.message.id, lease.message.tries) == (chosen, 1)
        assert await case.publish(b"y", id=chosen) == [chosen]
        assert await case.lease(10) == []

    async def test_a_hold_without_an_id_is_refused(self, case: Case) -> None:
        with pytest.raises(UsageError, match="hold= needs id=: give the message an id"):
            await case.publish(b"x", hold=1.0)

    @rule("unique_key")
    async def test_a_key_that_is_pending_is_not_stored_twice(self, case: Case) -> None:
        first = await case.publish(b"first", unique_key="a.png")
        assert await case.publish(b"second", unique_key="a.png") == first
        lease = await case.lease_one()
        assert lease.message.unique_key == "a.png"
        assert await case.publish(b"third", unique_key="a.png") == first
        await case.settle(lease, SettleAction.FAIL_TMP, delay=case.tick)
        assert await case.publish(b"fourth", unique_key="a.png") == first
        assert await case.lease(10) == []

    @rule("unique_key")
    async def test_a_key_is_free_again_after_ack_and_after_failure(self, case: Case) -> None:
        first = await case.publish(b"first", unique_key="k")
        await case.settle(await case.lease_one(), SettleAction.ACK)
        second = await case.publish(b"second", unique_key="k")
        assert second != first
        await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="no")
        third = await case.publish(b"third", unique_key="k")
        assert third != second
        assert await case.leased_bodies() == [b"third"]

    @rule("unique_key")
    async def test_a_key_is_free_again_after_its_message_was_removed(self, case: Case) -> None:
        first = await case.publish(b"first", unique_key="k")
        await case.backend.remove(case.queue, Selection(ids=first))
        assert await case.publish(b"second", unique_key="k") != first
        await case.backend.remove(case.queue, Selection(state=State.READY))
        await case.publish(b"third", unique_key="k")
        assert await case.leased_bodies() == [b"third"]

    @rule("unique_key")
    async def test_keys_are_apart_from_one_another(self, case: Case) -> None:
        keys = ["a", "A", "a/b", "a b", "ä", "../x", "k" * 255, "x\ny"]
        for key in keys:
            await case.publish(key.encode(), unique_key=key)
        assert {lease.message.unique_key for lease in await case.lease(100)} == set(keys)

    @rule("priority")
    async def test_a_higher_priority_is_leased_first_and_each_in_order(self, case: Case) -> None:
        for priority in (0, 9, 5, 0, 9, 5):
            await case.publish(b"%d" % priority, priority=priority)
        await case.publish(b"last")
        assert await case.leased_bodies() == [b"9", b"9", b"5", b"5", b"0", b"0", b"last"]

    @rule("priority")
    async def test_a_priority_is_kept_by_retries_releases_delays_and_given_ids(self, case: Case) -> None:
        await case.publish(b"given", priority=7, id="order_17")
        await case.publish(b"delayed", priority=8, delay=case.tick)
        await case.publish(b"high", priority=9)
        await case.publish(b"low", b"low")
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_TMP)
        assert await case.settle(await case.lease_one(), SettleAction.RELEASE)
        await case.harness.advance(case.tick * 2)
        await case.backend.reap(case.queue)
        leases = await case.lease(3)
        assert [(lease.message.body, lease.message.priority) for lease in leases] == [
            (b"high", 9),
            (b"delayed", 8),
            (b"given", 7),
        ]
        assert leases[2].message.id == "order_17"
        assert await case.leased_bodies() == [b"low", b"low"]

    @rule("priority")
    async def test_the_oldest_message_counts_whatever_its_priority(self, case: Case) -> None:
        await case.publish(b"old")
        await case.harness.advance(case.tick)
        await case.publish(b"urgent", priority=9)
        age = (await case.stats()).oldest_age_s
        assert age is not None
        assert age > case.tick * 0.5

    @rule("priority")
    async def test_a_message_is_found_by_its_id_and_task_whatever_its_priority(self, case: Case) -> None:
        for priority in (0, 1, 5, 9):
            (message_id,) = await case.publish(b"x", priority=priority, task="work")
            (found,) = await case.backend.find(case.queue, [MessageRef(message_id, "work")])
            assert (found.state, found.message.id, found.message.priority) == (State.READY, message_id, priority)

    @rule("delay")
    async def test_a_delayed_message_is_not_leased_before_it_is_due(self, case: Case) -> None:
        (message_id,) = await case.publish(b"later", delay=case.tick)
        assert await case.lease() == []
        assert await case.state(message_id) is State.DELAYED
        await case.harness.advance(case.tick * 1.5)
        assert await case.leased_bodies() == [b"later"]

    @rule("delay")
    async def test_due_at_wins_over_delay(self, case: Case) -> None:
        await case.publish(b"now")
        now = (await case.lease_one()).expires_at - case.long
        await case.publish(b"x", due_at=now + case.tick, delay=case.long)
        assert await case.lease() == []
        await case.harness.advance(case.tick * 2)
        assert await case.leased_bodies() == [b"x"]

    @rule("delay")
    async def test_due_in_the_past_is_due_now(self, case: Case) -> None:
        await case.publish(b"x", due_at=1_000_000.0)
        assert await case.leased_bodies() == [b"x"]

    @rule("tries_carried", otherwise=tries_start_afresh)
    async def test_tries_and_time_come_along_from_another_store(self, case: Case) -> None:
        await case.publish(b"moved", tries=3, enqueued_at=1_600_000_000.5)
        message = (await case.lease_one()).message
        assert message.tries == 3
        assert abs(message.enqueued_at - 1_600_000_000.5) < 0.001

    @rule("binary_bodies")
    async def test_a_body_is_any_bytes(self, case: Case) -> None:
        body = bytes(range(256)) + b"\r\n\0\xff"
        await case.publish(body)
        assert await case.leased_bodies() == [body]

    @rule("empty_bodies")
    async def test_a_body_may_be_empty(self, case: Case) -> None:
        await case.publish(b"")
        assert await case.leased_bodies() == [b""]

    @rule("big_bodies")
    async def test_a_body_may_have_a_mebibyte(self, case: Case) -> None:
        body = b"0123456789abcdef" * 65536
        await case.publish(body, b"small")
        assert await case.leased_bodies() == [body, b"small"]

    @rule("fields")
    async def test_fields_come_along(self, case: Case) -> None:
        fields = {"tile": "T32U0", "": "", "ä b": "☃\n\t\0"}
        await case.publish(b"x", fields=fields)
        await case.publish(b"", fields=fields)
        first, second = [lease.message for lease in await case.lease(2)]
        assert (first.body, first.fields) == (b"x", fields)
        assert (second.body, second.fields) == (b"", fields)

    @rule("argv")
    async def test_arguments_come_along(self, case: Case) -> None:
        arguments = ("a", "b c", "ä_/%", "")
        await case.publish(b"x", argv=arguments)
        message = (await case.lease_one()).message
        assert (message.body, message.argv) == (b"x", arguments)

    async def test_hostile_queue_names_are_refused(self, case: Case) -> None:
        for name in HOSTILE_NAMES:
            with pytest.raises(InvalidName):
                await case.backend.publish(name, [Draft(body=b"x")])
            with pytest.raises(InvalidName):
                await case.backend.create(name)

    @rule("given_ids")
    async def test_any_text_can_be_an_id(self, case: Case) -> None:
        """A text that a store cannot keep as it is has a digest."""
        chosen = [*filter(None, HOSTILE_NAMES), "0" * 65, "漢" * 10_000, "\U0001f389 a\x00\n"]
        ids = [to_message_id(text) for text in chosen]
        assert await case.backend.publish(case.queue, [Draft(body=b"x", id=text) for text in chosen]) == ids
        for text in chosen:
            assert await case.publish(b"y", id=text) == [to_message_id(text)]
        assert [stored.message.id for stored in await case.backend.find(case.queue, ids)] == ids
        assert await case.leased_bodies(100) == [b"x"] * len(ids)

    @rule("given_ids")
    async def test_a_text_that_cannot_be_an_id_is_refused(self, case: Case) -> None:
        for text in NO_IDS:
            with pytest.raises(InvalidName) as refused:
                await case.publish(b"x", id=text)
            assert str(refused.value).isprintable()
        await case.publish(b"good", id="good")
        assert await case.leased_bodies() == [b"good"]

    async def test_a_text_that_is_no_id_here_is_not_stored(self, case: Case) -> None:
        (known,) = await case.publish(b"good")
        texts = [*NO_IDS, *HOSTILE_NAMES]
        assert [stored.message.id for stored in await case.backend.find(case.queue, [*texts, known])] == [known]
        assert await case.backend.requeue(case.queue, Selection(ids=texts)) == 0
        assert await case.backend.remove(case.queue, Selection(ids=texts)) == 0
        assert await case.leased_bodies() == [b"good"]

    @rule("many_queues")
    async def test_queues_are_apart_from_one_another(self, case: Case) -> None:
        other = case.queue + "-2"
        try:
            await case.publish(b"here")
            await case.backend.publish(other, [Draft(body=b"there")])
            assert await case.leased_bodies() == [b"here"]
            leases = await case.backend.lease(other, 10, case.long)
            assert [lease.message.body for lease in leases] == [b"there"]
        finally:
            await case.backend.delete(other)

    @rule("given_ids")
    async def test_a_cancelled_publish_can_be_repeated_and_stores_once(self, case: Case) -> None:
        for turns in range(20):
            chosen = [f"{turns}-{number}" for number in range(3)]
            drafts = [Draft(body=name.encode(), id=name) for name in chosen]
            call = asyncio.create_task(case.backend.publish(case.queue, drafts))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert await case.backend.publish(case.queue, drafts) == chosen
        assert await case.leased_bodies(1000) == [b"%d-%d" % (turns, n) for turns in range(20) for n in range(3)]
