"""Reading in parts, from other processes as it were, and deleting what such a reader has found."""

from __future__ import annotations

import pytest

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.message import FinishedMessage, SettleAction, State, StoredMessage
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["PartingContract"]


async def read_all(case: Case, state: State, wanted: int = 3, by: Backend | None = None) -> list[StoredMessage]:
    """Everything in a state, part after part."""
    backend = by or case.backend
    parts = await case.backend.parts(case.queue, state, wanted)
    return [stored for part in parts async for page in backend.browse_part(case.queue, state, part) for stored in page]


def as_found(stored: StoredMessage) -> FinishedMessage:
    """What a reader keeps of a finished message."""
    return FinishedMessage(
        id=stored.message.id, state=stored.state, finished_at=stored.finished_at, location=stored.location
    )


async def in_parts(case: Case, state: State, bodies: list[bytes]) -> None:
    """The parts of a state together hold each message once, whoever reads them."""
    other = await case.open()
    for by in (case.backend, other):
        found = await read_all(case, state, by=by)
        assert sorted(stored.message.body for stored in found) == sorted(bodies)
        assert {stored.state for stored in found} <= {state}
        assert {stored.message.queue for stored in found} <= {case.queue}


class PartingContract(Contract):
    """`parts`, `browse_part` and `discard`."""

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
        assert await case.backend.remove(case.queue, [ids[1]]) == 1
        found = [
            stored.message.body
            for part in parts
            async for page in case.backend.browse_part(case.queue, State.READY, part)
            for stored in page
        ]
        assert sorted(found) == [b"1", b"3"]

    async def test_an_absent_queue_has_no_parts(self, case: Case) -> None:
        with pytest.raises(QueueNotFound):
            await case.backend.parts(case.queue, State.READY, 2)
        assert case.queue not in await case.backend.queues()

    @rule("requeue")
    async def test_discard_deletes_what_is_as_it_was_found_and_nothing_else(self, case: Case) -> None:
        ids = await case.fail(b"1", b"2", b"3")
        (ready,) = await case.publish(b"ready")
        found = [as_found(stored) for stored in await read_all(case, State.FAILED)]
        assert await case.backend.requeue(case.queue, [ids[1]]) == 1
        strangers = [
            FinishedMessage(id=ready, state=State.FAILED, finished_at=found[0].finished_at, location=ready),
            FinishedMessage(id="unknown", state=State.FAILED, finished_at=1.0, location="unknown"),
            FinishedMessage(
                id=found[0].id, state=State.DONE, finished_at=found[0].finished_at, location=found[0].location
            ),
        ]
        assert await case.backend.discard(case.queue, strangers) == 0
        assert await case.backend.discard(case.queue, found) == 2
        assert await case.backend.discard(case.queue, found) == 0
        assert await case.counts() == (2, 0, 0, 0)
        assert sorted(await case.leased_bodies()) == [b"2", b"ready"]

    @rule("requeue")
    async def test_discard_leaves_what_has_failed_again(self, case: Case) -> None:
        await case.fail(b"x")
        found = [as_found(stored) for stored in await read_all(case, State.FAILED)]
        await case.harness.advance(case.tick / 10)
        assert await case.backend.requeue(case.queue) == 1
        assert await case.settle(await case.lease_one(), SettleAction.FAIL_PERM, error="again")
        assert await case.backend.discard(case.queue, found) == 0
        assert await case.browse(State.FAILED) == [b"x"]
