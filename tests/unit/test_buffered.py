"""Calls in a buffered block are checked when they are made, and sent together when the block ends without an error."""

import asyncio
import contextvars
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from qworker import Backoff, Buffered, Call, Draft, Job, Retry, State, Task, Tasks, Unique
from qworker.backend.listing import list_messages
from qworker.enqueue.portal import run_blocking
from qworker.errors import (
    AlreadyEnqueued,
    BackendUnavailable,
    EnqueueFailed,
    InvalidArguments,
    MessageTooLarge,
    NotSupported,
    QueueFull,
    UsageError,
)
from qworker.message import Query
from qworker.testing import in_memory
from tests.unit.conftest import App
from tests.unit.test_jobs import redis, url

__all__ = ["redis", "url"]


async def stored(tasks: Tasks[Any], queue: str = "default") -> list[str]:
    """The arguments of the waiting calls of a queue, in their order."""
    backend = await tasks.backend()
    if queue not in await backend.queues():
        return []
    found = await list_messages(backend, queue, Query(State.READY))
    return [message.message.body.decode().split('"args":[')[1][0] for message in found]


def add_tasks(tasks: Tasks[Any]) -> tuple[Task[[int], int], Task[[int], None]]:
    @tasks.task
    def work(number: int) -> int:
        return number

    @tasks.task(queue="mail")
    def mail(number: int) -> None: ...

    return work, mail


async def test_calls_are_sent_in_few_batches_when_the_block_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: Tasks[Any] = Tasks(url)
    work, mail = add_tasks(tasks)
    batches: Counter[str] = Counter()
    async with tasks.buffered():
        backend = await tasks.backend()
        publish = type(backend).publish

        async def counted(self: Any, queue: str, drafts: Sequence[Draft]) -> list[str]:
            batches[queue] += 1
            return await publish(self, queue, drafts)

        monkeypatch.setattr(type(backend), "publish", counted)
        jobs = [await work.enqueue(1), await mail.enqueue(2), await work.enqueue(3)]
        jobs += await tasks.enqueue_many([work.call(4), mail.call(5)])
        assert not batches
        assert [job.existed for job in jobs] == [None] * 5
        assert len({job.id for job in jobs}) == 5
    assert batches == {"default": 1, "mail": 1}
    assert [job.existed for job in jobs] == [False] * 5
    assert [(await job.status()).state for job in jobs] == ["ready"] * 5
    assert (await stored(tasks), await stored(tasks, "mail")) == (["1", "3", "4"], ["2", "5"])
    await work.enqueue(6)
    assert batches["default"] == 2


def test_the_synchronous_block_does_the_same_for_code_without_an_event_loop(url: str) -> None:
    tasks: Tasks[Any] = Tasks(url)
    work, mail = add_tasks(tasks)
    with tasks.buffered_sync():
        jobs = [work.enqueue_sync(1), mail.enqueue_sync(2), *tasks.enqueue_many_sync([work.call(3)])]
        assert [job.status_sync().state for job in jobs] == ["gone"] * 3
    assert [job.status_sync().state for job in jobs] == ["ready"] * 3
    run_blocking(tasks.aclose(), instead="await")


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError, Retry])
async def test_an_exception_drops_the_calls_of_its_block_and_no_other(error: type[BaseException]) -> None:
    app = App()
    work, _ = add_tasks(app)

    async def stop_after(number: int) -> None:
        async with app.buffered():
            await work.enqueue(number)
            raise error("no")

    async with app.buffered():
        await work.enqueue(1)
        with pytest.raises(error):
            await stop_after(2)
        async with app.buffered():
            await work.enqueue(3)
        assert await stored(app) == []
    assert await stored(app) == ["1", "3"]
    with pytest.raises(error):
        await stop_after(4)
    assert await stored(app) == ["1", "3"]


async def test_a_block_takes_the_calls_of_its_app_only() -> None:
    app, other, library = App(), App(), Tasks()
    (work, _), (foreign, _), (included, _) = add_tasks(app), add_tasks(other), add_tasks(library)
    app.include(library, prefix="lib.")
    async with app.buffered(), other.buffered():
        await work.enqueue(1)
        await foreign.enqueue(2)
        await included.enqueue(3)
        assert await stored(app) == await stored(other) == []
    assert (await stored(app), await stored(other)) == (["1", "3"], ["2"])
    async with library.buffered():
        await work.enqueue(4)
        await foreign.enqueue(5)
        assert (len(await stored(app)), len(await stored(other))) == (2, 2)


async def test_tasks_and_threads_that_copy_the_context_belong_to_the_block_until_it_ends() -> None:
    app = App()
    work, _ = add_tasks(app)
    ended = asyncio.Event()

    async def late() -> None:
        await work.enqueue(3)
        await ended.wait()
        await work.enqueue(4)
        await app.enqueue_many([work.call(5)])

    async with app.buffered():
        task = asyncio.create_task(late())
        await asyncio.to_thread(work.enqueue_sync, 1)
        await asyncio.gather(work.enqueue(2))
        # A thread that starts with an empty context is not part of the block.
        other = threading.Thread(target=contextvars.Context().run, args=(app.enqueue_many_sync, [work.call(9)]))
        other.start()
        await asyncio.to_thread(other.join)
        assert await stored(app) == ["9"]
    assert Counter(await stored(app)) == Counter("9132")
    ended.set()
    await task
    assert Counter(await stored(app)) == Counter("913245")


async def test_no_call_is_lost_that_another_thread_makes_while_its_block_ends() -> None:
    app = App()
    work, _ = add_tasks(app)
    for _ in range(20):
        async with app.buffered():
            context = contextvars.copy_context()
            calls = [work.call(1)] * 3
            threads = [
                threading.Thread(target=context.copy().run, args=(app.enqueue_many_sync, calls)) for _ in range(3)
            ]
            for thread in threads:
                thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert len(await stored(app)) == 20 * 9


@pytest.mark.parametrize("again", ["keep", "replace", "error"])
async def test_the_job_of_a_key_that_another_call_has_becomes_that_call(again: Any) -> None:
    app = App()
    work, _ = add_tasks(app)
    first = await work.using(unique_key="k").enqueue(1)
    jobs: list[Job[Any]] = []

    async def enqueue() -> None:
        async with app.buffered():
            jobs.append(await work.using(unique_key="free").enqueue(2))
            jobs.append(await work.using(unique=Unique(key="k", again=again)).enqueue(3))
            assert jobs[1] != first

    if again == "error":
        with pytest.raises(EnqueueFailed, match="1 of 2 calls may not be stored") as raised:
            await enqueue()
        assert (raised.value.stored, [type(error) for error in raised.value.errors]) == (jobs[:1], [AlreadyEnqueued])
    else:
        await enqueue()
        assert (jobs[1], jobs[1].existed) == (first, True)
    assert jobs[0].existed is False
    assert await stored(app) == {"keep": ["1", "2"], "replace": ["3", "2"], "error": ["1", "2"]}[again]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_sends_its_own_calls_and_none_of_its_parent(tmp_path: Path) -> None:
    tasks: Tasks[Any] = Tasks(f"file://{tmp_path}/root?sync=off")
    work, _ = add_tasks(tasks)
    with tasks.buffered_sync():
        work.enqueue_sync(1)
        child = os.fork()
        if not child:
            try:
                work.enqueue_sync(2)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert run_blocking(stored(tasks), instead="") == ["2"]
    assert run_blocking(stored(tasks), instead="") == ["2", "1"]


@pytest.mark.parametrize("place", ["own", "in_memory"])
@pytest.mark.parametrize(
    ("store", "options", "arguments", "reason"),
    [
        ("memory:?max_body=100", {}, ["x" * 100], "more than max_body=100"),
        ("file://.?max_body=100", {}, ["x" * 100], "more than max_body=100"),
        ("vsqs://.", {}, ["x"], "vsqs: does not support calls that are sent later"),
        ("mq://.", {"id": "order-1"}, ["x"], "mq: does not support given ids"),
        ("sq://.", {"priority": 1}, ["x"], "sq: does not support priorities"),
        ("memory:", {}, ["x", "y"], "too many positional arguments"),
    ],
)
async def test_a_call_that_the_store_would_refuse_is_refused_when_it_is_made(
    store: str, options: dict[str, Any], arguments: list[Any], reason: str, place: str
) -> None:
    tasks: Tasks[Any] = Tasks(store)

    @tasks.task
    def work(text: str) -> None: ...

    with in_memory(tasks) if place == "in_memory" else nullcontext():
        async with tasks.buffered():
            with pytest.raises((MessageTooLarge, NotSupported, InvalidArguments), match=reason):
                await work.using(**options).enqueue(*arguments)


async def test_a_store_that_fails_at_the_end_stops_no_other_call_and_the_error_names_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App()
    work, mail = add_tasks(app)

    @app.task(queue="sms")
    def sms(number: int) -> None: ...

    publish = type(await app.backend()).publish
    failing = {"default": QueueFull("no room"), "mail": BackendUnavailable("no answer")}

    async def fail(self: Any, queue: str, drafts: Sequence[Draft]) -> list[str]:
        if queue in failing:
            raise failing[queue]
        return await publish(self, queue, drafts)

    monkeypatch.setattr(type(await app.backend()), "publish", fail)
    jobs: list[Job[Any]] = []
    with pytest.raises(EnqueueFailed) as raised:
        async with app.buffered():
            jobs += await app.enqueue_many([work.call(1), mail.call(2), sms.call(3), work.using(id="4").call(4)])
    error = raised.value
    assert str(error).startswith("3 of 4 calls may not be stored (queue 'default': no room)")
    assert error.__cause__ is failing["default"]
    assert error.stored == [jobs[2]]
    assert [call.draft.id for call in error.unsent] == [jobs[0].id, "4", jobs[1].id]
    assert [job.existed for job in jobs] == [None, None, False, None]
    # The calls have their ids: to enqueue them twice stores them once.
    failing.clear()
    for _ in range(2):
        await app.enqueue_many(error.unsent)
    assert [await stored(app, queue) for queue in ("default", "mail", "sms")] == [["1", "4"], ["2"], ["3"]]


async def test_the_synchronous_block_is_refused_at_its_start_in_a_running_loop() -> None:
    app = App()
    work, _ = add_tasks(app)
    with pytest.raises(UsageError, match=r"use `async with tasks.buffered\(\)`"), app.buffered_sync():
        raise AssertionError("it began")
    async with app.buffered():
        with pytest.raises(UsageError, match=r"use `await task\.enqueue"):
            work.enqueue_sync(1)


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_the_hook_sends_the_calls_of_an_attempt_before_the_ack_and_drops_those_of_one_that_fails(
    kind: str,
) -> None:
    app = App(hooks=[Buffered()])
    work, _ = add_tasks(app)
    seen: list[Job[Any]] = []

    def fan_out() -> None:
        seen.append(work.enqueue_sync(len(seen)))
        assert seen[-1].existed is None
        if len(seen) == 1:
            raise Retry(delay=0)

    async def fan_out_async() -> None:
        seen.append(await work.enqueue(len(seen)))
        assert seen[-1].existed is None
        if len(seen) == 1:
            raise Retry(delay=0)

    await app.task(name="fan-out", queue="other")(fan_out if kind == "thread" else fan_out_async).enqueue()
    await app.burst(queues=("other",))
    assert [job.existed for job in seen] == [None, False]
    assert await stored(app) == ["1"]


async def test_an_attempt_whose_calls_cannot_be_sent_is_retried_with_calls_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App(hooks=[Buffered()])
    work, mail = add_tasks(app)
    publish = app.store.publish
    failures = [QueueFull("no room")]

    async def fail_once(queue: str, drafts: Sequence[Draft]) -> list[str]:
        if queue == "mail" and failures:
            raise failures.pop()
        return await publish(queue, drafts)

    monkeypatch.setattr(app.store, "publish", fail_once)

    @app.task(queue="other", retry=Backoff(initial=0.0))
    async def fan_out() -> None:
        # As after a kill in the middle of the send: what was stored has another id in the next attempt, unless given.
        await work.enqueue(1)
        await work.using(id="given").enqueue(2)
        await mail.enqueue(3)

    await fan_out.enqueue()
    worker = await app.burst(queues=("other",))
    assert (worker.counts.retried, worker.counts.acked) == (1, 1)
    assert (sorted(await stored(app)), await stored(app, "mail")) == (["1", "1", "2"], ["3"])


async def test_the_publishing_hooks_and_headers_of_a_buffered_call_run_once() -> None:
    class Tenant(Buffered):
        def publishing(self, call: Call) -> Call:
            seen.append(call.task)
            return call.with_headers({"tenant": "acme"})

    seen: list[str] = []
    app = App(hooks=[Tenant()])
    work, _ = add_tasks(app)
    async with app.buffered():
        await work.enqueue(1)
    assert seen == ["work"]
    (found,) = await list_messages(await app.backend(), "default", Query(State.READY))
    assert b'"tenant":"acme"' in found.message.body
