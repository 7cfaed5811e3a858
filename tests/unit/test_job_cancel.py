"""Cancel: the four steps, a canceller that dies after any of them, and the handlers that are stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from qworker import Context, FailedCall, Tasks
from qworker.cell import Cell, CellOp
from qworker.errors import BackendUnavailable, JobCancelled, MessageTooLarge, UsageError
from qworker.jobs.cancel import finish_all_cancels, finish_cancels, list_cancels
from qworker.jobs.source import JobSource
from qworker.message import Selection
from qworker.testing import FakeClock, wait_until
from qworker.worker.cancel_repair import CancelRepair
from tests.support.waiting import PATIENCE, block_for, work_for
from tests.support.worker_state import make_state
from tests.unit.test_jobs import redis, run_all, tasks, url, working

__all__ = ["redis", "tasks", "url"]


class Died(Exception):
    """The canceller was killed."""


async def cells(tasks: Tasks, queue: str = "default") -> list[Cell]:
    return [cell async for page in list_cancels(await tasks.backend(), queue) for cell in page]


async def test_a_waiting_job_is_cancelled_and_everyone_hears_of_it(tasks):
    @tasks.task(result=60)
    async def work() -> int:
        return 1

    ready, later = await work.enqueue(), await work.using(delay=60).enqueue()
    assert [await job.cancel(by="deploy") for job in (ready, later)] == ["waiting", "waiting"]
    for job in (ready, later):
        with pytest.raises(JobCancelled):
            await job.result(timeout=5)
        status = await job.status()
        assert (status.state, status.code) == ("failed", "cancelled")
        assert status.error == "cancelled by deploy"
        assert await job.cancel() == "finished"
    await run_all(tasks)
    assert (await ready.status()).state == "failed"
    assert await cells(tasks) == []


async def test_a_job_that_has_ended_is_not_changed(tasks):
    @tasks.task(result=60)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    await run_all(tasks)
    assert await job.cancel() == "finished"
    assert await work.job("never").cancel() == "finished"
    assert await tasks.job("never", "no-such-queue").cancel() == "finished"
    assert await job.result() == 1
    assert await cells(tasks) == []


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_running_handler_is_stopped_within_a_moment(tasks, kind):
    started: list[str] = []
    stopped: list[float] = []

    @tasks.task(result=60)
    async def wait() -> None:
        started.append("")
        try:
            await work_for(3600)
        except asyncio.CancelledError:
            stopped.append(time.monotonic())
            raise

    @tasks.task(result=60)
    def wait_in_thread(context: Context) -> None:
        started.append("")
        until = time.monotonic() + 3600
        while not context.cancelled() and time.monotonic() < until:
            block_for(0.01)
        stopped.append(time.monotonic())

    async with working(tasks, concurrency=2):
        # The machine may stand still for seconds, but not each time.
        for number in range(1, 6):
            job = await (wait if kind == "async" else wait_in_thread).enqueue()
            await wait_until(lambda number=number: len(started) == number)
            began = time.monotonic()
            assert await job.cancel() == "running"
            with pytest.raises(JobCancelled):
                await job.result(timeout=PATIENCE)
            await wait_until(lambda number=number: len(stopped) == number, timeout=PATIENCE)
            assert (await job.status()).code == "cancelled"
            # 1.5 s on a machine that is not busy.
            if (took := stopped[-1] - began) < 4:
                break
    assert took < 4


async def test_a_late_result_of_the_cancelled_delivery_does_not_count_and_a_run_after_a_requeue_does(tasks):
    @tasks.task(result=60)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    backend = await tasks.backend()
    (lease,) = await backend.lease("default", 1, 30)
    assert await job.cancel() == "running"
    late = Cell("results", job.id, b'{"state":"done","value":7}', rank=2 * lease.token, ttl=60)
    assert not (await backend.cells("default", [CellOp("put", late)]))[0].done
    with pytest.raises(JobCancelled):
        await job.result()
    assert await backend.requeue("default", Selection(ids=[job.id])) == 1
    await run_all(tasks)
    assert await job.result() == 1


async def test_many_jobs_are_cancelled_at_once(tasks):
    @tasks.task
    async def work(number: int) -> None: ...

    @tasks.task
    async def other() -> None: ...

    jobs = await tasks.enqueue_many(work.call(number) for number in range(150))
    kept = await other.enqueue()
    counts = await tasks.cancel(jobs[:20])
    assert (counts.waiting, counts.running, counts.finished) == (20, 0, 0)
    counts = await tasks.cancel(task="work", queue="default")
    assert counts.waiting == 130
    assert (await kept.status()).state == "ready"
    assert (await tasks.cancel(jobs)).finished == 150
    with pytest.raises(UsageError, match="takes jobs, or one of"):
        await tasks.cancel()
    with pytest.raises(UsageError, match="state must be ready, delayed or leased"):
        await tasks.cancel(state="failed")


async def test_a_cancel_is_reported_once(tasks):
    reported: list[FailedCall] = []

    @tasks.task
    async def alert(failed: FailedCall) -> None:
        reported.append(failed)

    @tasks.task(on_failure=alert)
    async def pay(order: int) -> None: ...

    job = await pay.enqueue(7)
    assert await job.cancel(by="deploy") == "waiting"
    assert await job.cancel() == "finished"
    await run_all(tasks)
    assert [(one.id, one.args, one.code) for one in reported] == [(job.id, [7], "cancelled")]


@pytest.mark.parametrize("calls", range(1, 8))
async def test_a_canceller_that_dies_at_any_step_is_followed_by_a_worker(tasks, monkeypatch, calls):
    """After the cell is there the job is cancelled, whatever happens to the canceller. Before, nothing has happened."""
    reported: list[str] = []

    @tasks.task
    async def alert(failed: FailedCall) -> None:
        reported.append(failed.code)

    @tasks.task(result=60, on_failure=alert)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    backend = await tasks.backend()
    left = [calls]

    def dying(call: Any) -> Any:
        async def wrapped(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Died
            return await call(*args, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("cells", "find", "cancel", "publish"):
            patch.setattr(backend, name, dying(getattr(backend, name)))
        try:
            await job.cancel()
        except Died:
            pass
    begun = calls > 1
    source = JobSource(tasks, None)
    for _ in range(2):
        await finish_cancels(backend, source, "default", await cells(tasks))
    assert await cells(tasks) == []
    await run_all(tasks)
    if begun:
        with pytest.raises(JobCancelled):
            await job.result()
        assert reported == ["cancelled"]
    else:
        assert await job.result() == 1


async def test_a_worker_repairs_only_what_has_not_changed_for_a_while(tasks):
    @tasks.task(queue="q")
    async def work() -> None: ...

    job = await work.enqueue()
    backend = await tasks.backend()
    await backend.cells("q", [CellOp("put", Cell("cancels", job.id, b'{"by":"deploy"}'))])
    clock = FakeClock()
    state = make_state(backend, clock=clock)
    state.app = tasks
    repair = CancelRepair(state)
    for seconds in (0, 3):
        clock.advance(seconds)
        await repair.round()
        assert (await job.status()).state == "ready"
    clock.advance(3)
    await repair.round()
    assert (await job.status()).code == "cancelled"
    assert await cells(tasks, "q") == []


async def test_a_canceller_without_the_task_leaves_the_rest_to_a_worker_that_knows_it(tasks, url):
    reported: list[str] = []

    @tasks.task
    async def alert(failed: FailedCall) -> None:
        reported.append(failed.code)

    @tasks.task(result=60, on_failure=alert)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    other = Tasks(url)
    assert await other.job(job.id).cancel() == "waiting"
    # Waiters need not wait for that worker.
    with pytest.raises(JobCancelled):
        await job.result(timeout=5)
    assert len(await cells(tasks)) == 1
    # The rest does not cancel it a second time.
    backend = await tasks.backend()
    await finish_all_cancels(backend, JobSource(other, None), "default")
    assert await backend.requeue("default", Selection(ids=[job.id])) == 1
    await finish_all_cancels(backend, JobSource(tasks, None), "default")
    assert (await job.status()).state == "ready"
    await run_all(tasks)
    assert await job.result() == 1
    assert reported == ["cancelled"]
    assert await cells(tasks) == []
    await other.aclose()


@pytest.mark.parametrize("problem", ["too large", "a hook"])
async def test_a_report_that_can_never_be_stored_does_not_keep_a_cancel_from_its_end(tasks, monkeypatch, problem):
    @tasks.task(queue="alerts")
    async def alert(failed: FailedCall) -> None: ...

    @tasks.task(result=60, on_failure=alert)
    async def work() -> int:
        return 1

    job = await work.enqueue()
    backend = await tasks.backend()
    publish = backend.publish

    async def refused(queue: str, drafts: Any) -> Any:
        if queue == "alerts":
            raise MessageTooLarge("the body is larger than max_body")
        return await publish(queue, drafts)

    if problem == "too large":
        monkeypatch.setattr(backend, "publish", refused)
    else:
        tasks.add_header_source(lambda: 1 / 0)
    assert await job.cancel() == "waiting"
    assert await cells(tasks) == []
    with pytest.raises(JobCancelled):
        await job.result(timeout=5)


async def test_a_queue_that_cannot_be_read_does_not_keep_the_others_from_their_repair(tasks, monkeypatch):
    @tasks.task(result=60)
    async def work() -> int:
        return 1

    await work.enqueue()
    backend = await tasks.backend()
    repair = CancelRepair(make_state(backend))
    repair._queues.extend(["default", "other"])
    for queue in ("q", "default", "other"):
        await backend.cells(queue, [CellOp("put", Cell("cancels", "x"))])
    visited: list[str] = []

    async def broken(queue: str, ops: Sequence[CellOp]) -> Any:
        visited.append(queue)
        raise BackendUnavailable("it does not answer")

    monkeypatch.setattr(backend, "cells", broken)
    with pytest.raises(BackendUnavailable):
        await repair.round()
    assert sorted(visited) == ["default", "other", "q"]


@pytest.mark.parametrize("scheme", ["fsq", "vsqs"])
async def test_a_store_that_cannot_cancel_removes_a_waiting_message(scheme, tmp_path):
    tasks = Tasks(f"{scheme}://{tmp_path}/spool")

    @tasks.task
    async def work() -> None: ...

    job = await work.enqueue()
    assert await job.cancel() == "waiting"
    assert await job.cancel() == "finished"
    assert (await job.status()).state == "gone"
    await tasks.aclose()


async def test_no_cell_exists_where_nothing_was_cancelled_or_kept(tasks, monkeypatch):
    backend = await tasks.backend()
    calls: list[Sequence[CellOp]] = []
    plain = backend.cells

    async def counted(queue: str, ops: Sequence[CellOp]) -> Any:
        # The schedules of a queue are looked for.
        if any(op.cell.group != "schedules" for op in ops):
            calls.append(ops)
        return await plain(queue, ops)

    monkeypatch.setattr(backend, "cells", counted)

    @tasks.task
    async def work(context: Context) -> None: ...

    for _ in range(20):
        await work.enqueue()
    await run_all(tasks)
    assert calls == []
