"""`on_failure`: a message that fails for good is reported once, before it is failed."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import structlog

from qworker import Backoff, Context, Draft, Fail, FailedCall, Hook, Retry, State, Tasks, provide
from qworker.backend.registry import open_backend
from qworker.errors import AlreadyEnqueued, BackendUnavailable, MessageTooLarge, UsageError
from qworker.failure_text import code_of, without_code
from qworker.message import Query, Selection, SettleAction, Settlement
from qworker.names import failure_id
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.tools.explain import explain
from qworker.validation import shown
from qworker.worker import Worker, WorkerOptions
from tests.support.servers import RedisServer
from tests.support.waiting import wait_for
from tests.unit.test_hooks import _import

NOW = Backoff(initial=0.0)
CAUSES = ["tries", "fail", "timeout", "arguments", "envelope"]


def _task_that_fails(app, cause, kind, alert):
    options = {"max_tries": 2, "retry": NOW, "on_failure": alert, "name": "pay", "queue": "pay"}

    def fail():
        if cause == "tries":
            raise ValueError("no luck")
        if cause == "fail":
            raise Fail("bad order")

    if kind == "thread":
        if cause == "timeout":
            options |= {"timeout": 0.05}

            @app.task(**options)
            def pay(ctx: Context, order: int, *, note: str = "") -> None:
                # Not for a time, which could be over before the loop sees its timeout.
                wait_for(ctx.cancelled, "the timeout")

            return pay

        @app.task(**options)
        def pay(order: int, *, note: str = "") -> None:
            fail()

        return pay
    if cause == "timeout":
        options |= {"timeout": 0.05}

    @app.task(**options)
    async def pay(order: int, *, note: str = "") -> None:
        if cause == "timeout":
            await asyncio.Event().wait()
        fail()

    return pay


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("cause", CAUSES)
async def test_each_cause_is_reported_once_with_the_call_that_failed(app, cause, kind):
    reports = []

    @app.task(queue="alerts")
    async def alert(failed: FailedCall) -> None:
        reports.append(failed)

    pay = _task_that_fails(app, cause, kind, alert)
    began = time.time()
    if cause in {"tries", "fail", "timeout"}:
        job_id = (await pay.using(headers={"a": "b"}).enqueue(17, note="x")).id
    else:
        broken = b'"x"' if cause == "arguments" else b"17"
        args = b'{"task":"pay","args":[' + broken + (b"]}" if cause == "arguments" else b'],"kwargs":5}')
        (job_id,) = await app.store.publish("pay", [Draft(body=args)])
    await app.burst()
    (failed,) = await app.found(State.FAILED, "pay")
    (report,) = reports
    expected = {
        "tries": ("error", 2, "ValueError: no luck"),
        "fail": ("error", 1, "bad order"),
        "timeout": ("timeout", 2, "timed out after 0.05 seconds"),
        "arguments": ("arguments", 0, "task 'pay', argument 1 (order): expected int, got str"),
        "envelope": ("arguments", 0, "invalid envelope: Expected `object`, got `int` - at `$.kwargs`"),
    }
    code, tries, error = expected[cause]
    assert (report.id, report.queue, report.task) == (job_id, "pay", "pay")
    assert (report.code, report.tries, report.error) == (code, tries, without_code(failed.error))
    assert report.error.endswith(error)
    assert (code_of(failed.error) or "error") == code
    # The report is first, and both are within the time of this test.
    assert began - 1 <= report.failed_at <= failed.finished_at + 1
    assert failed.finished_at <= time.time() + 1
    if cause in {"tries", "fail", "timeout"}:
        assert (report.args, report.kwargs, report.headers) == ([17], {"note": "x"}, {"a": "b"})
    elif cause == "arguments":
        assert report.args == ["x"]
    # It is explained, and its id is the failed one's.
    (done,) = await app.found(State.DONE, "alerts")
    assert done.message.id == failure_id(job_id)
    explained = await explain(app.store, "alerts", done.message.id, app)
    assert f"it reports the failure of {job_id} ({code})" in [reason.text for reason in explained.reasons]


async def test_retries_and_successes_are_not_reported(app):
    @app.task(queue="alerts")
    async def alert(failed: FailedCall) -> None: ...

    @app.task(on_failure=alert)
    async def pay(order: int) -> None:
        if order:
            raise Retry(delay=1000)

    for order in range(2):
        await pay.enqueue(order)
    worker = await app.burst()
    assert (worker.counts.acked, worker.counts.retried) == (1, 1)
    assert await app.found(State.DONE, "alerts") == []


async def test_poison_is_reported_although_its_handler_does_not_run_again(app):
    reports = []

    @app.task(queue="alerts")
    async def alert(failed: FailedCall) -> None:
        reports.append(failed)

    @app.task(max_tries=3, on_failure=alert)
    async def pay(order: int) -> None:
        raise AssertionError("it must not run")

    (message_id,) = await app.store.publish("default", [Draft(body=b'{"task":"pay","args":[1]}', tries=3)])
    await app.burst()
    assert [(one.id, one.code, one.tries) for one in reports] == [(message_id, "poison", 3)]


async def test_a_dead_process_at_the_last_attempt_is_poison(tmp_path, monkeypatch):
    text = """
import os, signal
from qworker import FailedCall, Tasks

tasks = Tasks("memory://reports-child")
reports = []

@tasks.task(queue="alerts")
async def alert(failed: FailedCall) -> None:
    reports.append(failed)

@tasks.task(process=True, max_tries=1, on_failure=alert)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@tasks.task(process=True, max_tries=1, on_failure=alert)
def bad() -> None:
    raise ValueError("no luck")
"""
    app = _import("reports_child", text, tmp_path, monkeypatch)
    await app.die.enqueue()
    await app.bad.enqueue()
    async with asyncio.timeout(60):
        await Worker(app.tasks, WorkerOptions(burst=True)).run()
    assert {one.task: one.code for one in app.reports} == {"die": "poison", "bad": "error"}


async def enqueue_reported_failure(app):
    """Enqueue a call that fails, and whose failure is reported to the queue `alerts`."""

    @app.task(queue="alerts")
    async def alert(failed: FailedCall) -> None: ...

    @app.task(on_failure=alert)
    async def pay() -> None:
        raise Fail("no")

    await pay.enqueue()


async def test_the_report_is_stored_before_the_message_fails(app):
    calls = []
    publish = app.store.publish

    async def noted(queue, drafts):
        calls.append(f"publish {queue}")
        return await publish(queue, drafts)

    await enqueue_reported_failure(app)
    app.store.publish = noted
    app.store.hook = lambda call: calls.append(call) if call == "settle" else None
    await app.burst()
    assert calls[:2] == ["publish alerts", "settle"]


async def test_a_report_waits_for_the_store_and_its_message_is_failed_afterwards(app):
    publish = app.store.publish
    attempts = []

    async def broken(queue, drafts):
        attempts.append(queue)
        if len(attempts) < 3:
            raise BackendUnavailable("it does not answer")
        return await publish(queue, drafts)

    await enqueue_reported_failure(app)
    app.store.publish = broken
    worker = await app.burst()
    assert attempts == ["alerts"] * 3
    assert (worker.counts.failed, worker.counts.acked) == (1, 1)


async def test_without_the_store_the_message_is_not_failed_and_whoever_gets_it_next_reports_it(app):
    async def broken(_queue, _drafts):
        raise BackendUnavailable("it does not answer")

    await enqueue_reported_failure(app)
    publish, app.store.publish = app.store.publish, broken
    app.store.broken |= {"extend"}
    async with app.working(visibility_timeout=1.0) as (worker, _):
        await wait_until(lambda: worker.counts.lost == 1)
        assert await app.found(State.FAILED) == []
        app.store.publish = publish
        app.store.broken.clear()
        await wait_until(lambda: worker.counts.failed == 1 and worker.counts.acked == 1)


async def test_a_stray_cancellation_does_not_keep_a_report_from_the_store(app):
    publish, strays = app.store.publish, []

    async def cancelled_once(queue, drafts):
        if not strays:
            # As a timer that an earlier handler has left behind.
            strays.append(asyncio.current_task())
            strays[0].cancel()
            await asyncio.sleep(0)
        return await publish(queue, drafts)

    await enqueue_reported_failure(app)
    app.store.publish = cancelled_once
    worker = await app.burst()
    assert strays
    assert (worker.counts.failed, worker.counts.acked) == (1, 1)


@pytest.mark.parametrize("problem", ["store", "key", "headers"])
async def test_a_report_that_can_never_be_stored_is_logged_and_the_message_fails(app, problem):
    refusal = MessageTooLarge("the body has 5 bytes, more than max_body")
    if problem == "key":
        refusal = AlreadyEnqueued("a message with the unique key 'k' is already enqueued: ID", "ID")

    async def refused(_queue, _drafts):
        raise refusal

    await enqueue_reported_failure(app)
    if problem != "headers":
        app.store.publish = refused
    else:
        app.add_header_source(lambda: 1 / 0)
    with structlog.testing.capture_logs() as logs:
        worker = await app.burst()
    assert worker.counts.failed == 1
    (line,) = [line for line in logs if line["event"] == "failure_not_reported"]
    assert line["error_type"] == ("ZeroDivisionError" if problem == "headers" else type(refusal).__name__)


async def test_the_report_gets_hooks_and_injected_parameters_as_any_call():
    from tests.unit.conftest import App

    class Mark(Hook):
        def publishing(self, call):
            return call.with_headers({"mark": "x"})

    app = App(hooks=[Mark()])
    seen = []

    def value() -> int:
        return 5

    @app.task(queue="alerts")
    async def alert(ctx: Context, failed: FailedCall, number: int = provide(value)) -> None:
        seen.append((ctx.headers["mark"], failed.code, number))

    @app.task(on_failure=alert)
    async def pay() -> None:
        raise Fail("no")

    await pay.enqueue()
    await app.burst()
    assert seen == [("x", "error", 5)]


# -- holds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["ids", "state", "unchanged"])
@pytest.mark.parametrize("scheme", ["memory", "file", "redis"])
async def test_requeue_frees_the_hold_so_that_the_next_failure_is_reported_again(tmp_path, scheme, select):
    if scheme == "redis":
        with RedisServer() as server:
            await check_requeue(server.url, select)
    else:
        await check_requeue(f"file://{tmp_path}/spool" if scheme == "file" else f"memory://reports-{select}", select)


async def check_requeue(url, select):
    app = Tasks(url)
    reports = []

    @app.task(queue="alerts")
    async def alert(failed: FailedCall) -> None:
        reports.append(failed.id)

    @app.task(on_failure=alert)
    async def pay() -> None:
        raise Fail("no")

    @app.task(queue="others")
    async def other() -> None: ...

    async def work():
        async with asyncio.timeout(60):
            await Worker(app, WorkerOptions(burst=True)).run()

    backend = await app.backend()
    ids = [(await pay.enqueue()).id for _ in range(2)]
    held = (await other.using(id="other", hold=1000).enqueue()).id
    await work()
    assert sorted(reports) == sorted(ids)
    # Held: the same report is not stored again.
    draft = Draft(body=b"x", id=f"{ids[0]}:failed", hold=86_400)
    await backend.publish("alerts", [draft])
    stats = await backend.stats("alerts")
    assert (stats.ready, stats.leased) == (0, 0)
    found = [stored async for page in backend.browse("default", Query(State.FAILED)) for stored in page]
    selection = {
        "ids": Selection(ids=ids),
        "state": Selection(state=State.FAILED),
        "unchanged": Selection(unchanged=[_finished(stored) for stored in found]),
    }[select]
    assert await backend.requeue("default", selection) == 2
    await work()
    assert sorted(reports) == sorted([*ids, *ids])
    # Other holds stay.
    assert await backend.held_until("others", held) is not None
    await app.aclose()


@pytest.mark.parametrize("scheme", ["memory", "file", "redis"])
async def test_the_hold_of_a_report_that_waits_is_freed_too(tmp_path, scheme):
    if scheme == "redis":
        with RedisServer() as server:
            await check_waiting_report(server.url)
    else:
        await check_waiting_report(f"file://{tmp_path}/spool" if scheme == "file" else "memory://reports-waiting")


async def check_waiting_report(url):
    backend = open_backend(url)
    await backend.publish("default", [Draft(body=b"x", id="m")])

    async def run(queue, action):
        (lease,) = await backend.lease(queue, 1, 30.0)
        assert await backend.settle([Settlement(lease=lease, action=action, error="x")]) == []

    async def fail_and_report():
        await backend.publish("alerts", [Draft(body=b"r", id="m:failed", hold=1000)])
        await run("default", SettleAction.FAIL_PERM)

    await fail_and_report()
    assert await backend.requeue("default", Selection(ids=["m"])) == 1
    await run("alerts", SettleAction.ACK)
    await fail_and_report()
    await run("alerts", SettleAction.ACK)
    # The hold of the second report is as any other.
    assert await backend.held_until("alerts", "m:failed") is not None
    await backend.publish("alerts", [Draft(body=b"r", id="m:failed", hold=1000)])
    assert (await backend.stats("alerts")).ready == 0
    await backend.aclose()


def _finished(stored):
    from qworker.message import FinishedMessage

    return FinishedMessage(
        id=stored.message.id, state=stored.state, finished_at=stored.finished_at, location=stored.location
    )


async def test_requeue_of_many_messages_frees_their_holds_and_lists_no_names(tmp_path, monkeypatch):
    """The directory has names of every message with a given id, so its listing would cost more the more there are."""
    backend = open_backend(f"file://{tmp_path}/spool", clock=FakeClock())
    await backend.open()
    await backend.create("default")
    await backend.create("alerts")
    names = [f"m{number}" for number in range(120)]
    await backend.publish("default", [Draft(body=b"x", id=name) for name in names])
    await backend.publish("alerts", [Draft(body=b"x", id=f"{name}:failed", hold=1000) for name in names])
    for queue, action in (("default", SettleAction.FAIL_PERM), ("alerts", SettleAction.ACK)):
        leases = await backend.lease(queue, 1000, 100.0)
        await backend.settle([Settlement(lease=lease, action=action, error="x") for lease in leases])
    assert await backend.held_until("alerts", "m0:failed") is not None
    listed = []
    listdir = os.listdir

    def note_listing(directory):
        listed.append(Path(f"/proc/self/fd/{directory}").resolve().name)
        return listdir(directory)

    monkeypatch.setattr(os, "listdir", note_listing)
    assert await backend.requeue("default", Selection(state=State.FAILED)) == len(names)
    monkeypatch.undo()
    assert "names" not in listed
    assert [await backend.held_until("alerts", f"{name}:failed") for name in names] == [None] * len(names)
    await backend.aclose()


# -- registration ------------------------------------------------------------------------------------------------------


async def test_what_cannot_report_is_refused(tmp_path, monkeypatch):
    app, other = Tasks("memory://"), Tasks("memory://")

    def function(failed: FailedCall) -> None: ...

    @app.task
    def none() -> None: ...

    @other.task
    def foreign(failed: FailedCall) -> None: ...

    def refuse(value, text):
        with pytest.raises(UsageError) as refused:
            app.task(on_failure=value)
        assert str(refused.value) == text

    refuse(function, f"on_failure must be a task (got {shown(function)}): decorate it with @tasks.task")
    refuse(none, "on_failure: the task 'none' must take one argument, a FailedCall")
    refuse(foreign, "on_failure: the task 'foreign' belongs to another app: use a task of this app")


@pytest.mark.parametrize("url", ["fsq://{}/spool", "sq://{}/spool", "vsqs://{}/spool", "mq://{}/spool"])
async def test_a_store_without_holds_is_refused_at_registration_or_at_the_start(tmp_path, url, monkeypatch):
    url = url.format(tmp_path)
    scheme = url.partition(":")[0]
    app = Tasks(url)

    @app.task
    async def alert(failed: FailedCall) -> None: ...

    async def pay() -> None: ...

    with pytest.raises(UsageError) as refused:
        app.task(on_failure=alert)(pay)
    text = str(refused.value)
    assert text.startswith(f"task 'pay': on_failure needs holds, which {scheme}: does not support (")
    assert text.endswith("): use redis: or file:")
    assert "\n" not in text
    late = Tasks()

    @late.task
    async def alert(failed: FailedCall) -> None: ...

    late.task(on_failure=alert)(pay)
    monkeypatch.setenv("QWORKER_URL", url)
    with pytest.raises(UsageError) as refused:
        await Worker(late).run()
    assert str(refused.value) == text
