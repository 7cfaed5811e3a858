"""Options of one call travel with it, and count in the worker instead of the task's own."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest

from qworker import Call, Context, Delays, Draft, FailedCall, State, Tasks, Unique
from qworker.backend.listing import list_messages
from qworker.cli.main import main
from qworker.envelope import open_envelope
from qworker.errors import JobFailed, NotSupported, UsageError
from qworker.message import Query
from qworker.testing.wait_until import wait_until
from qworker.tools.explain import explain
from qworker.worker import Worker, WorkerOptions
from tests.support.servers import RedisServer, free_port

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
    worker = Worker(tasks, WorkerOptions(burst=True), draw=lambda: 0.0)
    assert await worker.run()
    return worker


async def found(tasks: Tasks, state: State):
    return await list_messages(await tasks.backend(), "default", Query(state))


async def test_options_of_a_call_count_instead_of_those_of_the_task(url):
    tasks = Tasks(url)
    seen = []

    @tasks.task(max_tries=5, timeout=60, retry=Delays(0))
    async def work(ctx: Context, name: str) -> int:
        seen.append((name, ctx.max_tries, ctx.attempt, ctx.tries, ctx.deadline is not None))
        if name == "fails":
            raise ValueError(name)
        if name == "hangs":
            await wait_until(lambda: False, timeout=60)
        return 7

    await work.using(max_tries=2).enqueue("fails")
    await work.using(timeout=timedelta(milliseconds=20), max_tries=1).enqueue("hangs")
    job = await work.using(timeout=None, max_tries=None, result=timedelta(minutes=1)).enqueue("free")
    await burst(tasks)
    assert sorted(seen) == [
        ("fails", 2, 1, 0, True),
        ("fails", 2, 2, 1, True),
        ("free", None, 1, 0, False),
        ("hangs", 1, 1, 0, True),
    ]
    assert await job.result(timeout=5) == 7
    failed = sorted(one.error.splitlines()[-1] for one in await found(tasks, State.FAILED))
    assert failed == ["ValueError: fails", "timed out after 0.02 seconds"]
    await tasks.aclose()


def test_a_call_knows_only_the_options_that_were_given():
    tasks = Tasks("memory://options")

    @tasks.task
    async def work() -> None: ...

    assert work.call().draft.body == b'{"task":"work","args":[]}'
    assert work.using(delay=5).call().draft.body == b'{"task":"work","args":[]}'
    assert work.using(timeout=5, max_tries=1, result=60, expires=timedelta(minutes=2)).call().draft.body == (
        b'{"task":"work","args":[],"options":{"result":60.0,"timeout":5.0,"max_tries":1,"expires":120.0}}'
    )


async def test_a_call_that_has_expired_fails_unrun_with_its_code(url):
    tasks = Tasks(url)
    ran, reports = [], []

    @tasks.task
    async def report(failed: FailedCall) -> None:
        reports.append((failed.id, failed.code))

    @tasks.task(on_failure=report)
    async def work(name: str) -> None:
        ran.append(name)

    old = await work.using(expires=0.001).enqueue("old")
    await work.using(expires=3600).enqueue("new")
    backend = await tasks.backend()
    await wait_until(lambda: expired(backend, old))
    await burst(tasks)
    assert ran == ["new"]
    (failed,) = await found(tasks, State.FAILED)
    assert failed.error == "code: expired\nit expired: it was not started within 0.001 seconds of its enqueue"
    assert (failed.message.id, reports) == (old.id, [(old.id, "expired")])
    await tasks.aclose()


async def test_who_waits_for_the_result_of_a_call_that_has_expired_gets_its_code(url):
    tasks = Tasks(url)

    @tasks.task(result=60)
    async def work() -> int:
        return 1

    job = await work.using(expires=0.001).enqueue()
    backend = await tasks.backend()
    await wait_until(lambda: expired(backend, job))
    await burst(tasks)
    with pytest.raises(JobFailed) as failed:
        await job.result(timeout=5)
    assert failed.value.code == "expired"
    await tasks.aclose()


async def expired(backend, job) -> bool:
    """Whether the store's time is later than the end of the call."""
    (stored,) = await backend.find("default", [job.id])
    now = (await backend.reap("default")).now or stored.message.enqueued_at + 1
    return now > stored.message.enqueued_at + 0.001


async def test_explain_says_when_a_call_expires_and_what_its_policy_is(app):
    @app.task(retry=Delays(5, 10, 20))
    async def work() -> None:
        raise ValueError("no")

    job = await work.using(expires=3600, max_tries=3).enqueue()
    told = {reason.code: reason.text for reason in (await explain(app.store, "default", job.id, app)).reasons}
    (stored,) = await app.store.find("default", [job.id])
    end = datetime.fromtimestamp(stored.message.enqueued_at + 3600, UTC)
    assert told["expires"] == f"it expires at {end:%Y-%m-%d %H:%M:%SZ}"
    await app.burst()
    told = {reason.code: reason.text for reason in (await explain(app.store, "default", job.id, app)).reasons}
    assert told["retry-policy"] == "its retry policy is Delays(5, 10, 20), tries 1 of 3"


async def test_explain_leaves_out_an_expiry_that_no_worker_heeds(app):
    @app.task
    async def work() -> None: ...

    body = msgspec.json.encode({"task": "work", "args": [], "options": {"expires": -1}})
    (foreign,) = await app.store.publish("default", [Draft(body=body)])
    assert "expires" not in {reason.code for reason in (await explain(app.store, "default", foreign, app)).reasons}


BAD = [
    ({"timeout": 0}, "timeout must be more than 0 seconds (got 0)"),
    ({"max_tries": 0}, "max_tries must be at least 1, or None for unlimited (got 0)"),
    ({"expires": 0}, "expires must be more than 0 seconds (got 0)"),
    ({"expires": 60, "delay": 60}, "expires must be longer than delay (got 60 and 60 seconds)"),
    ({"expires": 60, "due_at": datetime(2100, 1, 1, tzinfo=UTC)}, "expires must be longer than delay (got 60 and "),
    ({"delay": 1, "due_at": 5.0}, "delay and due_at cannot be given together: leave one out"),
    ({"delay": float("nan")}, "delay must be a number of seconds (got nan)"),
    ({"due_at": float("inf")}, "due_at must be a datetime, or a number of Unix seconds (got inf)"),
    ({"due_at": datetime(2026, 11, 24, 8, tzinfo=None)}, "due_at must have a time zone (got 2026-11-24 08:00:00)"),  # noqa: DTZ001
    ({"headers": {"a": 1}}, "headers must map text to text (got 'a': 1)"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[text for _, text in BAD])
def test_a_wrong_option_of_a_call_is_refused_at_once(options, text):
    tasks = Tasks("memory://bad-options")

    @tasks.task
    async def work() -> None: ...

    for owner in (work, work.call(), tasks.named("elsewhere")):
        with pytest.raises(UsageError) as refused:
            owner.using(**options)
        assert str(refused.value).startswith(text)


def test_a_call_with_an_expiry_gets_no_longer_delay():
    tasks = Tasks("memory://expiry")

    @tasks.task
    async def work() -> None: ...

    call = work.using(expires=60).call()
    with pytest.raises(UsageError, match=r"^expires must be longer than delay \(got 60 and 90 seconds\)$"):
        call.using(delay=90)
    assert call.using(delay=90, expires=120).draft.delay == 90
    assert call.using(delay=30).draft.body == call.draft.body


def test_a_moment_is_a_number_or_a_datetime_with_any_zone():
    tasks = Tasks("memory://moments")

    @tasks.task
    async def work() -> None: ...

    moment = datetime(2030, 1, 1, 8, tzinfo=timezone(timedelta(hours=2)))
    assert work.using(due_at=moment).call().draft.due_at == moment.timestamp()
    assert work.call().using(due_at=moment).draft.due_at == moment.timestamp()
    assert tasks.named("work").using(delay=timedelta(minutes=1)).call().draft.delay == 60.0


def test_options_on_a_call_change_only_what_is_given():
    tasks = Tasks("memory://calls")

    @tasks.task(hold=60, priority=3)
    async def say(text: str) -> None: ...

    first: Call = say.using(timeout=5, due_at=2e9, headers={"a": "1"}).call("hello")
    call = first.using(delay=60, max_tries=2, headers={"b": "2"}, id="x" * 100, queue="other", unique_key="k")
    opened = open_envelope(call.draft.body)
    assert (opened.args, opened.options.timeout, opened.options.max_tries) == (["hello"], 5.0, 2)
    assert opened.headers == {"a": "1", "b": "2", "qworker-id": "x" * 100}
    assert (call.queue, call.draft.delay, call.draft.due_at) == ("other", 60.0, None)
    assert (call.draft.hold, call.draft.priority, call.draft.unique_key) == (60.0, 3, "k")
    assert call.draft.id.startswith("sha256-")
    again = call.using(timeout=None, due_at=2e9)
    assert open_envelope(again.draft.body).options.timeout is None
    assert (again.draft.delay, again.draft.due_at, again.draft.id) == (0.0, 2e9, call.draft.id)
    assert first.using().draft == first.draft


def test_options_that_a_store_does_not_support_are_refused_at_the_call(tmp_path):
    tasks = Tasks(f"fsq://{tmp_path}")

    @tasks.task
    async def work() -> None: ...

    for owner in (work, work.call(), tasks.named("work")):
        for options in ({"max_tries": None}, {"result": 5}):
            with pytest.raises(NotSupported):
                owner.using(**options)
    for owner in (work, tasks.named("work")):
        with pytest.raises(NotSupported):
            owner.using(unique=Unique(key="k"))


async def test_a_worker_that_does_not_know_an_option_or_its_range_runs_the_call(app):
    seen = []

    @app.task(max_tries=4, timeout=50)
    async def work(ctx: Context) -> None:
        seen.append((ctx.max_tries, ctx.deadline is not None))

    for options in ({"colour": "red"}, {"timeout": -1, "max_tries": 0, "expires": -1}, {"timeout": 1e300}):
        body = msgspec.json.encode({"task": "work", "args": [], "options": options})
        await app.store.publish("default", [Draft(body=body)])
    await app.burst()
    assert seen == [(4, True)] * 3


async def test_a_store_that_counts_no_deaths_runs_no_call_without_a_limit(tmp_path):
    """Such a call comes from another program, or was moved there from another store."""
    tasks = Tasks(f"fsq://{tmp_path}")
    seen = []

    @tasks.task(max_tries=4, timeout=50)
    async def work(ctx: Context) -> None:
        seen.append((ctx.max_tries, ctx.deadline))

    body = msgspec.json.encode({"task": "work", "args": [], "options": {"max_tries": None, "timeout": None}})
    backend = await tasks.backend()
    await backend.create("default")
    await backend.publish("default", [Draft(body=body)])
    await burst(tasks)
    assert seen == [(4, None)]
    await tasks.aclose()


def test_the_command_line_has_the_options_of_a_call(tmp_path, monkeypatch, capsys):
    (tmp_path / "options_app.py").write_text(
        f"from qworker import Tasks\ntasks = Tasks('file://{tmp_path}/spool')\n"
        "@tasks.task\ndef work(a: int) -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = "--delay 60 --id order-17 --hold 1d --timeout 5 --max-tries 1 --result 60"
    command = ["enqueue", "options_app:tasks", "work", "1", *arguments.split(), "--expires", "2m"]
    assert main(command) == 0
    assert capsys.readouterr().out.strip() == "order-17"
    (item,) = (tmp_path / "spool/default/delay").iterdir()
    assert msgspec.json.decode(item.read_bytes())["options"] == {
        "result": 60.0,
        "timeout": 5.0,
        "max_tries": 1,
        "expires": 120.0,
    }
    assert main([*command[:4], "--expires", "1s", "--delay", "2s"]) == 2


def test_the_environment_of_other_commands_changes_no_call(tmp_path, monkeypatch):
    """`qworker health --timeout` and `qworker scan --max-tries` mean something else."""
    (tmp_path / "environment_app.py").write_text(
        f"from qworker import Tasks\ntasks = Tasks('file://{tmp_path}/spool?sync=off')\n"
        "@tasks.task\ndef work() -> None: ...\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.qworker]\ntimeout = "3s"\nmax-tries = 2\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QWORKER_TIMEOUT", "2s")
    monkeypatch.setenv("QWORKER_MAX_TRIES", "0")
    assert main(["enqueue", "environment_app:tasks", "work"]) == 0
    (item,) = (tmp_path / "spool/default/queue").iterdir()
    assert "options" not in msgspec.json.decode(item.read_bytes())
