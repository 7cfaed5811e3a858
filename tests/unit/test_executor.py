"""How messages end, by what their handler does."""

import asyncio
import contextvars
import threading

import pytest
import structlog

from qworker import Backoff, Context, Draft, Fail, Message, Retry, State
from qworker.testing.wait_until import wait_until
from tests.support.waiting import give_turns

NOW = Backoff(initial=0.0)


async def test_a_return_is_an_ack(app):
    @app.task
    async def work(a: int, b: str = "x") -> int:
        seen.append((a, b))
        return a

    seen = []
    await work.enqueue(1)
    await work.enqueue(2, b="y")
    worker = await app.burst()
    assert seen == [(1, "x"), (2, "y")]
    assert (worker.counts.leased, worker.counts.acked) == (2, 2)
    assert len(await app.found(State.DONE)) == 2


async def test_an_error_is_retried_until_the_tries_are_used_up_and_its_traceback_is_kept(app):
    @app.task(max_tries=3, retry=NOW)
    async def work(ctx: Context) -> None:
        seen.append(ctx.tries)
        raise ValueError("no luck")

    seen = []
    await work.enqueue()
    worker = await app.burst()
    assert seen == [0, 1, 2]
    (failed,) = await app.found(State.FAILED)
    assert failed.error.startswith("Traceback")
    assert failed.error.endswith("ValueError: no luck")
    assert "test_executor.py" in failed.error
    assert "executor.py" not in failed.error.replace("test_executor.py", "")
    assert (worker.counts.retried, worker.counts.failed) == (2, 1)


async def test_a_long_traceback_is_cut(app):
    @app.task(max_tries=1)
    async def work() -> None:
        raise ValueError("x" * 100_000)

    await work.enqueue()
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert len(failed.error) < 10_000


async def test_retry_waits_as_long_as_it_says(app):
    @app.task
    async def work() -> None:
        raise Retry("later", delay=1000.0)

    await work.enqueue()
    await app.burst()
    (delayed,) = await app.found(State.DELAYED)
    assert (delayed.message.tries, delayed.error) == (1, "later")
    assert delayed.due_at - delayed.message.enqueued_at > 900


async def test_retry_without_a_delay_takes_the_backoff_and_the_last_one_fails(app):
    @app.task(max_tries=2, retry=NOW)
    async def work() -> None:
        raise Retry("again")

    await work.enqueue()
    worker = await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert failed.error == "again"
    assert (worker.counts.retried, worker.counts.failed) == (1, 1)


async def test_fail_keeps_the_message_with_its_reason(app):
    @app.task
    async def work() -> None:
        raise Fail("bad picture")

    await work.enqueue()
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert (failed.error, failed.message.tries) == ("bad picture", 0)


async def test_a_value_that_cannot_be_converted_fails_at_once_with_the_reason(app):
    @app.task
    async def work(a: int) -> None:
        raise AssertionError("not run")

    await app.store.publish("default", [Draft(body=b'{"task":"work","args":["one"]}')])
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert failed.error == "code: arguments\ntask 'work', argument 1 (a): expected int, got str"


async def test_a_damaged_envelope_of_a_known_task_fails_with_the_reason(app):
    @app.task
    async def work() -> None:
        raise AssertionError("not run")

    await app.store.publish("default", [Draft(body=b'{"task":"work","args":7}')])
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert failed.error.startswith("code: arguments\ninvalid envelope")


async def test_a_message_that_nobody_knows_stays_in_the_queue_untouched_and_is_told_once(app):
    @app.task
    async def work() -> None: ...

    await app.store.publish("default", [Draft(body=b'{"task":"other"}')] * 2 + [Draft(body=b"raw")])
    with structlog.testing.capture_logs() as logs:
        await app.burst()
    assert [stored.message.tries for stored in await app.waiting()] == [0, 0, 0]
    assert [line["task"] for line in logs if line["event"] == "unknown_task"] == ["other", ""]


async def test_raw_messages_and_unknown_envelopes_go_to_the_raw_handler(app):
    @app.raw_handler(queue="inbox")
    async def on_file(message: Message) -> None:
        seen.append(message.body)

    @app.raw_handler(queue="outbox")
    def on_other(ctx: Context, message: Message) -> None:
        seen.append((ctx.task, message.body))

    seen = []
    await app.store.publish("inbox", [Draft(body=b"\xff\x00"), Draft(body=b'{"task":"other"}')])
    await app.store.publish("outbox", [Draft(body=b"")])
    await app.burst()
    assert set(seen) == {b"\xff\x00", b'{"task":"other"}', ("on_other", b"")}


async def test_a_task_is_found_by_name_on_any_queue(app):
    @app.task
    async def work() -> None:
        seen.append(1)

    seen = []
    await work.using(queue="elsewhere").enqueue()
    await app.burst(queues=("elsewhere",))
    assert seen == [1]


async def test_what_arrives_with_its_tries_used_up_fails_unrun_and_is_suspected(app):
    @app.task(max_tries=2)
    async def work() -> None:
        raise AssertionError("not run")

    await app.store.publish("default", [Draft(body=b'{"task":"work"}', tries=2)])
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert "may be killing its workers" in failed.error


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_what_should_end_a_program_fails_only_its_message(app, error):
    @app.task(max_tries=1)
    async def bad() -> None:
        raise error

    @app.task(max_tries=1)
    def bad_too() -> None:
        raise error

    @app.task
    async def good() -> None: ...

    for _ in range(2):
        await bad.enqueue()
        await bad_too.enqueue()
        await good.enqueue()
    worker = await app.burst(concurrency=1)
    assert (worker.counts.acked, worker.counts.failed) == (2, 4)
    assert all(error.__name__ in failed.error for failed in await app.found(State.FAILED))


async def test_a_handler_that_cancels_itself_harms_nobody_else(app):
    @app.task(max_tries=1)
    async def bad() -> None:
        asyncio.current_task().cancel()

    @app.task
    async def good() -> None:
        assert asyncio.current_task().cancelling() == 0
        async with asyncio.timeout(30):
            await asyncio.sleep(0)

    for _ in range(3):
        await bad.enqueue()
        await good.enqueue()
    worker = await app.burst(concurrency=1)
    assert worker.counts.acked == 6


async def test_a_timeout_cancels_the_handler_and_counts_as_a_try(app):
    @app.task(timeout=0.05, max_tries=2, retry=NOW)
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    ended = []
    await work.enqueue()
    worker = await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert failed.error == "code: timeout\ntimed out after 0.05 seconds"
    assert (len(ended), worker.counts.retried, worker.counts.failed) == (2, 1, 1)


async def test_plain_functions_run_in_threads_beside_each_other(app):
    @app.task(max_tries=1)
    def work() -> None:
        assert threading.current_thread() is not threading.main_thread()
        together.wait()

    together = threading.Barrier(3, timeout=30)
    for _ in range(3):
        await work.enqueue()
    worker = await app.burst(concurrency=3)
    assert worker.counts.acked == 3


async def test_a_thread_that_outlives_its_timeout_keeps_its_consumer_and_fails_its_message(app):
    @app.task(timeout=0.05, max_tries=1)
    def hang() -> None:
        release.wait(30)

    @app.task
    async def after() -> None:
        ran.append(release.is_set())

    release = threading.Event()
    ran = []
    await hang.enqueue()
    async with app.working(concurrency=1) as (worker, _):
        await wait_until(lambda: worker.counts.failed == 1)
        await after.enqueue()
        await give_turns()
        assert (await app.store.stats("default")).ready == 1
        release.set()
        await wait_until(lambda: worker.counts.acked == 1)
    assert ran == [True]


async def test_a_plain_function_that_returns_a_coroutine_fails(app):
    async def inner() -> None: ...

    @app.task(max_tries=1)
    def work() -> object:
        return inner()

    await work.enqueue()
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert "async def" in failed.error


async def test_context_variables_of_one_message_do_not_reach_the_next(app):
    variable = contextvars.ContextVar("variable", default=0)

    @app.task
    async def work() -> None:
        seen.append(variable.get())
        variable.set(1)
        await asyncio.sleep(0)
        seen.append(variable.get())

    seen = []
    for _ in range(3):
        await work.enqueue()
    await app.burst(concurrency=1)
    assert seen == [0, 1] * 3


async def test_the_context_has_what_a_handler_needs(make_app):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(_tasks):
        order.append("entered")
        yield {"db": 1}
        order.append("left")

    app = make_app(lifespan=lifespan)

    @app.task(timeout=60)
    async def work(ctx: Context, a: int) -> None:
        order.append((ctx.state, ctx.task, ctx.token, ctx.headers, a, ctx.deadline > ctx.message.enqueued_at))

    order = []
    await work.using(headers={"h": "1"}).enqueue(5)
    await app.burst()
    assert order == ["entered", ({"db": 1}, "work", 1, {"h": "1"}, 5, True), "left"]


async def test_an_observer_hears_of_starts_and_ends_and_its_errors_harm_nobody(app):
    from qworker.worker import Worker, WorkerOptions

    class Watching:
        def handler_started(self, run):
            heard.append(("started", run.task))
            raise RuntimeError

        def message_settled(self, run, outcome, error, duration):
            heard.append((str(outcome), error, duration >= 0))
            raise RuntimeError

    @app.task
    async def work() -> None: ...

    heard = []
    await work.enqueue()
    worker = Worker(app, WorkerOptions(burst=True))
    worker.observers.append(Watching())
    assert await worker.run()
    assert heard == [("started", "work"), ("acked", None, True)]
