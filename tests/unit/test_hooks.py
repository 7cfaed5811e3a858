"""Hooks run where the handler runs, see its arguments, its value and its error, and can change how it ends."""

import asyncio
import contextlib
import contextvars
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref

import msgspec
import pytest

from qworker import Backoff, Call, Context, Draft, Fail, Hook, Message, Retry, State, Tasks
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import UsageError
from qworker.message import Query, SettleAction, Settlement
from qworker.testing import enqueued_calls, in_memory, run_until_idle
from qworker.worker import Worker, WorkerOptions
from tests.unit.conftest import App

NOW = Backoff(initial=0.0)


class Recorder(Hook):
    """Notes what it sees, in both kinds of handlers."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def _note(self, what, attempt):
        self.seen.append((self.name, what, attempt.kind, attempt.result, attempt.error and str(attempt.error)))

    async def around(self, attempt, go):
        self._note("before", attempt)
        try:
            return await go()
        finally:
            self._note("after", attempt)

    def around_sync(self, attempt):
        self._note("before", attempt)
        try:
            yield
        finally:
            self._note("after", attempt)


def _register(app, kind, function, **options):
    if kind == "thread":
        return app.task(**options)(function)

    async def handler(*args, **kwargs):
        return function(*args, **kwargs)

    handler.__name__ = function.__name__
    return app.task(**options)(handler)


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_the_hooks_of_the_app_are_outside_of_those_of_the_task_in_order(kind):
    seen = []
    app = App(hooks=[Recorder("app-1", seen), Recorder("app-2", seen)])

    def work():
        seen.append("handler")
        return 7

    await _register(app, kind, work, hooks=[Recorder("task", seen)]).enqueue()
    worker = await app.burst()
    assert worker.counts.acked == 1
    assert [one if one == "handler" else one[:2] for one in seen] == [
        ("app-1", "before"),
        ("app-2", "before"),
        ("task", "before"),
        "handler",
        ("task", "after"),
        ("app-2", "after"),
        ("app-1", "after"),
    ]
    assert {one[2] for one in seen if one != "handler"} == {kind}
    # `around` has the value when `go` has returned, and `around_sync` after its `yield`.
    assert [one[3] for one in seen if one[1] == "after"] == [7, 7, 7]


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_hook_sees_the_error_and_its_message_is_retried(kind):
    seen = []
    app = App(hooks=[Recorder("app", seen)])

    def work():
        raise ValueError("no luck")

    await _register(app, kind, work, max_tries=1).enqueue()
    worker = await app.burst()
    assert worker.counts.failed == 1
    assert seen[-1] == ("app", "after", kind, None, "no luck")
    (failed,) = await app.found(State.FAILED)
    assert failed.error.endswith("ValueError: no luck")


class Both(Hook):
    """Runs one function around handlers of both kinds: `body(attempt, go)` is a generator."""

    def __init__(self, body):
        self.body = contextlib.contextmanager(body)

    async def around(self, attempt, go):
        with self.body(attempt):
            attempt.result = await go()
        return attempt.result

    def around_sync(self, attempt):
        return self.body(attempt)


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_hook_can_change_the_arguments_and_replace_the_value(kind):
    seen = []

    def body(attempt):
        attempt.args[0] += 1
        attempt.kwargs["more"] = "added"
        yield
        attempt.result *= 10

    app = App(hooks=[Recorder("app", seen)])

    def work(number, more=""):
        seen.append((number, more))
        return number

    async def handler(number: int, more: str = "") -> int:
        return work(number, more)

    hooks = [Both(body)]
    task = app.task(hooks=hooks, name="x")(handler if kind == "async" else work)
    await task.enqueue(1)
    await app.burst()
    assert seen[1] == (2, "added")
    assert seen[-1][3] == 20


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("outcome", ["fail", "retry", "swallow", "turn", "after"])
async def test_a_hook_can_choose_another_outcome(kind, outcome):
    def body(attempt):
        if outcome == "fail":
            raise Fail("not allowed")
        if outcome == "retry":
            raise Retry("too early", delay=1000)
        try:
            yield
        except ValueError as error:
            if outcome == "turn":
                raise Fail(error) from error
        if outcome == "after":
            raise Fail("afterwards")

    ran = []
    app = App()

    def work():
        ran.append(True)
        if outcome in {"swallow", "turn"}:
            raise ValueError("no luck")
        return 1

    await _register(app, kind, work, hooks=[Both(body)]).enqueue()
    worker = await app.burst()
    assert bool(ran) == (outcome not in {"fail", "retry"})
    counts = worker.counts
    expected = {"fail": (0, 0, 1), "retry": (0, 1, 0), "swallow": (1, 0, 0), "turn": (0, 0, 1), "after": (0, 0, 1)}
    assert (counts.acked, counts.retried, counts.failed) == expected[outcome]
    if outcome == "fail":
        assert [one.error for one in await app.found(State.FAILED)] == ["not allowed"]


async def test_plain_handlers_and_their_hooks_share_a_thread_and_context_variables():
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class Here(Hook):
        async def around(self, attempt, go):
            variable.set("from the hook")
            seen.append(threading.get_ident())
            return await go()

        def around_sync(self, attempt):
            variable.set("from the hook")
            seen.append(threading.get_ident())
            yield

    app = App(hooks=[Here()])

    @app.task
    def plain() -> None:
        seen.append((threading.get_ident(), variable.get()))

    @app.task
    async def loop() -> None:
        seen.append((threading.get_ident(), variable.get()))

    await plain.enqueue()
    await app.burst()
    await loop.enqueue()
    await app.burst()
    assert seen[1] == (seen[0], "from the hook")
    assert seen[3] == (seen[2], "from the hook")
    assert seen[0] != seen[2] == threading.get_ident()
    assert variable.get() == "unset"


async def test_the_hooks_of_the_app_run_around_raw_handlers_and_these_can_have_their_own():
    seen = []
    app = App(hooks=[Recorder("app", seen)])

    @app.raw_handler(queue="raw", hooks=[Recorder("own", seen)])
    async def raw(message: Message) -> None:
        seen.append(message.body)

    await app.store.publish("raw", [Draft(body=b"x")])
    await app.burst()
    assert [one if isinstance(one, bytes) else one[0] for one in seen] == ["app", "own", b"x", "own", "app"]


async def test_a_hook_knows_the_context_of_a_handler_that_takes_none():
    seen = []

    class Look(Hook):
        async def around(self, attempt, go):
            seen.append((attempt.task, attempt.context.attempt, attempt.context.message.id, list(attempt.args)))
            return await go()

    app = App(hooks=[Look()])

    @app.task
    async def without(number: int) -> None: ...

    @app.task
    async def having(ctx: Context, number: int) -> None:
        seen.append(ctx.message.id)

    first = await without.enqueue(1)
    await app.burst()
    second = await having.enqueue(2)
    await app.burst()
    # The context is not one of the arguments.
    assert seen == [("without", 1, first.id, [1]), ("having", 1, second.id, [2]), second.id]


async def test_a_timeout_reaches_the_hook_as_a_cancellation_and_is_retried():
    seen = []

    class Look(Hook):
        async def around(self, attempt, go):
            try:
                return await go()
            finally:
                seen.append(type(attempt.error))

    app = App(hooks=[Look()])

    @app.task(timeout=0.05, max_tries=1)
    async def hang() -> None:
        await asyncio.Event().wait()

    await hang.enqueue()
    worker = await app.burst()
    assert seen == [asyncio.CancelledError]
    assert worker.counts.failed == 1


def test_a_hook_that_would_be_left_out_is_refused_at_registration():
    class OnlyAround(Hook):
        async def around(self, attempt, go):
            return await go()

    class OnlySync(Hook):
        def around_sync(self, attempt):
            yield

    class ForThreads(OnlySync):
        kinds = frozenset({"thread"})

    class Wrong(Hook):
        kinds = frozenset({"threads"})

    app = Tasks("memory://")
    with pytest.raises(UsageError) as refused:
        app.task(hooks=[OnlyAround()])(plain)
    assert str(refused.value) == (
        "task 'plain' is a plain function, and hook OnlyAround has only around:"
        ' give it around_sync, or kinds = frozenset({"async"})'
    )
    with pytest.raises(UsageError) as refused:
        Tasks("memory://", hooks=[OnlySync()]).task(loop)
    assert str(refused.value) == (
        "task 'loop' is an async function, and hook OnlySync has only around_sync:"
        ' give it around, or kinds = frozenset({"thread", "process"})'
    )
    with pytest.raises(UsageError, match="has only around:"):
        app.raw_handler(hooks=[OnlyAround()])(plain)
    assert app.task(hooks=[ForThreads()])(loop).runner is None
    for wrong, text in [
        ([OnlyAround], "hooks takes objects (got the class OnlyAround): write OnlyAround()"),
        (OnlyAround(), "hooks must be a list of hooks (got "),
        (["x"], "a hook must be an object of a subclass of Hook (got 'x')"),
        ([Wrong()], "hook Wrong: kinds must be a set of async, process, thread (got "),
    ]:
        with pytest.raises(UsageError) as refused:
            Tasks("memory://", hooks=wrong)
        assert str(refused.value).startswith(text)


def plain() -> None: ...


async def loop() -> None: ...


# -- processes ---------------------------------------------------------------------------------------------------------

CHILD = """
import os
from collections.abc import Iterator
from qworker import Backoff, Hook, Message, Tasks, Fail, provide

class Note(Hook):
    def around_sync(self, attempt) -> Iterator[None]:
        attempt.args[0] = f"{os.getpid()} {attempt.kind}"
        yield
        attempt.result = ["replaced", attempt.result]

class Refuse(Hook):
    def around_sync(self, attempt):
        raise Fail("refused in the child")
        yield

tasks = Tasks("memory://hooks-child", hooks=[Note()])

@tasks.task(process=True)
def work(text: str) -> str:
    return text

@tasks.task(process=True, hooks=[Refuse()])
def refused(text: str) -> None: ...

@tasks.raw_handler(queue="raw", process=True)
def raw(text: Message) -> str:
    return str(text)

hidden = tasks.task(process=True, name="other")

def make(function=None):
    def inner(text: str) -> None: ...
    inner.__qualname__ = "nested"
    return inner
"""


def _import(name, text, tmp_path, monkeypatch):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


class Results:
    """An observer that wants every value."""

    def __init__(self):
        self.found = {}

    def handler_started(self, delivery):
        delivery.keep_result = True

    def message_settled(self, delivery, outcome, error, duration):
        self.found[delivery.task] = (str(outcome), delivery.result and json.loads(delivery.result.body), error)


async def test_hooks_of_a_process_handler_run_in_its_process(tmp_path, monkeypatch):
    app = _import(f"hooks_child_{os.getpid()}", CHILD, tmp_path, monkeypatch)
    await app.work.enqueue("given")
    await app.refused.enqueue("given")
    await (await app.tasks.backend()).publish("raw", [Draft(body=b"x")])
    worker = Worker(app.tasks, WorkerOptions(burst=True, concurrency=1))
    results = Results()
    worker.observers.append(results)
    async with asyncio.timeout(60):
        await worker.run()
    outcome, value, _ = results.found["work"]
    pid, kind = value[1].split()
    assert (outcome, value[0], kind) == ("acked", "replaced", "process")
    assert int(pid) != os.getpid()
    assert results.found["refused"] == ("failed", None, "refused in the child")
    outcome, value, _ = results.found["raw"]
    assert (outcome, value) == ("acked", ["replaced", f"{pid} process"])


@pytest.mark.parametrize("form", ["task", "raw"])
def test_a_process_handler_that_a_child_would_find_without_its_hooks_is_refused_at_worker_start(
    form, tmp_path, monkeypatch
):
    name = f"hooks_hidden_{os.getpid()}_{form}"
    register = (
        "tasks.task(process=True)(send)" if form == "task" else "tasks.raw_handler(process=True)(send)\nsend = None"
    )
    text = CHILD.partition("@tasks.task")[0] + f"def send(text: str) -> None: ...\n\n{register}\n"
    app = _import(name, text, tmp_path, monkeypatch)
    with pytest.raises(UsageError) as refused:
        Worker(app.tasks)
    assert str(refused.value) == "task 'send': process=True with hooks needs the task under its own name in the module"


SUSPECT = """
import os
from collections.abc import AsyncIterator
from qworker import Hook, Tasks

class Note(Hook):
    async def around(self, attempt, go):
        attempt.args[0] = f"{os.getpid()} {attempt.kind}"
        return ["replaced", await go()]

tasks = Tasks("memory://hooks-suspect", hooks=[Note()])

@tasks.task
async def work(text: str) -> str:
    return text
"""


async def test_hooks_of_a_message_that_has_killed_its_worker_run_in_the_process_of_suspects(tmp_path, monkeypatch):
    app = _import(f"hooks_suspect_{os.getpid()}", SUSPECT, tmp_path, monkeypatch)
    await app.work.enqueue("given")
    backend = await app.tasks.backend()
    (lease,) = await backend.lease("default", 1, 30)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, error="x", died=True)]) == []
    worker = Worker(app.tasks, WorkerOptions(burst=True, concurrency=1))
    results = Results()
    worker.observers.append(results)
    async with asyncio.timeout(60):
        await worker.run()
    outcome, value, _ = results.found["work"]
    assert (outcome, value[0]) == ("acked", "replaced")
    pid, kind = value[1].split()
    assert (int(pid) != os.getpid(), kind) == (True, "async")


SCRIPT = """
import asyncio, os, sys
from qworker import Hook, Tasks
from qworker.worker import Worker, WorkerOptions

class Note(Hook):
    def around_sync(self, attempt):
        attempt.args[0] = "hooked"
        yield

tasks = Tasks(hooks=[Note()] * (2 if __name__ == "__main__" and sys.argv[2] == "more" else 1))

@tasks.task(queue="other")
def stored(text: str) -> None: ...

@tasks.task(process=True, max_tries=1)
def work(text: str) -> None:
    stored.enqueue_sync(text)

if __name__ == "__main__":
    tasks.url = sys.argv[1]
    work.enqueue_sync("given")
    asyncio.run(Worker(tasks, WorkerOptions(burst=True, queues=("default",))).run())
"""


@pytest.mark.parametrize("hooks", ["same", "more"])
async def test_the_child_of_a_script_has_its_hooks_and_its_url_or_is_refused(tmp_path, hooks):
    (tmp_path / "script.py").write_text(SCRIPT)
    url = f"file://{tmp_path}/spool?sync=off"
    done = subprocess.run(
        [sys.executable, "script.py", url, hooks], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    backend = open_backend(url)
    try:
        if hooks == "same":
            (message,) = await list_messages(backend, "other", Query(State.READY))
            assert json.loads(message.message.body)["args"] == ["hooked"]
        else:
            (message,) = await list_messages(backend, "default", Query(State.FAILED))
            assert "task 'work' lacks hooks when its module is imported again" in (message.error or "")
    finally:
        await backend.aclose()


# -- publishing --------------------------------------------------------------------------------------------------------


class Mark(Hook):
    """Adds a header to each call."""

    def __init__(self):
        self.seen = []

    def publishing(self, call):
        self.seen.append((call.task, threading.get_ident()))
        return call.with_headers({"mark": str(len(self.seen))})


async def test_publishing_runs_once_for_each_call_in_the_thread_that_enqueues():
    mark = Mark()
    tasks = Tasks("memory://", hooks=[mark])

    @tasks.task
    async def work(number: int, *, more: list[int] | None = None) -> None: ...

    with in_memory(tasks):
        await work.using(headers={"own": "x"}).enqueue(1, more=[2])
        await tasks.enqueue_many(work.call(number) for number in (2, 3))
        found = await enqueued_calls(tasks)
        assert [(one.args, dict(one.kwargs), dict(one.headers)) for one in found] == [
            ((1,), {"more": [2]}, {"own": "x", "mark": "1"}),
            ((2,), {}, {"mark": "2"}),
            ((3,), {}, {"mark": "3"}),
        ]
        assert (await run_until_idle(tasks)).acked == 3
    own = []

    def enqueue():
        own.append(threading.get_ident())
        work.enqueue_sync(4)

    with in_memory(tasks):
        await asyncio.to_thread(enqueue)
    assert mark.seen[-1] == ("work", own[0])
    assert len(mark.seen) == 4


async def test_publishing_can_change_the_queue_and_must_return_a_call():
    class Move(Hook):
        answer = None

        def publishing(self, call):
            return self.answer or msgspec.structs.replace(call, queue="elsewhere")

    move = Move()
    tasks = Tasks("memory://", hooks=[move])

    @tasks.task
    async def work() -> None: ...

    with in_memory(tasks):
        assert (await work.enqueue()).queue == "elsewhere"
        move.answer = "x"
        with pytest.raises(UsageError, match=r"hook Move: publishing must return a Call \(got 'x'\)"):
            await work.enqueue()


def test_with_headers_leaves_the_arguments_as_they_are_written():
    body = b'{"task":"t","args":[1.0,123456789012345678901234567890,"\xc3\xa4"],"kwargs":{"a":null}}'
    call = Call("q", Draft(body=body, task="t"))
    more = call.with_headers({"a": "b"})
    assert more.draft.body == body[:-1] + b',"headers":{"a":"b"}}'
    assert more.headers == {"a": "b"}
    with pytest.raises(UsageError, match="headers must map text to text"):
        call.with_headers({"a": 1})


def test_with_headers_keeps_the_options_of_the_call():
    body = b'{"task":"t","args":[],"options":{"result":600,"later":[1]}}'
    more = Call("q", Draft(body=body, task="t")).with_headers({"a": "b"})
    assert more.draft.body == body[:-1].replace(b',"options"', b',"headers":{"a":"b"},"options"') + b"}"


# -- cost --------------------------------------------------------------------------------------------------------------


async def test_an_attempt_with_hooks_leaves_nothing_behind():
    class Wrap(Hook):
        async def around(self, attempt, go):
            attempts.append(weakref.ref(attempt.context))
            return await go()

        def around_sync(self, attempt):
            attempts.append(weakref.ref(attempt.context))
            yield

    class Seen(Context):
        __slots__ = ("__weakref__",)

    attempts = []
    app = App(hooks=[Wrap()])

    @app.task(max_tries=1)
    async def good() -> None: ...

    @app.task(max_tries=1)
    async def bad() -> None:
        raise ValueError

    @app.task(max_tries=1)
    def bad_thread() -> None:
        raise ValueError

    from qworker.worker import executor

    original = executor.Context
    executor.Context = Seen
    gc.disable()
    try:
        for task in (good, bad, bad_thread):
            await task.enqueue()
        worker = await app.burst(concurrency=1)
        assert (worker.counts.acked, worker.counts.failed) == (1, 2)
        assert len(attempts) == 3
        assert attempts[0]() is None
        # A traceback refers to the frames that know the context, as without hooks.
        gc.collect()
        assert [one() for one in attempts] == [None] * 3
    finally:
        gc.enable()
        executor.Context = original
