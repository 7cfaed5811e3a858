"""The notes of handlers that wait for other jobs: each belongs to one delivery of a queue that exists."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import structlog

from qworker import Tasks
from qworker.backend import Backend
from qworker.jobs.records import WAITS, AwaitedJob, get_cell, read_wait
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker.worker import WorkerOptions
from qworker.worker.delivery import Delivery
from qworker.worker.state import WorkerState
from qworker.worker.wait_notes import WaitNotes
from qworker_memory import MemoryBackend

ID = "parent"


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    backend = MemoryBackend("wait-notes", clock=FakeClock())
    await backend.publish("q", [Draft(body=b"", id=ID)])
    yield backend
    await backend.delete("q")
    await backend.aclose()


class Notes:
    """The notes of one worker, whose handler waits for a job."""

    def __init__(self, backend: Backend, job: str) -> None:
        self.clock = FakeClock()
        self.state = WorkerState(
            app=Tasks("memory://notes"),
            backend=backend,
            queues=("q",),
            options=WorkerOptions(),
            clock=self.clock,
            draw=lambda: 0.5,
            log=structlog.get_logger(),
        )
        self.notes = WaitNotes(self.state)
        self.job = job

    async def take(self, backend: Backend) -> None:
        (lease,) = await backend.lease("q", 1, 60.0)
        self.delivery = Delivery(lease, 0.0, 60.0, waits=1, waits_for=AwaitedJob("q", self.job))
        self.state.active.add(self.delivery)
        self.clock.advance(10.0)

    async def round(self) -> None:
        await self.notes.round()


async def note_of(backend: Backend) -> str | None:
    (reply,) = await backend.cells("q", [get_cell(WAITS, ID)])
    found = read_wait(reply.cell)
    return None if found is None else found.id


async def test_the_worker_of_an_earlier_delivery_leaves_the_note_of_a_later_one(backend: Backend) -> None:
    earlier, later = Notes(backend, "one"), Notes(backend, "two")
    await earlier.take(backend)
    await earlier.round()
    assert await note_of(backend) == "one"
    await backend.settle([Settlement(lease=earlier.delivery.lease, action=SettleAction.RELEASE)])
    await later.take(backend)
    await later.round()
    earlier.state.active.clear()
    await earlier.round()
    assert await note_of(backend) == "two"
    later.state.active.clear()
    await later.round()
    assert await note_of(backend) is None


async def test_a_note_does_not_create_a_queue_again_that_was_deleted(backend: Backend) -> None:
    notes = Notes(backend, "one")
    await notes.take(backend)
    await backend.delete("q")
    await notes.round()
    assert await backend.queues() == []
    await backend.create("q")
