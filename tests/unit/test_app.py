"""Registering and enqueueing, from every kind of code."""

import asyncio
import inspect
import math
import pydoc
import re
import threading
from dataclasses import dataclass
from typing import Any

import pytest

import qworker
from qworker import Backoff, Call, Context, Draft, Fail, Job, Progress, State, Status, Tasks
from qworker.backend.listing import list_messages
from qworker.errors import DuplicateTask, InvalidArguments, InvalidName, InvalidURL, UnknownTask, UsageError
from qworker.message import Message, Query, QueueStats, StoredMessage
from qworker.task import TaskOptions
from qworker.testing import run_until_idle
from qworker.worker import Worker, WorkerCounts, WorkerOptions
from tests.support.servers import RedisServer


@pytest.fixture
def tasks(request):
    return Tasks(f"memory://{request.node.name}")


def stored(tasks, state=State.READY):
    async def browse():
        return await list_messages(await tasks.backend(), "default", Query(state))

    return asyncio.run(browse())


def test_a_task_is_still_the_function(tasks):
    @tasks.task(name="other", max_tries=2)
    def work(ctx: Context, a: int, b: int = 2) -> int:
        """What it does."""
        return a + b + ctx.tries

    assert work(1) == 3
    assert (work.name, work.__doc__, work.options.max_tries, work.queue) == ("other", "What it does.", 2, "default")
    assert tasks["other"] is work

    @tasks.task
    async def later(a: int) -> int:
        return a

    assert asyncio.run(later(4)) == 4


def test_a_name_is_registered_once(tasks):
    @tasks.task
    def work() -> None: ...

    with pytest.raises(DuplicateTask, match="'work'"):

        @tasks.task(name="work")
        def other() -> None: ...

    @tasks.raw_handler(queue="q")
    def raw(message: Message) -> None: ...

    with pytest.raises(DuplicateTask, match="'q'"):

        @tasks.raw_handler(queue="q")
        def raw_too(message: Message) -> None: ...

    assert tasks.queue_names() == ["default", "q"]
    with pytest.raises(UnknownTask, match="this app has work"):
        _ = tasks["nothing"]


@pytest.mark.parametrize(
    "options", [{"max_tries": 0}, {"timeout": 0}, {"priority": 10}, {"queue": "../up"}, {"process": True}]
)
def test_options_that_cannot_work_are_refused_when_the_task_is_registered(tasks, options):
    with pytest.raises(UsageError):

        @tasks.task(**options)
        async def work() -> None: ...


def test_enqueueing_works_in_one_event_loop_after_the_other(tasks):
    @tasks.task
    async def work(a: int) -> None: ...

    first = asyncio.run(work.enqueue(1))
    second = asyncio.run(work.enqueue(2))
    assert [s.message.id for s in stored(tasks)] == [first.id, second.id]


def test_enqueueing_works_from_threads_without_a_loop(tasks):
    @tasks.task
    async def work(a: int) -> None: ...

    jobs = []
    threads = [threading.Thread(target=lambda i=i: jobs.append(work.enqueue_sync(i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {job.id for job in jobs} == {s.message.id for s in stored(tasks)}
    assert len(jobs) == 8


async def test_blocking_where_a_loop_runs_is_refused_with_the_mend(tasks):
    @tasks.task
    async def work() -> None: ...

    with pytest.raises(UsageError, match=r"use `await task\.enqueue"):
        work.enqueue_sync()


def test_a_call_that_does_not_fit_is_refused_where_it_is_made(tasks):
    @tasks.task
    async def work(a: int) -> None: ...

    with pytest.raises(InvalidArguments):
        work.call()
    with pytest.raises(InvalidArguments):
        work.enqueue_sync(object())
    for wrong in ({"delay": -1}, {"priority": 10}, {"unique_key": ""}, {"id": ""}, {"queue": ".."}):
        with pytest.raises((UsageError, InvalidName)):
            work.using(**wrong)


def test_using_carries_its_options(tasks):
    @tasks.task(priority=3)
    async def work(a: int) -> None: ...

    call = work.using(id="one", unique_key="k", delay=5, headers={"h": "1"}).call(7)
    assert (call.queue, call.draft.id, call.draft.unique_key, call.draft.delay, call.draft.priority) == (
        "default",
        "one",
        "k",
        5.0,
        3,
    )
    assert call.draft.body == b'{"task":"work","args":[7],"headers":{"h":"1"}}'
    assert work.using(priority=9, queue="other").call(7).draft.priority == 9


def test_headers_of_sources_travel_and_given_ones_win(tasks):
    @tasks.task
    async def work() -> None: ...

    tasks.add_header_source(lambda: {"a": "source", "b": "source"})
    assert work.using(headers={"b": "given"}).call().draft.body.endswith(b'"headers":{"a":"source","b":"given"}}')


def test_many_calls_keep_their_order_over_queues_and_batches(tasks):
    @tasks.task
    async def work(a: int) -> None: ...

    async def publish():
        calls = [work.using(queue="other" if i % 1500 == 7 else "default").call(i) for i in range(3000)]
        jobs = await tasks.enqueue_many(iter(calls))
        backend = await tasks.backend()
        return jobs, await list_messages(backend, "default", Query(State.READY))

    jobs, ready = asyncio.run(publish())
    assert len({job.id for job in jobs}) == 3000
    assert [s.message.id for s in ready] == [job.id for job in jobs if job.queue == "default"]


def test_an_id_and_a_key_store_once(tasks):
    @tasks.task
    async def work() -> None: ...

    async def publish():
        return [await work.using(id="same").enqueue() for _ in range(2)], [
            await work.using(unique_key="same").enqueue() for _ in range(2)
        ]

    by_id, by_key = asyncio.run(publish())
    assert (by_id[0], by_key[0]) == (by_id[1], by_key[1])
    assert len(stored(tasks)) == 2


def test_no_url_and_an_unknown_one_are_told_with_the_mend(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QWORKER_URL", raising=False)
    with pytest.raises(UsageError, match="QWORKER_URL"):
        _ = Tasks().url
    with pytest.raises(InvalidURL, match="no backend is installed for 'nothing:'"):
        asyncio.run(Tasks("nothing:x").backend())
    monkeypatch.setenv("QWORKER_URL", "memory://from-the-environment")
    assert Tasks().url == "memory://from-the-environment"


@pytest.fixture(params=["file", "redis"])
def store_url(request, tmp_path):
    if request.param == "file":
        yield f"file://{tmp_path}/spool"
    else:
        with RedisServer() as server:
            yield server.url


@pytest.mark.parametrize(("kept", "runs"), [("", 2), ("keep_done=1h", 1)])
async def test_an_id_is_free_once_its_message_is_done_unless_the_store_keeps_it(store_url, kept, runs):
    tasks, ran = Tasks(f"{store_url}?{kept}"), []

    @tasks.task(max_tries=1)
    async def charge(amount: int) -> None:
        ran.append(amount)
        if amount < 0:
            raise Fail("less than nothing")

    for _ in range(2):
        # While it is stored, the id stores nothing more; a failed message is stored.
        await charge.using(id="order-1").enqueue(5)
        await charge.using(id="order-1").enqueue(5)
        await charge.using(id="order-2").enqueue(-1)
        assert await Worker(tasks, WorkerOptions(burst=True)).run()
    assert (ran.count(5), ran.count(-1)) == (runs, 1)
    await tasks.aclose()


@dataclass
class Reading:
    value: float
    note: str | None = None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("around", [lambda n: n, lambda n: [1, [n]], lambda n: {"a": (2**70, n)}, Reading])
def test_a_number_that_json_does_not_have_is_refused_where_it_is_given(tasks, number, around):
    @tasks.task
    async def work(a: Any, b: Any = None, *, c: Any = None) -> None: ...

    with pytest.raises(InvalidArguments, match=rf"task 'work': argument 2: JSON cannot contain {number}: use None"):
        work.call(None, around(number))
    with pytest.raises(InvalidArguments, match=rf"task 'work': argument c: JSON cannot contain {number}: use None"):
        work.call(None, c=around(number))


@pytest.mark.parametrize("value", [None, "null", [None, 1.5], "nan", 2**70, Reading(1e308), bytes.fromhex("cb7ff8")])
def test_what_only_looks_like_such_a_number_is_stored(tasks, value):
    @tasks.task
    async def work(a: Any, b: None = None) -> None: ...

    assert work.call(value, None).draft.body


def test_a_very_large_call_is_stored_with_a_warning(tasks, caplog):
    @tasks.task
    async def work(a: str) -> None: ...

    work.call("x" * (1 << 20))
    assert not caplog.records
    assert len(work.call("x" * (17 << 20)).draft.body) > 17 << 20
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "task 'work': a call of 17 MiB is enqueued: keep large data elsewhere, and pass its path or id")
    ]


def test_signatures_of_a_task_are_its_handlers_without_the_context(tasks):
    @tasks.task
    async def work(ctx: Context, a: int, /, b: str = "x", *c: int, d: float, **e: str) -> bytes: ...

    parameters = "(a: int, /, b: str = 'x', *c: int, d: float, **e: str)"
    for method, returns in ((work.enqueue, Job), (work.enqueue_sync, Job), (work.call, Call)):
        signature = inspect.signature(method)
        assert str(signature.replace(return_annotation=signature.empty)) == parameters
        assert signature.return_annotation is returns
        assert method.__doc__
    assert str(inspect.signature(work)) == f"{parameters} -> bytes"
    assert inspect.iscoroutinefunction(work.enqueue)
    assert work.enqueue.__qualname__ == "Task.enqueue"


async def test_a_handler_knows_whether_this_is_its_last_try(tasks):
    last: list[bool] = []

    @tasks.task(max_tries=2, retry=Backoff(initial=0))
    async def work(context: Context) -> None:
        last.append(context.tries + 1 == context.max_tries)
        raise RuntimeError

    await work.enqueue()
    for _ in range(2):
        await run_until_idle(tasks)
    assert last == [False, True]
    with pytest.raises(RuntimeError):
        await work()


def test_the_help_of_the_package_begins_with_its_names():
    first = pydoc.render_doc(qworker, renderer=pydoc.plaintext).split("PACKAGE CONTENTS")[0]
    for name in qworker.__all__:
        assert re.search(rf"\b{name}\b", first), name


@pytest.mark.parametrize(
    "cls",
    [
        Backoff,
        Call,
        Context,
        Draft,
        Job,
        Message,
        Progress,
        QueueStats,
        Status,
        StoredMessage,
        TaskOptions,
        WorkerOptions,
        WorkerCounts,
    ],
)
def test_every_public_field_is_described_where_editors_look(cls):
    fields = [name for name in getattr(cls, "__struct_fields__", cls.__slots__) if not name.startswith("_")]
    described = inspect.cleandoc(cls.__doc__).partition("Attributes:\n")[2]
    assert fields
    for field in fields:
        assert re.search(rf"^    {field}: ", described, re.MULTILINE), field


def test_a_coroutine_is_run_from_code_without_a_loop(tasks):
    assert tasks._run_sync(one()) == 1


async def one() -> int:
    return 1
