"""The contract of `parts`, and of `requeue` and `remove` of messages that must be unchanged."""

from __future__ import annotations

import pytest

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.message import FinishedMessage, Selection, SettleAction, State, StoredMessage
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["PartingContract"]


async def read_all(case: Case, state: State, wanted: int = 3, by: Backend | None = None) -> list[StoredMessage]:
    """Return all messages of a state, part after part."""
    parts = await case.backend.parts(case.queue, state, wanted)
    return [stored for part in parts for stored in await case.messages(state, by, part=part)]


def as_found(stored: StoredMessage) -> FinishedMessage:
    """Return the record of a finished message for `Selection.unchanged`."""
    return FinishedMessage(
        id=stored.message.id, state=stored.state, finished_at=stored.finished_at, location=stored.location
    )


def changed(one: FinishedMessage, ready: str) -> list[FinishedMessage]:
    """Return records that differ from the store: a ready message, an unknown one, another state, and another time."""
    return [
        FinishedMessage(id=ready, state=State.FAILED, finished_at=one.finished_at, location=ready),
        FinishedMessage(id="unknown", state=State.FAILED, finished_at=1.0, location="unknown"),
        FinishedMessage(id=one.id, state=State.DONE, finished_at=one.finished_at, location=one.location),
        FinishedMessage(id=one.id, state=State.FAILED, finished_at=1.0, location=one.location),
    ]


async def in_parts(case: Case, state: State, bodies: list[bytes]) -> None:
    """Prove that the parts of a state together have each message once, for any reader."""
    other = await case.open()
    for by in (case.backend, other):
        found = await read_all(case, state, by=by)
        assert sorted(stored.message.body for stored in found) == sorted(bodies)
        assert {stored.state for stored in found} <= {state}
        assert {stored.message.queue for stored in found} <= {case.queue}


class PartingContract(Contract):
    """The tests of `parts`, of `browse` with a part, and of `Selection.unchanged`."""

    async def test_each_ready_message_is_in_one_part(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(50)]
        await case.publish(*bodies)
        await in_parts(case, State.READY, bodies)
        assert sorted(await case.leased_bodies()) == sorted(bodies)

    @rule("delay")
    async def test_each_delayed_message_is_in_one_part(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(10)]
        await case.publish(*bodies, delay=case.long)
        await case.publish(b"ready")
        await in_parts(case, State.DELAYED, bodies)
        await in_parts(case, State.READY, [b"ready"])

    @rule("browse_leased", otherwise=None)
    async def test_each_leased_message_is_in_one_part(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(10)]
        await case.publish(*bodies)
        assert len(await case.lease(10)) == 10
        await in_parts(case, State.LEASED, bodies)
        await in_parts(case, State.READY, [])

    @rule("fail_kept", otherwise=None)
    async def test_each_failed_message_is_in_one_part_with_its_reason(self, case: Case) -> None:
        bodies = [b"%d" % number for number in range(10)]
        await case.fail(*bodies, error="broken")
        await in_parts(case, State.FAILED, bodies)
        found = await read_all(case, State.FAILED)
        assert all(stored.finished_at for stored in found)
        if "errors_kept" not in case.backend.deviations:
            assert {stored.error for stored in found} == {"broken"}

    @rule("remove")
    async def test_what_is_gone_before_its_part_is_read_is_left_out(self, case: Case) -> None:
        ids = await case.publish(b"1", b"2", b"3")
        parts = await case.backend.parts(case.queue, State.READY, 2)
        assert await case.backend.remove(case.queue, Selection(ids=[ids[1]])) == 1
        found = [body for part in parts for body in await case.browse(State.READY, part=part)]
        assert sorted(found) == [b"1", b"3"]

    async def test_a_part_gives_no_more_than_its_limit(self, case: Case) -> None:
        await case.publish(*[b"%d" % number for number in range(30)])
        parts = await case.backend.parts(case.queue, State.READY, 2)
        whole = {part: await case.browse(State.READY, part=part) for part in parts}
        assert sum(map(len, whole.values())) == 30
        for part, bodies in whole.items():
            found = await case.browse(State.READY, part=part, limit=4)
            assert len(found) == min(4, len(bodies))
            assert set(found) <= set(bodies)

    async def test_an_absent_queue_has_no_parts(self, case: Case) -> None:
        with pytest.raises(QueueNotFound):
            await case.backend.parts(case.queue, State.READY, 2)
        assert case.queue not in await case.backend.queues()

    @rule("requeue")
    async def test_what_is_unchanged_is_removed_and_nothing_else(self, case: Case) -> None:
        ids = await case.fail(b"1", b"2", b"3")
        (ready,) = await case.publish(b"ready")
        found = [as_found(stored) for stored in await read_all(case, State.FAILED)]
        assert await case.backend.requeue(case.queue, Selection(ids=[ids[1]])) == 1
        others = Selection(unchanged=changed(found[0], ready))
        assert await case.backend.remove(case.queue, others) == 0
        assert await case.backend.remove(case.queue, Selection(unchanged=[*found, found[0]])) == 2
        assert await case.backend.remove(case.queue, Selection(unchanged=found)) == 0
        assert await case.counts() == (2, 0, 0, 0)
        assert sorted(await case.leased_bodies()) == [b"2", b"ready"]

    @rule("requeue")
    async def test_what_is_unchanged_is_requeued_and_nothing_else(self, case: Case) -> None:
        ids = await case.fail(b"1", b"2", b"3")
        (ready,) = await case.publish(b"ready")
        found = [as_found(stored) for stored in await read_all(case, State.FAILED)]
        assert await case.backend.requeue(case.queue, Selection(ids=[ids[1]])) == 1
        others = [one for one in changed(found[0], ready) if one.state is State.FAILED]
        assert await case.backend.requeue(case.queue, Selection(unchanged=others)) == 0
        assert await case.counts() == (2, 0, 0, 2)
        assert await case.backend.requeue(case.queue, Selection(unchanged=[*found, found[0]])) == 2
        assert await case.backend.requeue(case.queue, Selection(unchanged=found)) == 0
        leases = await case.lease(10)
        assert sorted(lease.message.body for lease in leases) == [b"1", b"2", b"3", b"ready"]
        assert {lease.message.tries for lease in leases} == {0}

    @rule("requeue")
    async def test_what_has_failed_again_is_changed(self, case: Case) -> None:
        await case.fail(b"x")
        unchanged = Selection(unchanged=[as_found(stored) for stored in await read_all(case, State.FAILED)])
        await case.harness.advance(case.tick / 10)
        assert await case.backend.requeue(case.queue, Selection(state=State.FAILED)) == 1
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="again")
        assert await case.backend.remove(case.queue, unchanged) == 0
        assert await case.backend.requeue(case.queue, unchanged) == 0
        assert await case.browse(State.FAILED) == [b"x"]

    @rule("requeue")
    async def test_what_is_in_other_hands_is_changed(self, case: Case) -> None:
        await case.fail(b"x")
        unchanged = Selection(unchanged=[as_found(stored) for stored in await read_all(case, State.FAILED)])
        assert await case.backend.requeue(case.queue, Selection(state=State.FAILED)) == 1
        lease = await case.lease_one()
        assert await case.backend.remove(case.queue, unchanged) == 0
        assert await case.backend.requeue(case.queue, unchanged) == 0
        assert await case.settle(lease, SettleAction.ACK)
        assert await case.counts() == (0, 0, 0, 0)
