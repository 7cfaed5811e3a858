"""The contract of `browse` without parts: the order, `after`, `limit`, `newest`, and changes during a call."""

from __future__ import annotations

import pytest

from qworker.errors import QueueNotFound, UsageError
from qworker.kit.parts import PAGE_BYTES, PAGE_MESSAGES
from qworker.message import Query, Selection, SettleAction, State, StoredMessage
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["BrowsingContract"]

# Texts that are not a position of this store.
HOSTILE_POSITIONS = [
    "garbage",
    "",
    ":",
    "1",
    "1:",
    "-1:x",
    "0:../../etc",
    "1:%00",
    "1:%",
    f"{'9' * 39}:x",
    "1e999:x",
    "nan:x",
    "0:a%2Cb",
    "12,34,56",
    "a\0b",
    "a\nb",
    "é",
    "a" * 5000,
]


async def all_are_given_once(case: Case) -> None:
    """Prove a deviation from `fifo`."""
    bodies = [b"%d" % number for number in range(20)]
    await case.publish(*bodies)
    assert sorted(await case.browse(State.READY)) == sorted(bodies)
    assert sorted(await walked(case, State.READY, 3)) == sorted(bodies)


async def delayed_are_listed_in_any_order(case: Case) -> None:
    """Prove a deviation from `browse_delayed`."""
    for number in (2, 1):
        await case.publish(b"%d" % number, delay=case.tick * number)
    assert sorted(await case.browse(State.DELAYED)) == [b"1", b"2"]


async def leased_are_not_listed(case: Case) -> None:
    """Prove a deviation from `browse_leased`."""
    await case.publish(b"x")
    await case.lease_one()
    assert await case.browse(State.LEASED) == []


async def a_removed_one_was_next(case: Case) -> None:
    """Prove a deviation from `after_removed`."""
    ids = await case.publish(*[b"%d" % number for number in range(5)])
    seen = await case.messages(State.READY)
    assert await case.backend.remove(case.queue, Selection(ids=[ids[2]])) == 1
    assert await case.browse(State.READY, after=seen[2].position) == [b"0", b"1", b"3", b"4"]


async def walked(case: Case, state: State, limit: int, *, newest: bool = False) -> list[bytes]:
    """Return the bodies of a state, read in steps. Each step begins after the last message of the step before."""
    bodies: list[bytes] = []
    after: str | None = None
    while found := await case.messages(state, after=after, limit=limit, newest=newest):
        assert len(found) <= limit
        bodies += [stored.message.body for stored in found]
        after = found[-1].position
        assert len(bodies) < 1000, "it does not end"
    return bodies


async def in_order(case: Case, state: State, bodies: list[bytes]) -> list[StoredMessage]:
    """Prove that a state is listed in this order, in steps of any size, and backwards. Return the messages."""
    found = await case.messages(state)
    assert [stored.message.body for stored in found] == bodies
    assert {stored.state for stored in found} <= {state}
    for newest, wanted in ((False, bodies), (True, bodies[::-1])):
        assert await case.browse(state, newest=newest) == wanted
        assert await case.browse(state, newest=newest, limit=2) == wanted[:2]
        assert await case.browse(state, newest=newest, limit=len(bodies) + 1) == wanted
        for limit in (1, 3):
            assert await walked(case, state, limit, newest=newest) == wanted
    for number, stored in enumerate(found):
        assert await case.browse(state, after=stored.position) == bodies[number + 1 :]
        assert await case.browse(state, after=stored.position, newest=True) == bodies[:number][::-1]
    return found


class BrowsingContract(Contract):
    """The tests of `browse` without parts."""

    @rule("fifo", otherwise=all_are_given_once)
    async def test_browse_shows_ready_messages_in_the_order_in_which_they_are_leased(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(12)]
        ids = await case.publish(*bodies)
        found = await in_order(case, State.READY, bodies)
        assert [stored.message.id for stored in found] == ids
        assert {stored.message.queue for stored in found} == {case.queue}
        assert await case.leased_bodies() == bodies

    @rule("priority")
    async def test_browse_shows_a_higher_priority_first(self, case: Case) -> None:
        for number in range(8):
            await case.publish(b"%d" % number, priority=(0, 9, 0, 5)[number % 4])
        await in_order(case, State.READY, [b"1", b"5", b"3", b"7", b"0", b"2", b"4", b"6"])

    @rule("release_in_place", otherwise=None)
    async def test_browse_shows_what_came_back_where_it_was(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(6)]
        await case.publish(*bodies)
        leases = await case.lease(4)
        assert await case.backend.settle(case.settlements([leases[1], leases[3]], SettleAction.RELEASE)) == []
        await in_order(case, State.READY, [b"1", b"3", b"4", b"5"])

    @rule("browse_delayed", otherwise=delayed_are_listed_in_any_order)
    async def test_browse_shows_delayed_messages_as_they_become_due(self, case: Case) -> None:
        for number in (3, 1, 4, 2):
            await case.publish(b"%d" % number)
            (lease,) = await case.lease(1)
            await case.settle(lease, SettleAction.RELEASE, delay=case.tick * 100 * number)
        found = await in_order(case, State.DELAYED, [b"1", b"2", b"3", b"4"])
        due = [one.due_at for one in found if one.due_at is not None]
        assert len(due) == 4
        assert due == sorted(due)

    @rule("browse_leased", otherwise=leased_are_not_listed)
    async def test_browse_shows_leased_messages_with_their_expiry(self, case: Case) -> None:
        await case.publish(b"1", b"2", b"3")
        leases = [await case.lease_one(visibility=case.long * (3 - number)) for number in range(3)]
        found = await in_order(case, State.LEASED, [b"3", b"2", b"1"])
        for one, lease in zip(found, reversed(leases), strict=True):
            assert one.expires_at is not None
            assert abs(one.expires_at - lease.expires_at) < case.tick

    @rule("fail_kept", otherwise=leased_are_not_listed)
    async def test_browse_shows_failed_messages_as_they_failed(self, case: Case) -> None:
        for number in range(4):
            await case.fail(b"%d" % number)
            await case.harness.advance(case.tick * 0.1)
        await in_order(case, State.FAILED, [b"%d" % number for number in range(4)])

    @rule("browse_leased", otherwise=leased_are_not_listed)
    async def test_messages_with_the_same_time_are_each_given_once(self, case: Case) -> None:
        bodies = sorted(b"%d" % number for number in range(20))
        await case.publish(*bodies)
        leases = await case.lease(20)
        for newest in (False, True):
            assert sorted(await walked(case, State.LEASED, 3, newest=newest)) == bodies
        ends = case.settlements(leases, SettleAction.FAIL_PERM, error="no")
        assert await case.backend.settle(ends) == []
        if "fail_kept" not in case.backend.deviations:
            for newest in (False, True):
                assert sorted(await walked(case, State.FAILED, 3, newest=newest)) == bodies

    @rule("fifo", otherwise=all_are_given_once)
    async def test_what_follows_a_leased_message_is_given(self, case: Case) -> None:
        await case.publish(*[b"%d" % number for number in range(8)])
        found = await case.messages(State.READY)
        assert [lease.message.id for lease in await case.lease(3)] == [stored.message.id for stored in found[:3]]
        assert await case.browse(State.READY, after=found[4].position) == [b"5", b"6", b"7"]
        assert await case.browse(State.READY, after=found[2].position) == [b"3", b"4", b"5", b"6", b"7"]
        assert await case.browse(State.READY, after=found[0].position, limit=2) == [b"3", b"4"]
        assert await case.browse(State.READY, after=found[5].position, newest=True) == [b"4", b"3"]
        assert await case.browse(State.READY, after=found[1].position, newest=True) == []

    @rule("after_removed", otherwise=a_removed_one_was_next)
    @rule("remove")
    @rule("fifo", otherwise=all_are_given_once)
    async def test_what_follows_a_removed_message_is_given(self, case: Case) -> None:
        ids = await case.publish(*[b"%d" % number for number in range(8)])
        found = await case.messages(State.READY)
        assert await case.backend.remove(case.queue, Selection(ids=[ids[0], ids[3], ids[6]])) == 3
        assert await case.browse(State.READY, after=found[3].position) == [b"4", b"5", b"7"]
        assert await case.browse(State.READY, after=found[3].position, newest=True) == [b"2", b"1"]
        assert await case.browse(State.READY, after=found[6].position) == [b"7"]
        assert await case.browse(State.READY, newest=True, limit=2) == [b"7", b"5"]
        if "given_ids" not in case.backend.deviations:
            # The removed message leaves neither a row nor a place in the order, so the new message is the last one.
            await case.publish(b"again", id=ids[3])
            assert await case.browse(State.READY) == [b"1", b"2", b"4", b"5", b"7", b"again"]
            assert await case.browse(State.READY, newest=True, limit=3) == [b"again", b"7", b"5"]
            assert await case.browse(State.READY, after=found[4].position) == [b"5", b"7", b"again"]

    @rule("requeue")
    async def test_what_follows_a_requeued_failure_is_given(self, case: Case) -> None:
        for number in range(5):
            await case.fail(b"%d" % number)
            await case.harness.advance(case.tick * 0.1)
        found = await case.messages(State.FAILED)
        assert await case.backend.requeue(case.queue, Selection(ids=[found[2].message.id])) == 1
        assert await case.browse(State.FAILED, after=found[2].position) == [b"3", b"4"]
        assert await case.browse(State.FAILED, after=found[2].position, newest=True) == [b"1", b"0"]

    async def test_what_stays_is_given_once_while_others_come_and_go(self, case: Case) -> None:
        stay = {b"stays-%d" % number for number in range(430)}
        await case.publish(*[b"goes-%d" % number for number in range(70)])
        await case.publish(*stay)
        other = await case.open()
        given: list[bytes] = []
        async for page in case.backend.browse(case.queue, Query(State.READY)):
            given += [stored.message.body for stored in page]
            for lease in await other.lease(case.queue, 10, case.long):
                stay.discard(lease.message.body)
            await case.publish(b"comes")
        assert stay <= set(given)
        assert len([body for body in given if body in stay]) == len(stay)

    @rule("big_bodies", otherwise=None)
    async def test_pages_are_bounded_in_bytes(self, case: Case) -> None:
        bodies = [bytes([number]) * (1 << 20) for number in range(20)]
        for body in bodies:
            await case.publish(body)
        pages = [page async for page in case.backend.browse(case.queue, Query(State.READY))]
        assert sorted(stored.message.body for page in pages for stored in page) == bodies
        for page in pages:
            assert 0 < len(page) <= PAGE_MESSAGES
            assert sum(len(stored.message.body) for stored in page) < PAGE_BYTES + (2 << 20)

    @rule("extend")
    async def test_a_lease_that_is_extended_meanwhile_is_given_once(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(120)]
        await case.publish(*bodies)
        leases = await case.lease(120, visibility=case.long)
        given: list[bytes] = []
        async for page in case.backend.browse(case.queue, Query(State.LEASED)):
            given += [stored.message.body for stored in page]
            assert case.backend.extend(leases[::2], case.long * 2) == []
        assert sorted(given) == ([] if "browse_leased" in case.backend.deviations else sorted(bodies))

    @rule("given_ids")
    async def test_another_worker_shows_the_ids_of_what_came_after_its_last_look(self, case: Case) -> None:
        other = await case.open()
        await case.publish(b"1", id="first")
        assert len(await case.messages(State.READY, by=other)) == 1
        await case.publish(b"2", id="second")
        leases = await case.lease(2)
        shown = await case.messages(State.LEASED, by=other)
        if "browse_leased" not in case.backend.deviations:
            assert {stored.message.id for stored in shown} == {"first", "second"}
        assert await case.backend.settle(case.settlements(leases, SettleAction.FAIL_PERM)) == []
        assert {stored.message.id for stored in await case.messages(State.FAILED, by=other)} == {"first", "second"}

    async def test_a_position_is_short_plain_text(self, case: Case) -> None:
        await case.publish(*[b"x"] * 3)
        messages = await case.messages(State.READY)
        assert len(messages) == 3
        for stored in messages:
            assert stored.position is not None
            assert stored.position.isascii()
            assert stored.position.isprintable()
            assert " " not in stored.position
            assert 0 < len(stored.position) < 1000

    @pytest.mark.parametrize("state", list(State))
    async def test_a_hostile_position_is_refused_or_gives_no_message_twice(self, case: Case, state: State) -> None:
        await case.publish(*[b"%d" % number for number in range(5)])
        refusals: list[str] = []
        for position in HOSTILE_POSITIONS:
            for newest in (False, True):
                try:
                    found = await case.browse(state, after=position, newest=newest)
                except UsageError as error:
                    refusals.append(str(error))
                else:
                    assert len(set(found)) == len(found)
        for text in refusals:
            assert "is not a valid position" in text
            assert "\n" not in text
            assert len(text) < 300
        with pytest.raises(UsageError, match="'garbage' is not a valid position"):
            await case.browse(state, after="garbage")

    async def test_a_query_that_cannot_be_answered_is_refused(self, case: Case) -> None:
        await case.publish(b"x")
        with pytest.raises(UsageError, match="limit must be at least 1"):
            Query(State.READY, limit=0)
        with pytest.raises(UsageError, match="a part has no order"):
            Query(State.READY, part="x", after="1:x")
        with pytest.raises(UsageError, match="a part has no order"):
            Query(State.READY, part="x", newest=True)
        for part in ("garbage", "", "1/0", "5/3", "1 2", "x" * 5000, "é", "a\nb"):
            with pytest.raises(UsageError, match="is not a valid part"):
                await case.messages(State.READY, part=part)

    async def test_an_empty_state_has_no_page(self, case: Case) -> None:
        await case.backend.create(case.queue)
        for state in State:
            assert [page async for page in case.backend.browse(case.queue, Query(state))] == []
            assert [page async for page in case.backend.browse(case.queue, Query(state, newest=True, limit=5))] == []

    async def test_a_state_of_an_absent_queue_is_not_found(self, case: Case) -> None:
        for state in State:
            with pytest.raises(QueueNotFound):
                await case.messages(state, limit=1)
