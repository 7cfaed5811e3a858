"""What a worker does after each error: by the policy of the task, alike on each backend that counts deaths."""

import importlib.util
import itertools
import sys
from collections.abc import Iterator

import pytest
import structlog

from qworker import Backoff, Context, Delays, Draft, Fail, NoRetry, Retry, State, Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.errors import NotSupported
from qworker.failure_text import summary
from qworker.message import Query, SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions
from tests.support.servers import RedisServer, free_port

NOW = Backoff(initial=0.0)
_dbs = itertools.count()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture(params=["memory", "file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "memory":
        return f"memory://{request.node.name}"
    if request.param == "file":
        return f"file://{tmp_path}/spool?sync=off"
    server: RedisServer = request.getfixturevalue("redis")
    return f"redis://127.0.0.1:{server.port}/{next(_dbs)}"


async def burst(tasks: Tasks) -> Worker:
    worker = Worker(tasks, WorkerOptions(burst=True), draw=lambda: 0.5)
    assert await worker.run()
    return worker


async def found(tasks: Tasks, state: State):
    return await list_messages(await tasks.backend(), "default", Query(state))


async def test_the_class_of_an_error_decides_whether_and_when_its_message_runs_again(app):
    @app.task(retry={ConnectionError: 1000, OSError: Delays(2000), ValueError: NoRetry})
    async def by_class(kind: str) -> None:
        raise {"connection": ConnectionResetError, "os": OSError, "value": UnicodeError, "other": KeyError}[kind]

    @app.task(retry_on=(OSError, TimeoutError), retry=500)
    def only(kind: str) -> None:
        raise {"os": ConnectionError, "value": ValueError}[kind]

    @app.task(retry_on=OSError, timeout=0.02)
    async def slow() -> None:
        await wait_until(lambda: False, timeout=60)

    @app.task(retry_on=OSError)
    async def decides(fails: bool) -> None:
        raise Fail("no") if fails else Retry("yes")

    # Nothing becomes due before it is listed, however long that takes.
    app.store._clock = FakeClock()
    for kind in ("connection", "os", "value", "other"):
        await by_class.enqueue(kind)
    await only.enqueue("os")
    await only.enqueue("value")
    await slow.enqueue()
    await decides.enqueue(False)
    await decides.enqueue(True)
    await burst(app)
    failed = {summary(one.error) for one in await app.found(State.FAILED)}
    assert failed == {"UnicodeError", "ValueError", "no"}
    delays = sorted(
        (round(one.due_at - one.message.enqueued_at, -2), summary(one.error)) for one in await app.found(State.DELAYED)
    )
    assert delays == [
        (0, "KeyError"),
        (0, "timed out after 0.02 seconds"),
        (0, "yes"),
        (500, "ConnectionError"),
        (1000, "ConnectionResetError"),
        (2000, "OSError"),
    ]


async def test_a_retry_that_does_not_count_leaves_the_tries_and_is_logged(url):
    tasks = Tasks(url)
    attempts = []

    @tasks.task(max_tries=1)
    def poll(ctx: Context) -> None:
        attempts.append((ctx.attempt, ctx.tries))
        if len(attempts) < 4:
            raise Retry("not ready yet", delay=0, counts=False)
        raise Retry("not ready yet", delay=1000, counts=False)

    await poll.enqueue()
    with structlog.testing.capture_logs() as logs:
        await burst(tasks)
    assert attempts == [(1, 0)] * 4
    (delayed,) = await found(tasks, State.DELAYED)
    assert (delayed.message.tries, delayed.error) == (0, None)
    assert delayed.due_at - delayed.message.enqueued_at > 900
    released = [entry for entry in logs if entry["event"] == "message_released"]
    assert [(entry["log_level"], entry["error"]) for entry in released] == [("info", "not ready yet")] * 4
    await tasks.aclose()


@pytest.mark.parametrize("wrong", [{"counts": 1}, {"delay": "5m"}, {"delay": float("nan")}])
async def test_a_wrong_argument_of_retry_fails_its_message_and_not_the_worker(app, wrong):
    @app.task(max_tries=1)
    async def work() -> None:
        raise Retry("later", **wrong)

    await work.enqueue()
    worker = await app.burst()
    assert worker.counts.failed == 1
    (failed,) = await app.found(State.FAILED)
    assert summary(failed.error).startswith("UsageError: ")


async def test_an_unlimited_task_runs_until_it_succeeds(app):
    seen = []

    @app.task(max_tries=None, retry=NOW)
    async def work(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.max_tries))
        if len(seen) < 40:
            raise ValueError("not yet")

    await work.enqueue()
    worker = await app.burst()
    assert seen == [(n, None) for n in range(1, 41)]
    assert (worker.counts.acked, worker.counts.failed) == (1, 0)


async def die(backend: Backend, times: int) -> None:
    """Let the message lose its lease as if its worker had died."""
    for _ in range(times):
        (lease,) = await backend.lease("default", 1, 60.0)
        await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="died", died=True)])


async def test_a_message_of_an_unlimited_task_that_kills_its_workers_fails_and_takes_no_neighbour_with_it(url):
    tasks = Tasks(url)
    ran = []

    @tasks.task(max_tries=None)
    async def work(name: str) -> None:
        ran.append(name)

    backend = await tasks.backend()
    await work.enqueue("poison")
    await die(backend, 5)
    await work.enqueue("neighbour")
    await burst(tasks)
    assert ran == ["neighbour"]
    (failed,) = await found(tasks, State.FAILED)
    assert failed.error.startswith("code: poison\n5 attempts in a row killed their process or lost their lease")
    await tasks.aclose()


async def test_deaths_in_a_row_count_and_failures_in_between_start_again(url):
    tasks = Tasks(url)

    @tasks.task(max_tries=None, retry=NOW)
    async def work() -> None: ...

    backend = await tasks.backend()
    await work.enqueue()
    for _ in range(3):
        await die(backend, 4)
        (lease,) = await backend.lease("default", 1, 60.0)
        assert lease.message.deaths == 4
        await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="raised")])
    worker = await burst(tasks)
    assert worker.counts.acked == 1
    await tasks.aclose()


async def test_a_task_that_polls_for_weeks_does_not_fail_after_the_deaths_of_some_workers(url):
    tasks = Tasks(url)

    @tasks.task(max_tries=None)
    async def poll() -> None:
        raise Retry("not ready yet", delay=1000, counts=False)

    backend = await tasks.backend()
    await poll.enqueue()
    await die(backend, 4)
    await burst(tasks)
    (stored,) = await found(tasks, State.DELAYED)
    assert (stored.message.tries, stored.message.deaths) == (4, 0)
    await tasks.aclose()


async def test_tries_beyond_what_a_store_can_count_keep_the_message_and_the_rule_of_deaths(url):
    tasks = Tasks(url)
    ran = []

    @tasks.task(max_tries=None)
    async def work() -> None:
        ran.append(1)

    backend = await tasks.backend()
    body = work.call().draft.body
    await backend.publish("default", [Draft(body=body, task="work", tries=999_999)])
    await die(backend, 5)
    (stored,) = await found(tasks, State.READY)
    assert (stored.message.deaths, stored.message.tries > 9_000) == (5, True)
    await burst(tasks)
    assert not ran
    (failed,) = await found(tasks, State.FAILED)
    assert "5 attempts in a row" in failed.error
    await tasks.aclose()


async def test_tries_on_redis_stay_at_65535(redis):
    tasks = Tasks(f"redis://127.0.0.1:{redis.port}/{next(_dbs)}")
    backend = await tasks.backend()
    await backend.publish("default", [Draft(body=b"", tries=65_534)])
    for expected in (65_534, 65_535, 65_535):
        (lease,) = await wait_until(lambda: backend.lease("default", 1, 60.0))
        assert lease.message.tries == expected
        await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="again")])
    await tasks.aclose()


def test_unlimited_tries_are_refused_at_registration_where_deaths_are_not_counted(tmp_path):
    def work() -> None: ...

    line = (
        "task 'work' has max_tries=None, but fsq: does not support unlimited tries (the name of an item counts its"
        " tries only): use file: or redis:, or give max_tries a number"
    )
    with pytest.raises(NotSupported) as refused:
        Tasks(f"fsq://{tmp_path}").task(max_tries=None)(work)
    assert str(refused.value) == line
    late = Tasks()
    late.task(max_tries=None)(work)
    with pytest.raises(NotSupported) as refused:
        late.url = f"fsq://{tmp_path}"
    assert str(refused.value) == line
    other = Tasks()
    other.task(max_tries=None)(work)
    with pytest.raises(NotSupported):
        Tasks(f"fsq://{tmp_path}").include(other)


APP = """
import os, signal
from qworker import NoRetry, Retry

def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

class Limited(ValueError): ...

def work(kind: str) -> None:
    if kind == "because":
        try:
            int("no number")
        except ValueError as error:
            raise Retry("rate limited", delay=1000) from error
    if kind == "uncounted":
        raise Retry("not yet", delay=1000, counts=False)
    raise {"limited": Limited, "value": ValueError}[kind]("no luck")
"""


def load(folder, monkeypatch):
    """Import the functions so that other processes can."""
    name = f"retry_policies_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(APP)
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    return module


async def test_the_fifth_process_in_a_row_that_an_unlimited_task_kills_is_the_last(app, tmp_path, monkeypatch):
    task = app.task(process=True, max_tries=None, retry=NoRetry)(load(tmp_path, monkeypatch).die)
    await task.enqueue()
    await die(app.store, 3)
    worker = Worker(app, WorkerOptions(burst=True), draw=lambda: 0.0)
    assert await worker.run()
    (failed,) = await app.found(State.FAILED)
    assert (failed.error, failed.message.tries) == ("code: poison\nthe handler's process died: killed by SIGKILL", 4)
    assert (worker.counts.retried, worker.counts.failed) == (1, 1)


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_policies_and_tracebacks_come_back_from_threads_and_processes(app, tmp_path, monkeypatch, kind):
    module = load(tmp_path, monkeypatch)
    work = app.task(process=kind == "process", retry={ValueError: 500, module.Limited: NoRetry})(module.work)
    for case in ("limited", "value", "because", "uncounted"):
        await work.enqueue(case)
    await app.burst(concurrency=1)
    (failed,) = await app.found(State.FAILED)
    assert summary(failed.error) == "Limited: no luck"
    delayed = {summary(one.error) if one.error else None: one for one in await app.found(State.DELAYED)}
    assert delayed.keys() == {"ValueError: no luck", "rate limited", None}
    assert "Traceback" in delayed["rate limited"].error
    assert 'int("no number")' in delayed["rate limited"].error
    assert delayed[None].message.tries == 0
