"""The job handle: results, status and progress, on every store that has cells."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qworker import Context, Fail, Job, Progress, Tasks
from qworker.cell import Cell, CellOp
from qworker.errors import (
    InvalidName,
    JobFailed,
    JobGone,
    NotSupported,
    ResultNotEncodable,
    ResultTooBig,
    UsageError,
)
from qworker.message import Draft, Selection, SettleAction, Settlement
from qworker.testing.wait_until import wait_until
from qworker.tools.explain import explain
from qworker.worker import Worker, WorkerOptions, wait_notes
from tests.support.apps import close_app
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import let_pass, work_for

_names = itertools.count()
_dbs = itertools.count()


class Size(msgspec.Struct):
    width: int
    height: int = 0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), databases="500") as server:
        yield server


@pytest.fixture(params=["memory", "file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://jobs-{next(_names)}"
    if request.param == "file":
        return f"file://{tmp_path}/spool?sync=off"
    server: RedisServer = request.getfixturevalue("redis")
    return f"redis://127.0.0.1:{server.port}/{next(_dbs)}"


@pytest.fixture
async def tasks(url: str) -> AsyncIterator[Tasks]:
    app = Tasks(url)
    yield app
    await close_app(app)


@asynccontextmanager
async def working(tasks: Tasks, **options: Any) -> AsyncIterator[Worker]:
    worker = Worker(tasks, WorkerOptions(**options), draw=lambda: 0.0)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.cancel_handlers()
        async with asyncio.timeout(40):
            await asyncio.wait([running])
    assert running.exception() is None


async def run_all(tasks: Tasks) -> None:
    async with asyncio.timeout(40):
        assert await Worker(tasks, WorkerOptions(burst=True)).run()


# -- results -----------------------------------------------------------------------------------------------------------


def register(tasks: Tasks, kind: str) -> Any:
    if kind == "async":

        @tasks.task(result=60, name="resize")
        async def resize(width: int) -> Size:
            return Size(width)

        return resize

    @tasks.task(result=timedelta(minutes=1), name="resize")
    def resize_in_thread(width: int) -> Size:
        return Size(width)

    return resize_in_thread


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_job_gives_what_its_handler_returned_in_the_type_of_its_annotation(tasks, kind):
    resize = register(tasks, kind)
    async with working(tasks):
        job = await resize.enqueue(3)
        assert await job.result(timeout=20) == Size(3)
        # Again, and from the id alone: with the task, and without.
        assert await job.result(timeout=20) == Size(3)
        assert await resize.job(job.id).result(timeout=20) == Size(3)
        assert await tasks.job(job.id, "default", Size).result(timeout=20) == Size(3)
        assert await tasks.job(job.id).result(timeout=20) == {"width": 3, "height": 0}
        (many,) = await tasks.enqueue_many([resize.call(4)])
        assert await many.result(timeout=20) == Size(4)


async def test_a_given_id_of_any_text_names_the_job(tasks):
    resize = register(tasks, "async")
    job = await resize.using(id="a file/with spaces.png").enqueue(3)
    await run_all(tasks)
    assert await resize.job("a file/with spaces.png").result() == Size(3)
    assert resize.job("a file/with spaces.png") == resize.job(job.id) == job
    with pytest.raises(InvalidName):
        resize.job("")


async def test_the_last_result_counts_if_a_message_ran_twice(tasks):
    resize = register(tasks, "async")
    job = await resize.enqueue(1)
    backend = await tasks.backend()
    (lease,) = await backend.lease("default", 1, 30)
    late = 2 * lease.token
    await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE)])
    await run_all(tasks)
    stale = Cell("results", job.id, b'{"state":"failed","text":"late","code":"error"}', rank=late, ttl=60)
    (reply,) = await backend.cells("default", [CellOp("put", stale)])
    assert not reply.done
    assert await job.result() == Size(1)


async def test_explain_says_until_when_a_result_is_kept(tasks):
    @tasks.task(result=3600)
    async def keep() -> int:
        return 1

    job = await keep.enqueue()
    before = time.time()
    await run_all(tasks)
    found = await explain(await tasks.backend(), job.queue, job.id)
    (text,) = [reason.text for reason in found.reasons if reason.code == "result"]
    until = datetime.strptime(text.removeprefix("its result is kept until "), "%Y-%m-%d %H:%M:%SZ").replace(tzinfo=UTC)
    assert before + 3599 <= until.timestamp() <= time.time() + 3600


async def test_a_failed_job_raises_its_error_with_its_traceback(tasks):
    @tasks.task(result=60, max_tries=1)
    async def broken() -> None:
        raise ValueError("no such page")

    @tasks.task(result=60)
    def refused() -> None:
        raise Fail("never")

    jobs = [await broken.enqueue(), await refused.enqueue()]
    await run_all(tasks)
    with pytest.raises(JobFailed, match="ValueError: no such page") as caught:
        await jobs[0].result()
    assert (caught.value.error_type, caught.value.code) == ("ValueError", "error")
    assert "Traceback" in caught.value.text
    with pytest.raises(JobFailed, match="never"):
        await jobs[1].result()


async def test_a_failure_says_why_by_its_code(tasks):
    @tasks.task(result=60, max_tries=1, timeout=0.05)
    async def slow() -> None:
        await work_for(60)

    @tasks.task(result=60)
    async def strict(number: int) -> None: ...

    jobs = [await slow.enqueue(), await strict.using(id="wrong", validate=False).enqueue("x")]
    await run_all(tasks)
    codes = []
    for job in jobs:
        with pytest.raises(JobFailed) as caught:
            await job.result()
        codes.append((caught.value.code, (await job.status()).code))
    assert codes == [("timeout", "timeout"), ("arguments", "arguments")]


async def test_a_failed_job_whose_result_has_expired_raises_what_its_message_keeps(tasks):
    @tasks.task(result=60, max_tries=1)
    async def broken() -> None:
        raise ValueError("no such page")

    job = await broken.enqueue()
    await run_all(tasks)
    await (await tasks.backend()).cells("default", [CellOp("delete", Cell("results", job.id))])
    with pytest.raises(JobFailed, match="ValueError: no such page"):
        await job.result()


async def test_a_retry_is_no_end(tasks):
    runs = []

    @tasks.task(result=60)
    async def flaky() -> int:
        runs.append(1)
        if len(runs) < 2:
            raise ValueError("once")
        return len(runs)

    job = await flaky.enqueue()
    async with working(tasks):
        assert await job.result(timeout=20) == 2


async def test_a_value_that_cannot_be_kept_is_an_ack_that_waiters_hear_of(tasks):
    @tasks.task(result=60)
    async def big() -> str:
        return "x" * 65_536

    @tasks.task(result=60)
    async def odd() -> Any:
        return object()

    @tasks.task(result=60)
    async def largest() -> str:
        return "x" * 65_000

    jobs = [await big.enqueue(), await odd.enqueue(), await largest.enqueue()]
    await run_all(tasks)
    with pytest.raises(ResultTooBig):
        await jobs[0].result()
    with pytest.raises(ResultNotEncodable, match="object"):
        await jobs[1].result()
    assert await jobs[2].result() == "x" * 65_000
    assert [(await job.status()).state for job in jobs] == ["done"] * 3


async def test_a_job_that_is_stored_nowhere_is_gone_at_once(tasks):
    resize = register(tasks, "async")
    with pytest.raises(JobGone):
        await resize.job("never-enqueued").result()
    job = await resize.enqueue(1)
    await (await tasks.backend()).remove("default", Selection(ids=[job.id]))
    with pytest.raises(JobGone):
        await job.result()


async def test_a_wait_that_is_over_changes_nothing(tasks):
    resize = register(tasks, "async")
    job = await resize.enqueue(1)
    for timeout in (0, 0.01, timedelta(seconds=0.01)):
        with pytest.raises(TimeoutError, match=job.id):
            await job.result(timeout=timeout)
    assert (await job.status()).state == "ready"
    await run_all(tasks)
    assert await job.result(timeout=0) == Size(1)


async def test_a_task_that_keeps_no_result_says_so_instead_of_waiting(tasks):
    @tasks.task
    async def plain() -> int:
        return 1

    problem = r"task 'plain' keeps no result: add result=3600 to the task or to using\(\)"
    job = await plain.enqueue()
    for asked in (job, plain.job(job.id), tasks.job(job.id)):
        with pytest.raises(UsageError, match=problem):
            await asked.result(timeout=20)
    backend = await tasks.backend()
    await run_all(tasks)
    assert (await backend.cells("default", [CellOp("list", Cell("", ""))]))[0].cells == []
    kept = await plain.using(result=60).enqueue()
    await run_all(tasks)
    assert await plain.job(kept.id).result() == 1


async def test_using_switches_the_result_off(tasks):
    resize = register(tasks, "async")
    job = await resize.using(result=None).enqueue(1)
    with pytest.raises(UsageError, match="keeps no result"):
        await job.result()
    with pytest.raises(UsageError, match="keeps no result"):
        await resize.job(job.id).result()
    await run_all(tasks)
    assert (await job.status()).state == "gone"


async def test_a_waiter_hears_of_the_end_within_a_moment(tasks):
    resize = register(tasks, "async")
    async with working(tasks):
        loop = asyncio.get_running_loop()
        await (await resize.enqueue(0)).result(timeout=20)
        took = []
        for number in range(5):
            began = loop.time()
            await (await resize.enqueue(number)).result(timeout=20)
            took.append(loop.time() - began)
    # Far less than the look each second.
    assert min(took) < 0.5


@pytest.mark.parametrize("wrong", [0, -1, "1h", float("nan"), True])
def test_a_time_for_a_result_that_is_none_is_refused_at_registration(wrong):
    tasks = Tasks("memory://")
    with pytest.raises(UsageError, match="result must be"):
        tasks.task(result=wrong)(print_nothing)

    @tasks.task
    async def plain() -> int:
        return 1

    with pytest.raises(UsageError, match="result must be"):
        plain.using(result=wrong)


def print_nothing() -> None: ...


def test_a_result_that_no_json_can_become_is_refused_at_registration():
    tasks = Tasks("memory://")

    def opened(path: str) -> threading.Thread:
        return threading.Thread()

    with pytest.raises(UsageError, match=r"task 'opened': no JSON value can become threading\.Thread"):
        tasks.task(result=60)(opened)
    # Without a result it is fine: nobody decodes it.
    assert tasks.task(opened).name == "opened"


@pytest.mark.parametrize("scheme", ["fsq", "sq", "vsqs", "mq", "rfq"])
def test_a_store_without_cells_refuses_results_at_registration(scheme, tmp_path):
    place = f"{scheme}://localhost" if scheme == "rfq" else f"{scheme}://{tmp_path}/spool"
    problem = rf"task 'print_nothing' has result=, but {scheme}: does not support results"
    with pytest.raises(NotSupported, match=problem):
        Tasks(place).task(result=60)(print_nothing)
    with pytest.raises(NotSupported, match=problem):
        Tasks(place).task(print_nothing).using(result=60)
    late = Tasks("memory://")
    late.task(result=60)(print_nothing)
    with pytest.raises(NotSupported, match=problem):
        late.url = place


async def test_a_job_without_an_app_says_how_to_make_one():
    with pytest.raises(UsageError, match=r"tasks\.job\(id\)"):
        await Job[Any]("id", "default").result()


# -- the status --------------------------------------------------------------------------------------------------------


async def test_a_status_follows_a_job_through_its_life(tasks):
    started, go_on = asyncio.Event(), asyncio.Event()

    @tasks.task(result=60, max_tries=3)
    async def crop(size: Size, *, wide: bool = False) -> str:
        started.set()
        await go_on.wait()
        return "done"

    job = await crop.enqueue(Size(1), wide=True)
    status = await job.status()
    assert (status.id, status.queue, status.task, status.state) == (job.id, "default", "crop", "ready")
    assert (status.args, status.kwargs, status.max_tries, status.tries) == ((Size(1),), {"wide": True}, 3, 0)
    assert status.enqueued_at is not None
    assert status.enqueued_at.tzinfo is not None
    assert (await tasks.job(job.id).status()).args == (Size(1),)
    later = await crop.using(delay=60).enqueue(Size(2))
    waiting = await later.status()
    assert waiting.state == "delayed"
    assert waiting.due_at is not None
    assert 50 < (waiting.due_at - status.enqueued_at).total_seconds() < 70
    async with working(tasks):
        await started.wait()
        status = await job.status()
        assert status.state == "leased"
        assert status.holder
        go_on.set()
        assert await job.result(timeout=20) == "done"
    done = await job.status()
    assert done.state == "done"
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.started_at <= done.finished_at
    assert (await crop.job("never").status()).state == "gone"


async def test_the_arguments_of_an_unknown_task_are_json(tasks, url):
    resize = register(tasks, "async")
    job = await resize.enqueue(1)
    other = Tasks(url)
    status = await other.job(job.id).status()
    assert (status.task, status.args, status.max_tries) == ("resize", (1,), None)
    await other.aclose()


async def test_jobs_are_listed_by_state_task_and_queue(tasks):
    @tasks.task(max_tries=1)
    async def broken(number: int) -> None:
        raise ValueError(number)

    @tasks.task(queue="other", max_tries=1)
    async def elsewhere() -> None:
        raise ValueError

    for number in range(3):
        await broken.enqueue(number)
    await elsewhere.enqueue()
    await run_all(tasks)
    await broken.using(delay=60).enqueue(7)
    failed = [status async for status in tasks.jobs(state="failed")]
    assert sorted((status.queue, status.task, status.args, status.code) for status in failed) == [
        ("default", "broken", (0,), "error"),
        ("default", "broken", (1,), "error"),
        ("default", "broken", (2,), "error"),
        ("other", "elsewhere", (), "error"),
    ]
    assert len([status async for status in tasks.jobs(task=broken)]) == 4
    assert [status.args async for status in tasks.jobs(state="delayed", queue="default")] == [(7,)]
    assert [status async for status in tasks.jobs(queue="no-such-queue")] == []
    with pytest.raises(UsageError, match="state must be one of"):
        tasks.jobs(state="fail")  # type: ignore[arg-type]


# -- progress ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("result", [None, 60])
async def test_progress_is_followed_to_the_end_of_the_job(tasks, kind, result):
    seen = threading.Semaphore(0)

    def report(context: Context, number: int) -> None:
        context.progress(number, 3, text=f"page {number}", data={"bytes": 10 * number})

    @tasks.task(result=result)
    async def walk(context: Context) -> None:
        for number in range(1, 4):
            report(context, number)
            while not seen.acquire(blocking=False):
                await work_for(0.01)

    @tasks.task(result=result)
    def walk_in_thread(context: Context) -> None:
        for number in range(1, 4):
            report(context, number)
            seen.acquire(timeout=20)

    job: Job[None] = await (walk if kind == "async" else walk_in_thread).enqueue()
    found = []
    async with working(tasks):
        async for progress in job.progress():
            found.append(progress)
            if progress.done < 3:
                assert (await job.status()).progress == progress
            seen.release()
    assert found == [Progress(n, 3, f"page {n}", {"bytes": 10 * n}) for n in (1, 2, 3)]
    status = await job.status()
    assert (status.state, status.progress) == (("done", found[-1]) if result else ("gone", None))
    (reply,) = await (await tasks.backend()).cells("default", [CellOp("list", Cell("progress", ""))])
    assert len(reply.cells) == (1 if result else 0)


async def test_a_flood_of_progress_is_stored_at_most_twice_a_second(tasks, monkeypatch):
    puts = []

    @tasks.task(result=60)
    async def flood(context: Context) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 1.2:
            context.progress(len(puts))
            await asyncio.sleep(0)
        return loop.time() - began

    backend = await tasks.backend()
    cells = backend.cells

    async def counted(queue, ops):
        puts.extend(op for op in ops if op.do == "put" and op.cell.group == "progress")
        return await cells(queue, ops)

    monkeypatch.setattr(backend, "cells", counted)
    job = await flood.enqueue()
    async with working(tasks):
        took = await job.result(timeout=30)
    # One at once, one each half second, and the last one with the settlement.
    assert len(puts) <= took / 0.5 + 2


def test_progress_that_json_cannot_hold_is_refused_where_it_is_reported():
    tasks = Tasks("memory://")

    @tasks.task
    def work(context: Context) -> None:
        with pytest.raises(UsageError, match="cannot be encoded as JSON"):
            context.progress(1, data={"x": object()})
        with pytest.raises(UsageError, match="at most 32768 bytes"):
            context.progress(1, text="x" * 40_000)

    work()


# -- twins -------------------------------------------------------------------------------------------------------------


def test_every_twin_works_in_code_without_a_loop(tasks):
    @tasks.task(result=60)
    async def add(context: Context, a: int, b: int) -> int:
        context.progress(1, 1)
        return a + b

    job = add.enqueue_sync(1, 2)
    assert job.status_sync().state == "ready"
    with pytest.raises(TimeoutError):
        job.result_sync(timeout=0.01)
    assert [status.id for status in tasks.jobs_sync(state="ready")] == [job.id]
    asyncio.run(run_all(tasks))
    assert job.result_sync() == 3
    assert [progress.done for progress in job.progress_sync()] == [1]
    assert job.status_sync().state == "done"
    assert job.cancel_sync() == "finished"
    waiting = [add.enqueue_sync(n, n) for n in range(3)]
    counts = tasks.cancel_sync(waiting)
    assert (counts.waiting, counts.running, counts.finished) == (3, 0, 0)


def test_many_threads_wait_at_the_same_time(tasks):
    @tasks.task(result=60)
    async def add(a: int, b: int) -> int:
        return a + b

    jobs = [add.enqueue_sync(n, n) for n in range(20)]
    found: dict[int, int] = {}

    def wait(number: int) -> None:
        found[number] = jobs[number].result_sync(timeout=30)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    asyncio.run(run_all(tasks))
    for thread in threads:
        thread.join(30)
    assert found == {n: 2 * n for n in range(20)}


async def test_a_twin_in_a_running_loop_says_what_to_await(tasks):
    resize = register(tasks, "async")
    job = await resize.enqueue(1)
    for call, instead in [
        (job.result_sync, r"await job\.result\(\)"),
        (job.status_sync, r"await job\.status\(\)"),
        (job.cancel_sync, r"await job\.cancel\(\)"),
        (lambda: list(job.progress_sync()), r"async for progress in job\.progress\(\)"),
        (lambda: list(tasks.jobs_sync()), r"async for status in tasks\.jobs"),
    ]:
        with pytest.raises(UsageError, match=f"an event loop is running in this thread: use {instead}"):
            call()


# -- handlers that wait ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", ["async", "thread"])
@pytest.mark.parametrize("child", ["async", "thread"])
async def test_a_handler_that_waits_for_its_child_frees_its_consumer(tasks, parent, child):
    @tasks.task(result=60)
    async def add(n: int) -> int:
        return n + 1

    @tasks.task(result=60)
    def add_in_thread(n: int) -> int:
        return n + 1

    adder = add if child == "async" else add_in_thread

    @tasks.task(result=60)
    async def outer(n: int) -> int:
        return await (await adder.enqueue(n)).result(timeout=20)

    @tasks.task(result=60)
    def outer_in_thread(n: int) -> int:
        return adder.enqueue_sync(n).result_sync(timeout=20)

    async with working(tasks, concurrency=1) as worker:
        jobs = [await (outer if parent == "async" else outer_in_thread).enqueue(n) for n in range(4)]
        assert [await job.result(timeout=30) for job in jobs] == [1, 2, 3, 4]
        assert worker.counts.leased == 8


@pytest.fixture
def waits_are_noted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notes, "_LONG", 0.0)
    monkeypatch.setattr(wait_notes, "_INTERVAL", 0.01)


async def wait_reason(tasks: Tasks, job: Job[Any]) -> str:
    """Return what explain says of the wait of a job's handler, or ""."""
    found = await explain(await tasks.backend(), job.queue, job.id)
    return next((reason.text for reason in found.reasons if reason.code == "waits"), "")


@pytest.mark.usefixtures("waits_are_noted_at_once")
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_explain_names_the_job_that_a_handler_waits_for_until_the_wait_is_over(tasks, kind):
    goes_on, ends = asyncio.Event(), asyncio.Event()

    @tasks.task(result=60)
    async def child() -> None:
        await goes_on.wait()

    @tasks.task(result=60)
    async def parent() -> None:
        await (await child.using(id="child").enqueue()).result(timeout=20)
        await ends.wait()

    @tasks.task(result=60)
    def parent_in_thread() -> None:
        child.using(id="child").enqueue_sync().result_sync(timeout=20)
        asyncio.run_coroutine_threadsafe(ends.wait(), loop).result(timeout=20)

    loop = asyncio.get_running_loop()
    async with working(tasks, concurrency=1):
        job = await (parent if kind == "async" else parent_in_thread).enqueue()
        while not (text := await wait_reason(tasks, job)).startswith(
            "it waits for job child in queue default (running"
        ):
            assert not text or "(ready)" in text
            await let_pass(0.02)
        goes_on.set()
        while await wait_reason(tasks, job):
            await let_pass(0.02)
        ends.set()
        await job.result(timeout=20)
    assert await wait_reason(tasks, job) == ""


@pytest.mark.usefixtures("waits_are_noted_at_once")
async def test_a_handler_that_waits_for_nothing_notes_nothing(tasks, monkeypatch):
    noted = 0

    @tasks.task
    async def plain() -> None:
        nonlocal noted
        noted += len(await ask("waits"))

    async def ask(group: str) -> list[Cell]:
        (reply,) = await (await tasks.backend()).cells("default", [CellOp("list", Cell(group, ""))])
        return reply.cells

    async with working(tasks) as worker:
        for _ in range(20):
            await plain.enqueue()
        await wait_until(lambda: worker.counts.acked == 20)
    assert noted == 0
    assert (worker.features.counts(), await ask("waits")) == ([], [])


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_handler_that_follows_the_progress_of_its_child_frees_its_consumer(tasks, kind):
    @tasks.task(result=60)
    async def child(context: Context) -> None:
        context.progress(1, 1)

    @tasks.task(result=60)
    async def parent() -> list[float]:
        job = await child.enqueue()
        return [progress.done async for progress in job.progress()]

    @tasks.task(result=60)
    def parent_in_thread() -> list[float]:
        return [progress.done for progress in child.enqueue_sync().progress_sync()]

    async with working(tasks, concurrency=1):
        job = await (parent if kind == "async" else parent_in_thread).enqueue()
        assert await job.result(timeout=30) == [1]


async def test_a_wait_that_outlives_its_handler_takes_no_part_in_the_concurrency(tasks):
    running: list[int] = []
    most: list[int] = []
    left: list[asyncio.Task[Any]] = []

    @tasks.task(result=60)
    async def never() -> None: ...

    @tasks.task(result=60)
    async def leave() -> None:
        job = await never.using(delay=3600).enqueue()
        left.append(asyncio.create_task(job.result()))
        await work_for(0.05)

    @tasks.task
    async def count() -> None:
        running.append(1)
        most.append(len(running))
        await work_for(0.02)
        running.pop()

    async with working(tasks, concurrency=1):
        await (await leave.enqueue()).result(timeout=20)
        for _ in range(5):
            await count.enqueue()
        await wait_until(lambda: len(most) == 5 and not running)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
    assert set(most) == {1}


async def test_a_job_that_is_enqueued_again_waits_for_its_own_result(tasks):
    @tasks.task(result=60)
    async def double(number: int) -> int:
        return 2 * number

    first = await double.using(id="order").enqueue(1)
    await run_all(tasks)
    assert await first.result() == 2
    again = await double.using(id="order").enqueue(5)
    with pytest.raises(TimeoutError):
        await again.result(timeout=0.2)
    await run_all(tasks)
    assert await again.result(timeout=20) == 10


@pytest.mark.parametrize("kept", ["-1", "1e300"])
async def test_a_time_for_a_result_that_no_cell_can_have_stops_no_worker(tasks, kept):
    @tasks.task
    async def work() -> int:
        return 1

    body = b'{"task":"work","options":{"result":%s}}' % kept.encode()
    backend = await tasks.backend()
    (one,) = await backend.publish("default", [Draft(body=body)])
    assert await tasks.job(one).cancel() == "waiting"
    await backend.publish("default", [Draft(body=body)] * 3)
    worker = Worker(tasks, WorkerOptions(burst=True))
    async with asyncio.timeout(40):
        assert await worker.run()
    assert worker.counts.acked == 3


async def test_a_store_without_cells_acks_a_message_whose_result_is_wanted(tmp_path):
    app = Tasks(f"fsq://{tmp_path}/spool")

    @app.task
    async def work() -> int:
        return 1

    await (await app.backend()).publish("default", [Draft(body=b'{"task":"work","options":{"result":60}}')])
    worker = Worker(app, WorkerOptions(burst=True))
    async with asyncio.timeout(40):
        assert await worker.run()
    assert worker.counts.acked == 1
    await app.aclose()


async def test_a_family_of_waiting_handlers_is_as_deep_as_the_limit_allows(tasks):
    @tasks.task(result=60, max_tries=1)
    async def nested(depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + await (await nested.enqueue(depth - 1)).result(timeout=30)

    async with working(tasks, concurrency=1):
        assert await (await nested.enqueue(10)).result(timeout=30) == 10
        with pytest.raises(JobFailed, match="10 handlers of this worker wait for other jobs: use a workflow"):
            await (await nested.enqueue(11)).result(timeout=30)


async def test_a_blocking_wait_in_an_async_handler_is_refused(tasks):
    @tasks.task(result=60)
    async def child() -> None: ...

    @tasks.task(result=60, max_tries=1)
    async def outer() -> None:
        (await child.enqueue()).result_sync()

    async with working(tasks):
        with pytest.raises(JobFailed, match=r"an event loop is running in this thread: use await job\.result\(\)"):
            await (await outer.enqueue()).result(timeout=20)
