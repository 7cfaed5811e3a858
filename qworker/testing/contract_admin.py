"""The contract of queues, counts, `find`, `remove`, `requeue` and `pause`, and of opening and closing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from qworker.backend.listing import list_messages
from qworker.errors import InvalidName, QueueNotFound, UsageError
from qworker.message import FinishedMessage, MessageRef, Query, Selection, SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.contract_publish import HOSTILE_NAMES
from qworker.testing.harness import Case
from qworker.testing.rules import RULES, rule
from qworker.testing.wait_until import wait_until

__all__ = ["AdministeringContract"]


async def the_total_is_right(case: Case) -> None:
    """Prove a deviation from `exact_counts`."""
    await case.publish(b"1", b"2", b"3")
    await case.lease_one()
    assert sum(await case.counts()) == 3


async def one_of_each(case: Case) -> dict[State, str]:
    """Create a failed, a delayed, a leased and a ready message, and return their ids."""
    (failed,) = await case.fail(b"fail")
    (delayed,) = await case.publish(b"delayed")
    await case.settle(await case.lease_one(), SettleAction.RELEASE, delay=case.long)
    (leased,) = await case.publish(b"leased")
    await case.lease_one()
    (ready,) = await case.publish(b"ready")
    return {State.FAILED: failed, State.DELAYED: delayed, State.LEASED: leased, State.READY: ready}


def every_selection(state: State) -> list[Selection]:
    """Return a selection of each form, and an empty selection of each form that has one."""
    found = FinishedMessage(id="x", state=State.FAILED, finished_at=1.0, location="x")
    return [
        Selection(ids=["x"]),
        Selection(ids=[]),
        Selection(state=state),
        Selection(unchanged=[found]),
        Selection(unchanged=[]),
    ]


class AdministeringContract(Contract):
    """The tests of all methods that neither produce nor consume."""

    async def test_every_deviation_is_a_rule_with_a_reason(self, case: Case) -> None:
        deviations = case.backend.deviations
        assert set(deviations) <= set(RULES)
        assert [name for name, reason in deviations.items() if len(reason) <= 10] == []

    async def test_the_durability_is_one_of_four(self, case: Case) -> None:
        assert case.backend.durability in {"none", "process", "disk", "replicated"}

    async def test_describe_names_the_store(self, case: Case) -> None:
        assert ":" in case.backend.describe()

    async def test_create_is_idempotent_and_keeps_messages(self, case: Case) -> None:
        await case.backend.create(case.queue)
        await case.publish(b"x")
        await case.backend.create(case.queue)
        assert (await case.stats()).ready == 1
        assert case.queue in await case.backend.queues()

    async def test_another_worker_creates_a_queue_that_exists_and_keeps_its_messages(self, case: Case) -> None:
        await case.backend.create(case.queue)
        await case.publish(b"1", b"2")
        await case.lease_one()
        other = await case.open()
        await other.create(case.queue)
        assert (await case.counts())[:2] == (1, 1)
        assert case.queue in await other.queues()

    async def test_the_directory_of_an_open_store_is_there(self, case: Case) -> None:
        await case.backend.open()
        directory = case.backend.directory
        assert directory is None or (directory.is_absolute() and directory.is_dir())

    async def test_queues_are_sorted(self, case: Case) -> None:
        await case.backend.create(case.queue)
        queues = await case.backend.queues()
        assert queues == sorted(set(queues))

    async def test_delete_removes_the_queue_with_its_messages_and_is_idempotent(self, case: Case) -> None:
        await case.publish(b"1", b"2")
        lease = await case.lease_one()
        await case.backend.delete(case.queue)
        await case.backend.delete(case.queue)
        assert case.queue not in await case.backend.queues()
        assert await case.lease(10) == []
        assert not await case.settle(lease, SettleAction.RELEASE)
        await case.publish(b"new")
        assert await case.leased_bodies() == [b"new"]

    @pytest.mark.parametrize("call", ["stats", "browse", "find", "pause", "resume"])
    async def test_an_absent_queue_is_not_found(self, case: Case, call: str) -> None:
        backend = case.backend
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "stats": lambda: backend.stats(case.queue),
            "browse": lambda: case.messages(State.READY),
            "find": lambda: backend.find(case.queue, ["x"]),
            "pause": lambda: backend.pause(case.queue),
            "resume": lambda: backend.resume(case.queue),
        }
        if call in {"pause", "resume"} and "pause" in backend.deviations:
            await backend.create(case.queue)
            assert (await case.stats()).paused is False
            return
        with pytest.raises(QueueNotFound) as caught:
            await calls[call]()
        assert case.queue in str(caught.value)
        assert case.queue not in await backend.queues()

    async def test_hostile_queue_names_reach_nothing(self, case: Case) -> None:
        backend = case.backend
        before = await backend.queues()
        for name in HOSTILE_NAMES:
            for call in (
                backend.stats(name),
                list_messages(backend, name, Query(State.READY)),
                backend.find(name, ["x"]),
                *(backend.requeue(name, selection) for selection in every_selection(State.FAILED)),
                *(backend.remove(name, selection) for selection in every_selection(State.READY)),
            ):
                with pytest.raises((InvalidName, QueueNotFound)):
                    await call
            try:
                assert (await backend.reap(name)).returned == 0
                await backend.delete(name)
            except InvalidName:
                pass
        assert await backend.queues() == before

    async def test_hostile_ids_are_not_found(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        found = await case.backend.find(case.queue, [*HOSTILE_NAMES, message_id])
        assert [stored.message.id for stored in found] == [message_id]
        for name in HOSTILE_NAMES:
            try:
                assert await case.backend.remove(case.queue, Selection(ids=[name])) == 0
                assert await case.backend.requeue(case.queue, Selection(ids=[name])) == 0
            except InvalidName:
                pass
        assert await case.leased_bodies() == [b"x"]

    @rule("exact_counts", otherwise=the_total_is_right)
    async def test_stats_count_each_state(self, case: Case) -> None:
        await case.publish(*[b"x"] * 10)
        leases = await case.lease(6)
        await case.settle(leases[0], SettleAction.ACK)
        await case.settle(leases[1], SettleAction.FAIL_TMP, delay=case.long)
        await case.settle(leases[2], SettleAction.FAIL_TMP, delay=case.long)
        await case.settle(leases[3], SettleAction.FAIL_PERM, error="no")
        assert await case.counts() == (4, 2, 2, 1)
        stats = await case.stats()
        assert stats.queue == case.queue
        assert stats.paused is False

    async def test_stats_tell_the_oldest_age(self, case: Case) -> None:
        await case.backend.create(case.queue)
        assert (await case.stats()).oldest_age_s is None
        await case.publish(b"old")
        await case.harness.advance(case.tick)
        await case.publish(b"new")
        age = (await case.stats()).oldest_age_s
        assert age is not None
        assert case.tick * 0.5 < age < case.tick + 60

    async def test_a_look_claims_nothing(self, case: Case) -> None:
        (message_id,) = await case.publish(b"x")
        for _ in range(3):
            await case.browse(State.READY)
            await case.find(message_id)
            await case.stats()
        lease = await case.lease_one()
        assert lease.message.tries == 0

    async def test_find_shows_a_message_wherever_it_is(self, case: Case) -> None:
        found = {state: await case.find(message_id) for state, message_id in (await one_of_each(case)).items()}
        for state, stored in found.items():
            assert stored is not None
            assert stored.state is state
            assert stored.message.body == state.value.encode()

    async def test_find_by_the_id_and_the_task_shows_a_message_wherever_it_is(self, case: Case) -> None:
        (failed,) = await case.publish(b"failed", task="resize")
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="broken")
        (retried,) = await case.publish(b"retried", task="resize")
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, error="once")
        (released,) = [lease for lease in await wait_until(case.lease) if lease.message.id == retried]
        assert await case.settle(released, SettleAction.RELEASE)
        (leased,) = [lease for lease in await wait_until(case.lease) if lease.message.id == retried]
        (ready,) = await case.publish(b"ready", task="resize")
        (plain,) = await case.publish(b"plain")
        (long,) = await case.publish(b"long", task="x" * 300)
        refs = [MessageRef(one, "resize") for one in (failed, retried, ready)]
        refs += [MessageRef(plain, "resize"), MessageRef(long, "x" * 300), MessageRef("unknown", "resize")]
        stored_ones = await case.backend.find(case.queue, refs)
        # A caller may encode what it finds.
        assert {type(stored.message.id) for stored in stored_ones} == {str}
        found = {stored.message.id: stored.state for stored in stored_ones}
        kept = {} if "fail_kept" in case.backend.deviations else {failed: State.FAILED}
        expected = {**kept, retried: State.LEASED, ready: State.READY, plain: State.READY, long: State.READY}
        assert found == expected
        guessed = [MessageRef(one, perhaps=("shrink", "resize")) for one in refs]
        assert {one.message.id: one.state for one in await case.backend.find(case.queue, guessed)} == expected
        assert await case.settle(leased, SettleAction.FAIL_TMP, error="twice", delay=0.0)
        assert await case.state(MessageRef(retried, "resize")) in {State.READY, State.DELAYED}

    async def test_find_shows_nothing_for_an_unknown_id(self, case: Case) -> None:
        await case.publish(b"x")
        assert await case.find("unknown") is None
        assert await case.backend.find(case.queue, []) == []

    async def test_find_shows_what_is_stored_of_many_ids_in_their_order_and_once(self, case: Case) -> None:
        there = await one_of_each(case)
        ids = [there[state] for state in (State.DELAYED, State.READY, State.FAILED, State.LEASED)]
        wanted = [ids[0], "unknown", ids[1], ids[0], ids[2], "-", ids[3], ids[1]]
        found = await case.backend.find(case.queue, wanted)
        assert [stored.message.id for stored in found] == ids
        assert [stored.state for stored in found] == [State.DELAYED, State.READY, State.FAILED, State.LEASED]

    async def test_find_shows_many_messages(self, case: Case) -> None:
        ids = await case.publish(*[b"%d" % number for number in range(700)])
        found = await case.backend.find(case.queue, ids[::-1])
        assert [stored.message.id for stored in found] == ids[::-1]
        assert [stored.message.body for stored in found[:2]] == [b"699", b"698"]

    async def test_a_message_that_moves_all_the_time_is_always_found(self, case: Case) -> None:
        ids = await case.publish(*[b"%d" % number for number in range(5)])
        other = await case.open()
        missed: list[list[str]] = []

        async def look() -> None:
            for _ in range(20):
                stored = {found.message.id for found in await other.find(case.queue, ids)}
                missed.append([message_id for message_id in ids if message_id not in stored])

        looking = asyncio.ensure_future(look())
        while not looking.done():
            leases = await case.lease(len(ids))
            await case.backend.settle(case.settlements(leases, SettleAction.RELEASE))
            await asyncio.sleep(0)
        await looking
        assert missed == [[]] * 20

    @rule("requeue")
    async def test_requeue_makes_failed_messages_ready_with_no_tries(self, case: Case) -> None:
        await case.publish(b"x")
        await case.settle(await case.lease_one(), SettleAction.FAIL_TMP, error="once")
        (lease,) = await wait_until(case.lease)
        await case.settle(lease, SettleAction.FAIL_PERM, error="twice")
        assert await case.backend.requeue(case.queue, Selection(state=State.FAILED)) == 1
        assert await case.counts() == (1, 0, 0, 0)
        lease = await case.lease_one()
        assert (lease.message.tries, lease.message.body) == (0, b"x")
        assert await case.settle(lease, SettleAction.ACK)
        assert await case.backend.requeue(case.queue, Selection(state=State.FAILED)) == 0

    @rule("requeue")
    async def test_requeue_of_some_leaves_the_rest(self, case: Case) -> None:
        ids = await case.fail(b"1", b"2", b"3")
        (ready,) = await case.publish(b"ready")
        assert await case.backend.requeue(case.queue, Selection(ids=[ids[1], "unknown", ready, ids[1]])) == 1
        assert sorted(await case.leased_bodies()) == [b"2", b"ready"]
        assert sorted(await case.browse(State.FAILED)) == [b"1", b"3"]
        assert await case.backend.requeue(case.queue, Selection(ids=[])) == 0

    @rule("requeue")
    async def test_of_concurrent_requeues_one_requeues_a_message(self, case: Case) -> None:
        ids = await case.fail(*[b"%d" % number for number in range(10)])
        other = await case.open()
        chosen = (Selection(state=State.FAILED), Selection(ids=ids))
        counts = await asyncio.gather(*(by.requeue(case.queue, one) for one in chosen for by in (case.backend, other)))
        assert sum(counts) == 10
        assert await case.counts() == (10, 0, 0, 0)

    @rule("remove")
    async def test_remove_deletes_ready_messages(self, case: Case) -> None:
        ids = await case.publish(b"1", b"2", b"3")
        assert await case.backend.remove(case.queue, Selection(ids=[ids[1], "unknown", ids[1]])) == 1
        assert await case.find(ids[1]) is None
        assert await case.leased_bodies() == [b"1", b"3"]
        assert await case.backend.remove(case.queue, Selection(ids=[ids[1]])) == 0

    @rule("remove")
    async def test_remove_deletes_what_another_worker_has_seen_and_not_leased(self, case: Case) -> None:
        ids = await case.publish(b"1", b"2", b"3")
        other = await case.open()
        first = await wait_until(lambda: case.lease(by=other))
        rest = [message_id for message_id in ids if message_id != first[0].message.id]
        assert await case.backend.remove(case.queue, Selection(ids=rest)) == 2
        assert await case.lease(10, by=other) == []

    @rule("remove_leased")
    async def test_remove_deletes_in_every_state(self, case: Case) -> None:
        ids = await one_of_each(case)
        assert await case.backend.remove(case.queue, Selection(ids=list(ids.values()))) == 4
        assert await case.counts() == (0, 0, 0, 0)
        assert [await case.find(message_id) for message_id in ids.values()] == [None] * 4

    @rule("remove_leased")
    async def test_the_holder_of_a_removed_message_is_refused(self, case: Case) -> None:
        ids = await case.publish(*[b"x"] * 4)
        leases = await case.lease(4)
        assert await case.backend.remove(case.queue, Selection(ids=ids)) == 4
        if "extend" not in case.backend.deviations:
            assert case.backend.extend(leases, case.long) == leases
        for lease, action in zip(
            leases,
            (SettleAction.RELEASE, SettleAction.FAIL_TMP, SettleAction.FAIL_PERM, SettleAction.RELEASE),
            strict=True,
        ):
            assert not await case.settle(lease, action, error="stale")
        assert await case.counts() == (0, 0, 0, 0)

    @rule("remove_by_state")
    @pytest.mark.parametrize("state", [State.READY, State.LEASED, State.DELAYED, State.FAILED])
    async def test_remove_of_one_state_leaves_the_others(self, case: Case, state: State) -> None:
        ids = await one_of_each(case)
        assert await case.backend.remove(case.queue, Selection(state=state)) == 1
        left = {kept for kept, message_id in ids.items() if await case.find(message_id) is not None}
        assert left == set(ids) - {state}
        assert await case.backend.remove(case.queue, Selection(state=state)) == 0

    @rule("remove_by_state")
    async def test_remove_of_what_is_done_touches_nothing_else(self, case: Case) -> None:
        await case.publish(b"1", b"2")
        await case.settle(await case.lease_one(), SettleAction.ACK)
        await case.backend.remove(case.queue, Selection(state=State.DONE))
        assert await case.leased_bodies() == [b"2"]

    async def test_an_empty_list_of_ids_selects_nothing(self, case: Case) -> None:
        await case.publish(b"x")
        assert await case.backend.remove(case.queue, Selection(ids=[])) == 0
        assert await case.leased_bodies() == [b"x"]

    @rule("requeue")
    @pytest.mark.parametrize("state", [State.READY, State.LEASED, State.DELAYED, State.DONE])
    async def test_only_failed_messages_can_be_requeued(self, case: Case, state: State) -> None:
        await one_of_each(case)
        before = await case.counts()
        found = FinishedMessage(id="x", state=state, finished_at=1.0, location="x")
        for selection in (Selection(state=state), Selection(unchanged=[found])):
            with pytest.raises(UsageError, match="failed"):
                await case.backend.requeue(case.queue, selection)
        assert await case.counts() == before

    @rule("pause")
    async def test_a_paused_queue_gives_nothing_to_any_worker_until_it_is_resumed(self, case: Case) -> None:
        other = await case.open()
        await case.publish(b"1", b"2")
        for _ in range(2):
            await case.backend.pause(case.queue)
        assert (await case.stats()).paused is True
        assert await case.lease(10) == []
        assert await case.lease(10, by=other) == []
        await case.publish(b"3")
        for _ in range(2):
            await other.resume(case.queue)
        assert (await case.stats()).paused is False
        assert await case.leased_bodies() == [b"1", b"2", b"3"]

    @rule("pause")
    async def test_a_pause_leaves_leases_as_they_are(self, case: Case) -> None:
        await case.publish(b"1", b"2")
        leases = await case.lease(2)
        await case.backend.pause(case.queue)
        assert case.backend.extend(leases, case.long) == [] or "extend" in case.backend.deviations
        assert await case.backend.settle(case.settlements(leases, SettleAction.ACK)) == []

    async def test_another_worker_sees_the_same_queue(self, case: Case) -> None:
        ids = await one_of_each(case)
        other = await case.open()
        stats = await other.stats(case.queue)
        assert (stats.ready, stats.leased, stats.delayed, stats.failed) == (1, 1, 1, 1)
        assert case.queue in await other.queues()
        for state, message_id in ids.items():
            (found,) = await other.find(case.queue, [message_id])
            assert found.state is state

    async def test_open_is_idempotent_and_other_methods_open_by_themselves(self, case: Case) -> None:
        await case.backend.open()
        await case.publish(b"x")
        closed = case.harness.make()
        assert len(await case.lease(by=closed)) == 1

    async def test_aclose_is_idempotent(self, case: Case) -> None:
        await case.publish(b"x")
        other = await case.open()
        await other.aclose()
        await other.aclose()
        await case.harness.make().aclose()
        assert await case.leased_bodies() == [b"x"]

    async def test_an_instance_works_again_after_it_was_closed(self, case: Case) -> None:
        other = await case.open()
        await case.publish(b"1", b"2")
        await case.settle(await case.lease_one(by=other), SettleAction.ACK, by=other)
        await other.aclose()
        await other.open()
        lease = await case.lease_one(by=other)
        assert await case.settle(lease, SettleAction.ACK, by=other)

    async def test_cancelled_looks_and_pauses_leave_a_working_backend(self, case: Case) -> None:
        await case.publish(b"x")
        backend = case.backend
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: backend.stats(case.queue),
            lambda: case.messages(State.READY),
            lambda: backend.find(case.queue, ["x"]),
            lambda: backend.create(case.queue),
            backend.queues,
            lambda: backend.reap(case.queue),
        ]
        for call in calls:
            for turns in range(6):
                running = asyncio.ensure_future(call())
                for _ in range(turns):
                    await asyncio.sleep(0)
                running.cancel()
                await asyncio.wait([running])
        assert await case.leased_bodies() == [b"x"]
