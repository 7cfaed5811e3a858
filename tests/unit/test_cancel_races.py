"""Cancels that meet a requeue, a lease or an extension between their look and their step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from qworker import Tasks
from qworker.cell import Cell, CellOp
from qworker.failure_text import summary
from qworker.jobs.cancel import finish_all_cancels, finish_cancels, list_cancels
from qworker.jobs.source import JobSource
from qworker.message import Draft, Query, Selection, State, StoredMessage
from qworker.testing.wait_until import wait_until
from qworker_file.browse import FileBrowser
from tests.unit.test_jobs import redis, run_all, tasks, url, working

__all__ = ["redis", "tasks", "url"]


async def cells(tasks: Tasks) -> list[Cell]:
    return [cell async for page in list_cancels(await tasks.backend(), "default") for cell in page]


async def begin_cancel(tasks: Tasks, message_id: str) -> None:
    """Do what a canceller does that dies after the first step."""
    await (await tasks.backend()).cells("default", [CellOp("put", Cell("cancels", message_id, b'{"by":"dead"}'))])


async def test_a_message_that_a_user_requeues_during_a_repair_is_not_cancelled_again(tasks):
    @tasks.task(result=60)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    backend, source = await tasks.backend(), JobSource(tasks, None)
    await begin_cancel(tasks, job.id)
    page = await cells(tasks)
    await finish_all_cancels(backend, source, "default")
    assert (await job.status()).code == "cancelled"
    assert await backend.requeue("default", Selection(ids=[job.id])) == 1
    await finish_cancels(backend, source, "default", page)
    assert (await job.status()).state == "ready"
    await run_all(tasks)
    assert await job.result() == 1


async def test_a_repair_without_the_task_does_not_cancel_again_what_another_one_has_left(tasks, url):
    @tasks.task(result=60)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    backend, stranger = await tasks.backend(), JobSource(Tasks(url), None)
    await begin_cancel(tasks, job.id)
    page = await cells(tasks)
    await finish_cancels(backend, stranger, "default", page)
    assert await backend.requeue("default", Selection(ids=[job.id])) == 1
    await finish_cancels(backend, stranger, "default", page)
    assert (await job.status()).state == "ready"
    await finish_all_cancels(backend, JobSource(tasks, None), "default")
    assert await cells(tasks) == []


async def test_several_cancellers_of_one_job_share_its_cancel(tasks):
    @tasks.task
    async def work() -> None: ...

    job = await work.enqueue()
    await begin_cancel(tasks, job.id)
    answers = await asyncio.gather(*[job.cancel() for _ in range(5)])
    assert (answers.count("waiting"), answers.count("finished")) == (1, 4)
    assert summary((await job.status()).error) == "cancelled by dead"
    assert await cells(tasks) == []


async def test_a_job_whose_last_cancel_is_not_finished_can_be_cancelled_again(tasks, url):
    @tasks.task
    async def work() -> None: ...

    job, other = await work.enqueue(), Tasks(url)
    backend = await tasks.backend()
    assert await other.job(job.id).cancel() == "waiting"
    assert await backend.requeue("default", Selection(ids=[job.id])) == 1
    assert await job.cancel(by="me") == "waiting"
    assert summary((await job.status()).error) == "cancelled by me"
    assert await cells(tasks) == []


def after_first_listing(monkeypatch: Any, backend: Any, moves: Any) -> None:
    """Let messages move once, between a listing and the steps that follow it."""
    left = [moves]

    async def move() -> None:
        if left:
            await left.pop()()

    list_files = FileBrowser.list_files

    async def listed(self: FileBrowser, state: State) -> Any:
        found = await list_files(self, state)
        await move()
        return found

    monkeypatch.setattr(FileBrowser, "list_files", listed)
    browse = backend.browse

    async def browsed(queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        async for page in browse(queue, query):
            await move()
            yield page

    monkeypatch.setattr(backend, "browse", browsed)


async def test_a_message_that_begins_to_run_is_not_cancelled_as_a_ready_one(tasks, monkeypatch):
    backend = await tasks.backend()
    first, second = await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])

    async def lease() -> None:
        assert [one.message.id for one in await backend.lease("q", 1, 30)] == [first]

    if "memory" in backend.describe():
        # There the listing and the steps are one.
        await lease()
    else:
        after_first_listing(monkeypatch, backend, lease)
    assert [one.id for one in await backend.cancel("q", Selection(state=State.READY))] == [second]
    states = {one.message.id: one.state for one in await backend.find("q", [first, second])}
    assert states == {first: State.LEASED, second: State.FAILED}


async def test_a_lease_that_is_extended_meanwhile_is_cancelled_as_a_leased_one(tasks, monkeypatch):
    backend = await tasks.backend()
    ids = await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])
    leases = await backend.lease("q", 2, 30)

    async def extend() -> None:
        assert backend.extend(leases[:1], 60) == []

    after_first_listing(monkeypatch, backend, extend)
    found = await backend.cancel("q", Selection(state=State.LEASED))
    assert sorted(one.id for one in found) == sorted(ids)
    assert {one.state for one in found} == {State.LEASED}
    assert {one.state for one in await backend.find("q", ids)} == {State.FAILED}


async def test_a_cancel_that_is_named_while_the_worker_leases_from_another_queue_stops_the_handler_as_cancelled(
    tasks, monkeypatch
):
    """The loss is named once, before the worker has passed its message to a consumer."""
    ran: list[int] = []

    @tasks.task(queue="a")
    async def first(number: int) -> None:
        ran.append(number)

    @tasks.task(queue="b")
    async def second() -> None: ...

    job = await first.enqueue(1)
    backend = await tasks.backend()
    named = asyncio.Event()
    lease, reap = backend.lease, backend.reap

    async def leasing(queue: str, *args: Any) -> Any:
        leases = await lease(queue, *args)
        if leases and not named.is_set():
            await backend.cancel("a", Selection(ids=[job.id]))
            await named.wait()
        return leases

    async def reaping(queue: str) -> Any:
        result = await reap(queue)
        if result.lost:
            named.set()
        return result

    monkeypatch.setattr(backend, "lease", leasing)
    monkeypatch.setattr(backend, "reap", reaping)
    async with working(tasks) as worker:
        await wait_until(lambda: worker.counts.cancelled == 1)
        counts = worker.counts
    assert (counts.lost, ran) == (0, [])
