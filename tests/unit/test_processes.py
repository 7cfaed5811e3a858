"""Handlers in processes of their own: data goes in and out, and a death concerns one message."""

import asyncio
import errno
import importlib.util
import os
import subprocess
import sys

import pytest
import structlog

from qworker import Draft, State
from qworker.errors import UsageError
from qworker.failure_text import summary
from qworker.message import SettleAction, Settlement
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, executor

APP = """
import os, signal, time
from qworker import Context, Fail, Message, Retry, Backoff

def register(tasks):
    options = {"process": True, "max_tries": 2, "retry": Backoff(initial=0.0)}
    for function in (write, retry, fail, boom, die, soon, late, odd, unsayable, because):
        tasks.task(**options)(function)
    tasks.task(process=True, max_tries=1, timeout=0.2)(hang)
    tasks.raw_handler(queue="raw", process=True)(raw)

def write(ctx: Context, path: str, text: str = "") -> None:
    open(path, "w").write(f"{os.getppid()} {ctx.task} {ctx.tries} of {ctx.max_tries} {text}")

def retry() -> None:
    raise Retry("again", delay=3600)

def fail() -> None:
    raise Fail("never")

def boom() -> None:
    raise ValueError("boom")

def soon() -> None:
    raise Retry("again", delay="30")

def late() -> None:
    error = Retry("again")
    error.delay = "x"
    raise error

def odd() -> None:
    raise Fail({"a": 1})

def unsayable() -> None:
    raise ValueError("\\udc80")

def because() -> None:
    try:
        int("no number")
    except ValueError as error:
        raise Fail("bad input") from error

def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

def hang() -> None:
    time.sleep(3600)

def raw(message: Message) -> None:
    open(os.fsdecode(message.body), "w").write(f"{message.queue} {message.argv}")
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    name = f"process_app_{os.getpid()}_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    return module


async def test_every_outcome_comes_back_and_a_death_concerns_one_message(app, functions, tmp_path):
    functions.register(app)
    written, raw = tmp_path / "written", tmp_path / "raw"
    await app["write"].enqueue(str(written), text="hello")
    for name in ("retry", "fail", "boom", "die", "hang"):
        await app[name].enqueue()
    await app.store.publish("raw", [Draft(body=str(raw).encode())])
    worker = await app.burst(concurrency=2)
    assert written.read_text() == f"{os.getpid()} write 0 of 2 hello"
    assert raw.read_text() == "raw ()"
    errors = {stored.message.body: stored.error for stored in await app.found(State.FAILED)}
    assert errors[b'{"task":"fail","args":[]}'] == "never"
    assert errors[b'{"task":"boom","args":[]}'].endswith("ValueError: boom")
    assert errors[b'{"task":"die","args":[]}'] == "code: poison\nthe handler's process died: killed by SIGKILL"
    assert errors[b'{"task":"hang","args":[]}'] == "code: timeout\ntimed out after 0.2 seconds"
    assert [stored.error for stored in await app.found(State.DELAYED)] == ["again"]
    assert worker.counts.acked == 2


async def test_what_a_handler_raises_never_ends_its_process(app, functions):
    functions.register(app)
    expected = {
        "soon": "UsageError: delay must be a number of seconds (got '30'): write delay=30",
        "late": "UsageError: delay must be a number of seconds (got 'x')",
        "odd": "UsageError: Fail: the reason must be text or an exception (got {'a': 1})",
        "unsayable": "ValueError: ?",
        "because": "bad input",
    }
    for name in expected:
        await app[name].enqueue()
    worker = await app.burst(concurrency=1)
    assert (worker.counts.retried, worker.counts.failed) == (4, 5)
    errors = {stored.message.body: stored.error for stored in await app.found(State.FAILED)}
    assert {name: summary(errors[f'{{"task":"{name}","args":[]}}'.encode()]) for name in expected} == expected
    assert "Traceback" in errors[b'{"task":"because","args":[]}']


async def test_arguments_of_no_encoding_reach_a_process(app, functions, tmp_path):
    functions.register(app)
    written = tmp_path / "written"
    await app.store.publish("raw", [Draft(body=os.fsencode(written), argv=("\udcff", "a"))])
    assert (await app.burst()).counts.acked == 1
    assert written.read_text() == "raw ('\\udcff', 'a')"


async def test_a_message_waits_without_a_try_while_its_process_cannot_be_started(app, functions, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    @app.task
    async def beside() -> None: ...

    app.task(process=True, max_tries=1, retry_on=(KeyError,))(functions.hang)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    await app["hang"].enqueue()
    await beside.enqueue()
    with structlog.testing.capture_logs() as logs:
        worker = await app.burst()
    assert (worker.counts.acked, worker.counts.released) == (1, 1)
    (waiting,) = await app.found(State.DELAYED)
    assert waiting.message.tries == 0
    (line,) = [line for line in logs if line["event"] == "handler_not_started"]
    assert line["error"] == "the handler's process cannot be started: Too many open files"


async def test_a_worker_that_can_start_no_handler_does_not_take_and_return_the_whole_queue(app, functions, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    app.task(process=True)(functions.hang)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for _ in range(20):
        await app["hang"].enqueue()
    async with app.working(concurrency=1) as (worker, _):
        await wait_until(lambda: worker.counts.released > 0)
        at = asyncio.get_running_loop().time()
        await wait_until(lambda: worker.counts.released > 4)
        assert asyncio.get_running_loop().time() - at > 0.9


async def test_a_suspect_runs_in_the_worker_when_no_process_could_start_its_task_for_long(app, functions, monkeypatch):
    """A message that is only released would wait for ever."""

    @app.task
    def fine() -> None: ...

    # A child that imports the module finds no app there.
    functions.tasks = app
    await fine.enqueue()
    (lease,) = await app.store.lease("default", 1, 30.0)
    await app.store.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="died", died=True)])
    monkeypatch.setattr(executor, "_ISOLATION_PATIENCE", 0.0)
    monkeypatch.setattr(executor, "_RELEASE_DELAY", 0.0)
    with structlog.testing.capture_logs() as logs:
        worker = await app.burst()
    assert (worker.counts.released, worker.counts.acked) == (1, 1)
    assert [line["event"] for line in logs].count("isolation_failed") == 1


async def test_abort_kills_the_process_and_releases_the_message(app, functions):
    app.task(process=True)(functions.hang)
    await app["hang"].enqueue()
    async with app.working() as (worker, running):
        await wait_until(worker.running_messages)
        worker.cancel_handlers()
        assert await running is False
    assert [stored.message.tries for stored in await app.found(State.READY)] == [0]


def test_a_function_that_another_process_cannot_find_is_refused_at_the_start(app):
    @app.task(process=True)
    def inner() -> None: ...

    with pytest.raises(UsageError, match="top level"):
        Worker(app)
