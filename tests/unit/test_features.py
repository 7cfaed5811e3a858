"""What the README's feature table promises, in a line or two each: alike on memory, file and redis."""

from __future__ import annotations

import asyncio
import secrets
import threading
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from qworker import Attempt, Backoff, Context, Draft, Fail, FailedCall, Hook, NoRetry, State, Tasks, provide
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import InvalidArguments
from qworker.message import Query
from qworker.testing.wait_until import wait_until
from qworker.tools.explain import explain
from qworker.tools.move import move
from qworker.worker import QueueShare, Worker, WorkerOptions
from tests.unit.test_jobs import redis, run_all, tasks, url, working

__all__ = ["redis", "tasks", "url"]


async def test_the_class_of_an_error_decides_whether_its_message_runs_again(tasks: Tasks) -> None:
    @tasks.task(retry={OSError: 1000, ValueError: NoRetry})
    async def work(kind: str) -> None:
        raise ConnectionError if kind == "connection" else UnicodeError

    again, never = await work.enqueue("connection"), await work.enqueue("unicode")
    await run_all(tasks)
    assert [(await job.status()).state for job in (again, never)] == ["delayed", "failed"]


async def test_an_unlimited_task_runs_until_it_succeeds(tasks: Tasks) -> None:
    attempts: list[int] = []

    @tasks.task(max_tries=None, retry=Backoff(initial=0.0))
    async def work(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt < 6:
            raise OSError("not yet")

    await work.enqueue()
    async with working(tasks):
        await wait_until(lambda: attempts == [1, 2, 3, 4, 5, 6])


async def test_typed_values_arrive_as_they_were_sent_and_others_are_refused(tasks: Tasks) -> None:
    got: list[Any] = []

    @tasks.task
    async def work(path: Path, price: Decimal, raw: bytes) -> None:
        got.append((path, price, raw))

    await work.enqueue(Path("/a/b"), Decimal("1.10"), b"\0\xff")
    with pytest.raises(InvalidArguments, match="price"):
        await work.enqueue(Path("/a/b"), "cheap", b"")  # type: ignore[arg-type]
    await run_all(tasks)
    assert got == [(Path("/a/b"), Decimal("1.10"), b"\0\xff")]


async def test_a_schedule_ticks_without_another_process(tasks: Tasks) -> None:
    ticks: list[datetime | None] = []

    @tasks.every(1)
    @tasks.task
    async def tick(ctx: Context) -> None:
        ticks.append(ctx.tick)

    async with working(tasks):
        await wait_until(lambda: len(ticks) >= 2)
    assert len(set(ticks)) == len(ticks)


async def test_weights_a_strict_order_and_a_limit_share_a_worker_among_queues(url: str) -> None:
    tasks, seen = Tasks(url), list[str]()

    @tasks.task
    async def work(name: str) -> None:
        seen.append(name)

    async def run(*queues: str | QueueShare, strict: bool = False) -> list[str]:
        seen.clear()
        for name in ("low", "high"):
            await tasks.enqueue_many(work.using(queue=name).call(name) for _ in range(14))
        options = WorkerOptions(queues=queues, strict=strict, concurrency=1, burst=True)
        assert await Worker(tasks, options).run()
        return seen

    assert (await run("high", "low", strict=True)) == ["high"] * 14 + ["low"] * 14
    assert (await run("low", QueueShare("high", 6)))[:14].count("high") >= 11
    assert (await run(QueueShare("low", concurrency=1), "high")).count("low") == 14
    await tasks.aclose()


async def test_a_limit_of_a_queue_leaves_the_other_consumers_free(tasks: Tasks) -> None:
    gate, running, seen = asyncio.Event(), 0, 0

    @tasks.task(queue="slow")
    async def hook() -> None:
        nonlocal running
        running += 1
        await gate.wait()

    @tasks.task(queue="high")
    async def urgent() -> None:
        nonlocal seen
        seen += 1

    await tasks.enqueue_many(hook.call() for _ in range(6))
    async with working(tasks, queues=("high", QueueShare("slow", concurrency=2)), concurrency=4):
        await wait_until(lambda: running == 2)
        await tasks.enqueue_many(urgent.call() for _ in range(6))
        await wait_until(lambda: seen == 6)
        assert running == 2
        gate.set()
        await wait_until(lambda: running == 6)


async def test_hooks_run_around_handlers_whose_parameters_are_injected(url: str) -> None:
    log: list[str] = []

    class Around(Hook):
        async def around(self, attempt: Attempt, go: Any) -> object:
            log.append(f"before {attempt.task}")
            return await go()

    def session() -> Any:
        log.append("open")
        yield "db"
        log.append("close")

    tasks = Tasks(url, hooks=[Around()])

    @tasks.task
    async def pay(order: int, db: str = provide(session)) -> None:
        log.append(f"pay {order} with {db}")

    await pay.enqueue(17)
    await run_all(tasks)
    assert log == ["before pay", "open", "pay 17 with db", "close"]
    await tasks.aclose()


async def test_a_failure_is_reported_to_its_task(tasks: Tasks) -> None:
    reports: list[FailedCall] = []

    @tasks.task
    async def alert(failed: FailedCall) -> None:
        reports.append(failed)

    @tasks.task(on_failure=alert)
    async def pay(order: int) -> None:
        raise Fail("the card was refused")

    job = await pay.enqueue(17)
    await run_all(tasks)
    (report,) = reports
    assert (report.id, report.task, report.args, report.error) == (job.id, "pay", [17], "the card was refused")


async def test_a_call_by_name_and_an_included_task_run_in_the_worker_of_the_app(url: str) -> None:
    ran: list[str] = []
    web, app, library = Tasks(url), Tasks(url), Tasks()

    @app.task(name="mail.send")
    async def send(to: str) -> None:
        ran.append(to)

    @library.task
    async def clean() -> None:
        ran.append(clean.name)

    app.include(library, prefix="lib.")
    await web.named("mail.send").enqueue("ada")
    await clean.enqueue()
    await run_all(app)
    assert sorted(ran) == ["ada", "lib.clean"]
    for each in (web, app):
        await each.aclose()


async def test_a_call_of_another_version_stays_for_the_workers_of_that_version(url: str) -> None:
    old, new, ran = Tasks(url), Tasks(url), list[tuple[int, str]]()

    @old.task(name="pay")
    async def old_pay(order: int) -> None: ...

    @new.task(name="pay")
    async def new_pay(order: int, currency: str) -> None:
        ran.append((order, currency))

    job = await new_pay.enqueue(17, "EUR")
    await run_all(old)
    assert (await job.status()).state in {"ready", "delayed"}
    async with working(new):
        await wait_until(lambda: ran == [(17, "EUR")])
    for each in (old, new):
        await each.aclose()


async def test_plain_functions_run_in_threads_and_a_late_one_has_timed_out(tasks: Tasks) -> None:
    threads: list[int] = []

    @tasks.task
    def plain() -> None:
        threads.append(threading.get_ident())

    @tasks.task(timeout=0.05, max_tries=1, result=60)
    async def late() -> None:
        await asyncio.Event().wait()

    await plain.enqueue()
    job = await late.enqueue()
    await run_all(tasks)
    assert threads != [threading.get_ident()]
    assert (await job.status()).code == "timeout"


async def test_what_is_not_running_is_explained(tasks: Tasks) -> None:
    @tasks.task
    async def work() -> None: ...

    job = await work.using(delay=1000).enqueue()
    found = await explain(await tasks.backend(), "default", job.id)
    assert "delayed" in {reason.code for reason in found.reasons}


async def test_messages_move_to_another_store_with_their_ids(url: str) -> None:
    source, target = open_backend(url), open_backend(f"memory://features-{secrets.token_hex(8)}")
    (moved,) = await source.publish("default", [Draft(body=b"x")])
    await move(source, target, "default")
    assert [one.message.id for one in await list_messages(target, "default", Query(State.READY))] == [moved]
    for each in (source, target):
        await each.aclose()
