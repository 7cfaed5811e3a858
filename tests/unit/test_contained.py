"""Whatever one message causes fails that message: its worker, and the messages beside it, go on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest
import structlog

from qworker import Backoff, Draft, Fail, Retry, State
from qworker.failure_text import summary
from qworker.retry import MOST_DELAY
from qworker.testing.clock import FakeClock
from qworker.worker import Worker, WorkerOptions


class Broken(Retry):
    @property
    def reason(self):
        raise KeyError("reason")

    @reason.setter
    def reason(self, value): ...


class Ending(Fail):
    @property
    def reason(self):
        raise SystemExit(3)

    @reason.setter
    def reason(self, value): ...


def changed(**attributes):
    error = Retry("later")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


RAISED = {
    "text": lambda: Retry("later", delay="30"),
    "decimal-nan": lambda: Retry("later", delay=Decimal("nan")),
    "infinite": lambda: Retry("later", delay=float("inf")),
    "far": lambda: Retry("later", delay=1e300),
    "number": lambda: Fail(404),
    "bytes": lambda: Fail(b"bytes"),
    "dict": lambda: Retry({}),
    "changed-delay": lambda: changed(delay="x"),
    "changed-reason": lambda: changed(reason=7),
    "property": lambda: Broken("later"),
    "exit": lambda: Ending("never"),
}


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("case", RAISED)
async def test_an_outcome_that_cannot_be_kept_is_an_ordinary_failure(app, kind, case):
    def raising() -> None:
        error = RAISED[case]()
        raise error

    async def raising_on_the_loop() -> None:
        error = RAISED[case]()
        raise error

    @app.task
    async def beside() -> None:
        await asyncio.sleep(0)

    bad = app.task(name="bad", max_tries=2, retry=Backoff(initial=0.0))(
        raising if kind == "thread" else raising_on_the_loop
    )
    for _ in range(3):
        await bad.enqueue()
        await beside.enqueue()
    worker = await app.burst()
    assert (worker.counts.acked, worker.counts.retried, worker.counts.failed) == (3, 3, 3)
    errors = {summary(failed.error) for failed in await app.found(State.FAILED)}
    assert len(errors) == 1
    assert errors.pop().startswith(("UsageError: ", "KeyError: 'reason'", "SystemExit: 3"))


async def test_what_handlers_naturally_raise_says_what_they_mean(app):
    @app.task
    async def polite() -> None:
        raise Retry("told to slow down", delay=timedelta(seconds=900))

    @app.task
    async def wrong() -> None:
        try:
            int("bad picture")
        except ValueError as error:
            raise Fail(error)  # noqa: B904

    await polite.enqueue()
    await wrong.enqueue()
    await app.burst()
    (delayed,), (failed,) = await app.found(State.DELAYED), await app.found(State.FAILED)
    assert delayed.due_at - delayed.message.enqueued_at > 800
    assert summary(failed.error) == "ValueError: invalid literal for int() with base 10: 'bad picture'"
    assert "Traceback" in failed.error


async def test_a_backoff_that_fails_is_told_beside_the_error_and_the_message_is_retried(app):
    class Odd(Backoff):
        def delay(self, tries: int, draw: float) -> float:
            raise ZeroDivisionError

    class Far(Backoff):
        def delay(self, tries: int, draw: float) -> float:
            return 1e300

    @app.task(retry=Odd())
    async def odd() -> None:
        raise ValueError("no luck")

    @app.task(retry=Far())
    async def far() -> None:
        raise ValueError("no luck")

    # Neither becomes due before it is listed, however long that takes.
    app.store._clock = FakeClock()
    await odd.enqueue()
    await far.enqueue()
    worker = Worker(app, WorkerOptions(burst=True), draw=lambda: 0.9)
    assert await worker.run()
    assert worker.counts.retried == 2
    first, last = await app.found(State.DELAYED)
    assert summary(first.error) == "ZeroDivisionError"
    assert "ValueError: no luck" in first.error
    assert last.due_at - last.message.enqueued_at < MOST_DELAY + 60


async def test_an_async_handler_that_cannot_be_called_fails_its_message(app):
    @app.task(max_tries=1)
    async def work(a: int) -> None: ...

    @app.task
    async def beside() -> None: ...

    def refusing(a: int) -> None:
        raise TypeError("missing argument")

    work.function = refusing
    await work.enqueue(1)
    await beside.enqueue()
    worker = await app.burst()
    assert (worker.counts.acked, worker.counts.failed) == (1, 1)
    work.function = lambda a: a
    await work.enqueue(1)
    assert (await app.burst()).counts.failed == 1


@dataclass
class Picky:
    value: int

    def __post_init__(self) -> None:
        raise KeyError("of the annotation's own code")


async def test_an_annotation_whose_code_fails_fails_its_message(app):
    @app.task(max_tries=1)
    async def work(a: Picky) -> None: ...

    @app.task
    async def beside() -> None: ...

    await app.store.publish("default", [Draft(body=b'{"task":"work","args":[{"value":1}]}')])
    await beside.enqueue()
    worker = await app.burst()
    assert (worker.counts.acked, worker.counts.failed) == (1, 1)
    (failed,) = await app.found(State.FAILED)
    assert (
        summary(failed.error) == "KeyError: 'of the annotation's own code'".replace("\\", "")
        or "KeyError" in failed.error
    )


async def test_without_another_thread_those_that_are_there_do_the_work(app, monkeypatch):
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("qworker-handler-") and thread.name != allowed:
            raise RuntimeError("can't start new thread")
        begin(thread)

    @app.task(max_tries=1)
    def work() -> None: ...

    allowed = "qworker-handler-1"
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(5):
        await work.enqueue()
    assert (await app.burst()).counts.acked == 5
    allowed = ""
    await work.enqueue()
    # Without any thread, its message waits.
    assert (await app.burst()).counts.released == 1
    assert [waiting.message.tries for waiting in await app.found(State.DELAYED)] == [0]


async def test_observers_whose_errors_have_no_text_harm_nobody(app):
    class Unsayable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def raising(*_args):
        raise Unsayable

    @app.task
    async def work() -> None: ...

    await work.enqueue()
    worker = Worker(app, WorkerOptions(burst=True))
    worker.observers.append(SimpleNamespace(handler_started=raising, message_settled=raising))
    with structlog.testing.capture_logs() as logs:
        assert await worker.run()
    assert [line["error"] for line in logs if line["event"] == "observer_failed"] == [
        "Unsayable: <exception str() failed>"
    ] * 2
