"""Injected parameters: filled where the handler runs, closed before the outcome is stored, no part of the message."""

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog

from qworker import Backoff, Context, Hook, State, Tasks, provide
from qworker.errors import InvalidArguments, UsageError
from qworker.worker import Worker, WorkerOptions
from tests.unit.conftest import App
from tests.unit.test_hooks import Results, _import


class Log(list):
    """What happened, in order."""


@pytest.fixture
def log():
    return Log()


async def test_every_kind_of_provider_fills_a_parameter_of_an_async_handler(app, log):
    async def agen(ctx: Context) -> AsyncIterator[str]:
        log.append(f"open agen {ctx.task}")
        yield "agen"
        log.append("close agen")

    def gen() -> Iterator[str]:
        log.append("open gen")
        yield "gen"
        log.append("close gen")

    async def coroutine(inner: str = provide(agen)) -> str:
        return f"coroutine of {inner}"

    def plain() -> str:
        return "plain"

    class Made:
        def __init__(self, ctx: Context) -> None:
            self.task = ctx.task

    @app.task
    async def work(
        ctx: Context,
        number: int,
        a: str = provide(agen),
        b: str = provide(gen),
        c: str = provide(coroutine),
        d: str = provide(plain),
        e: Made = provide(Made),
        more: int = 5,
    ) -> None:
        log.append((number, a, b, c, d, e.task, more))

    await work.enqueue(1, more=6)
    worker = await app.burst()
    assert worker.counts.acked == 1
    # `agen` is opened once for the attempt.
    handler = (1, "agen", "gen", "coroutine of agen", "plain", "work", 6)
    assert log == ["open agen work", "open gen", handler, "close gen", "close agen"]


async def test_a_plain_handler_and_its_providers_share_a_thread(app, log):
    def gen() -> Iterator[int]:
        log.append(threading.get_ident())
        yield 1
        log.append(threading.get_ident())

    @app.task
    def work(value: int = provide(gen)) -> None:
        log.append(threading.get_ident())

    await work.enqueue()
    await app.burst()
    assert len(log) == 3
    assert len(set(log)) == 1
    assert log[0] != threading.get_ident()


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("swallows", [False, True])
async def test_a_provider_sees_the_error_and_cannot_hide_it(app, log, kind, swallows):
    def gen() -> Iterator[int]:
        try:
            yield 1
        except ValueError:
            log.append("rolled back")
            if not swallows:
                raise

    def work(value: int = provide(gen)) -> None:
        raise ValueError("no luck")

    async def handler(value: int = provide(gen)) -> None:
        raise ValueError("no luck")

    await app.task(max_tries=1, name="work")(work if kind == "thread" else handler).enqueue()
    worker = await app.burst()
    assert log == ["rolled back"]
    assert worker.counts.failed == 1
    assert (await app.found(State.FAILED))[0].error.endswith("ValueError: no luck")


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_an_error_while_a_provider_closes_is_the_outcome(app, kind):
    def gen() -> Iterator[int]:
        yield 1
        raise OSError("commit failed")

    def work(value: int = provide(gen)) -> None: ...

    async def handler(value: int = provide(gen)) -> None: ...

    await app.task(max_tries=1, name="work")(work if kind == "thread" else handler).enqueue()
    worker = await app.burst()
    assert worker.counts.failed == 1
    assert (await app.found(State.FAILED))[0].error.endswith("OSError: commit failed")


async def test_providers_are_closed_before_the_settlement_and_inside_of_hooks(log):
    class Outside(Hook):
        async def around(self, attempt, go):
            log.append("hook before")
            assert attempt.kwargs == {}
            value = await go()
            log.append("hook after")
            return value

    app = App(hooks=[Outside()])
    app.store.hook = lambda call: log.append(call) if call == "settle" else None

    async def agen() -> AsyncIterator[int]:
        log.append("open")
        yield 1
        log.append("close")

    @app.task
    async def work(value: int = provide(agen)) -> None:
        log.append("handler")

    await work.enqueue()
    await app.burst()
    assert log == ["hook before", "open", "handler", "close", "hook after", "settle"]


async def test_values_of_the_worker_are_opened_once_and_closed_at_drain_before_the_lifespan(log):
    def plain() -> Iterator[str]:
        log.append("open plain")
        yield "plain"
        log.append("close plain")

    async def agen(inner: str = provide(plain, scope="worker")) -> AsyncIterator[str]:
        task = asyncio.current_task()
        log.append(f"open agen of {inner}")
        yield "agen"
        # In the task in which it was opened.
        log.append(f"close agen {asyncio.current_task() is task}")

    import contextlib

    @contextlib.asynccontextmanager
    async def lifespan(_app):
        yield
        log.append("lifespan over")

    app = App(lifespan=lifespan)

    @app.task
    async def loop(a: str = provide(agen, scope="worker"), b: str = provide(plain, scope="worker")) -> None:
        await asyncio.sleep(0)
        assert (a, b) == ("agen", "plain")

    @app.task
    def thread(b: str = provide(plain, scope="worker")) -> None:
        assert b == "plain"

    for _ in range(20):
        await loop.enqueue()
        await thread.enqueue()
    worker = await app.burst(concurrency=8)
    assert worker.counts.acked == 40
    assert log == ["open plain", "open agen of plain", "close agen True", "close plain", "lifespan over"]


@pytest.mark.parametrize("form", ["generator", "coroutine", "plain"])
async def test_a_value_of_the_worker_that_cannot_be_opened_is_opened_again_by_the_next_attempt(app, log, form):
    def attempt() -> str:
        log.append("open")
        if len(log) == 1:
            raise OSError("not yet")
        return "pool"

    async def coroutine() -> str:
        return attempt()

    async def generator() -> AsyncIterator[str]:
        yield attempt()

    make = {"generator": generator, "coroutine": coroutine, "plain": attempt}[form]

    @app.task(retry=Backoff(initial=0.0))
    async def work(pool: str = provide(make, scope="worker")) -> None:
        assert pool == "pool"

    await work.enqueue()
    worker = await app.burst()
    assert (worker.counts.retried, worker.counts.acked) == (1, 1)
    assert log == ["open", "open"]


async def test_an_attempt_that_is_cancelled_while_a_value_of_the_worker_opens_leaves_it_to_the_others(app, log):
    go = asyncio.Event()

    async def slow() -> AsyncIterator[str]:
        log.append("open")
        await go.wait()
        yield "pool"
        log.append("close")

    @app.task(timeout=0.05, retry=Backoff(initial=0.0), max_tries=50)
    async def work(pool: str = provide(slow, scope="worker")) -> None:
        log.append(pool)

    # It opens once an attempt has timed out.
    app.store.hook = lambda call: go.set() if call == "settle" else None
    await work.enqueue()
    worker = await app.burst()
    assert worker.counts.acked == 1
    assert worker.counts.retried >= 1
    assert log == ["open", "pool", "close"]


async def test_an_error_while_a_value_of_the_worker_closes_is_logged_and_the_others_are_closed(app, log):
    def first() -> Iterator[int]:
        yield 1
        log.append("closed")

    def second() -> Iterator[int]:
        yield 2
        raise OSError("it is gone")

    @app.task
    async def work(a: int = provide(first, scope="worker"), b: int = provide(second, scope="worker")) -> None: ...

    await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        await app.burst()
    assert log == ["closed"]
    (line,) = [line for line in logs if line["event"] == "provider_failed"]
    assert (line["provider"], line["error"]) == ("second", "OSError: it is gone")


# -- the message -------------------------------------------------------------------------------------------------------


def pool() -> int:
    return 1


async def session() -> AsyncIterator[int]:
    yield 1


async def test_an_injected_parameter_is_no_part_of_the_message(app):
    @app.task
    async def pay(order: int, db: int = provide(session), note: str = "") -> None: ...

    @app.task
    def keyword_only(*, db: int = provide(pool)) -> None: ...

    await pay.enqueue(17, note="x")
    expected = "task 'pay' gets 'db' by injection: do not pass it"
    for args, kwargs in [((17,), {"db": 1}), ((17, 5), {}), ((17, 5, "x"), {})]:
        with pytest.raises(InvalidArguments) as refused:
            await pay.enqueue(*args, **kwargs)
        assert str(refused.value) == expected
    with pytest.raises(InvalidArguments, match="too many positional arguments"):
        await keyword_only.enqueue(1)
    assert str(inspect.signature(pay)) == "(order: int, *, note: str = '') -> None"
    worker = await app.burst()
    assert worker.counts.acked == 1


async def test_a_message_with_an_injected_argument_fails(app):
    from qworker import Draft

    @app.task
    async def pay(order: int, db: int = provide(session)) -> None: ...

    # Another version of the app may have enqueued it, so it waits first.
    app.unknown_for = 0.0
    await app.store.publish("default", [Draft(body=b'{"task":"pay","args":[1],"kwargs":{"db":1}}')])
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert failed.error == "code: arguments\ntask 'pay' gets 'db' by injection: do not pass it"


async def test_a_worker_ends_although_a_provider_never_opens(app):
    opening = asyncio.Event()

    async def pool() -> int:
        opening.set()
        await asyncio.Event().wait()
        return 1

    @app.task
    async def work(one: int = provide(pool, scope="worker")) -> None: ...

    await work.enqueue()
    async with app.working() as (_, running):
        async with asyncio.timeout(20):
            await opening.wait()
    assert running.done()


async def test_a_direct_call_takes_what_it_is_given(app):
    @app.task
    async def pay(order: int, db: int = provide(session)) -> int:
        return order + db

    assert await pay(1, db=2) == 3
    with pytest.raises(UsageError, match=r"only a worker injects 'db': give db=\.\.\."):
        await pay(1)


def test_what_cannot_be_injected_is_refused_at_registration():
    app = Tasks("memory://")

    def refuse(function, text):
        with pytest.raises(UsageError) as refused:
            app.task(function)
        assert str(refused.value) == text

    def send(db: int = provide(session)) -> None: ...

    refuse(send, "task 'send' is a plain function: provider session must be a plain function or generator")

    def repo(s: int = provide(pool)) -> int:
        return 1

    def circle(r: int = provide(repo)) -> int:
        return 1

    repo.__defaults__ = (provide(circle),)

    def pay(c: int = provide(circle)) -> None: ...

    refuse(pay, "providers circle -> repo -> circle form a cycle")

    def needy(url: str) -> int:
        return 1

    def use(n: int = provide(needy)) -> None: ...

    refuse(
        use,
        "provider needy: parameter 'url' has no value: give it a default, annotate it with Context, or use"
        " provide(...)",
    )

    def of_attempt(ctx: Context) -> int:
        return 1

    def wide(ctx: Context) -> int:
        return 1

    def use_wide(n: int = provide(wide, scope="worker")) -> None: ...

    refuse(
        use_wide,
        "provider wide has the scope 'worker', so it cannot take the Context of an attempt: leave the parameter out",
    )

    def wider(n: int = provide(of_attempt)) -> int:
        return 1

    def use_wider(n: int = provide(wider, scope="worker")) -> None: ...

    refuse(
        use_wider,
        "provider wider has the scope 'worker', so it cannot take of_attempt, which has the scope 'attempt'",
    )

    def only(a: int, db: int = provide(pool), /) -> None: ...

    refuse(only, "task 'only': the injected parameter 'db' must not be positional-only: remove the `/` behind it")

    def starred(db: int = provide(pool), *rest: int) -> None: ...

    refuse(starred, "task 'starred': the injected parameter 'db' must come after *rest")
    with pytest.raises(UsageError, match=r"provide\(\) takes a function \(got 5\)"):
        provide(5)
    with pytest.raises(UsageError, match="scope must be 'attempt' or 'worker'"):
        provide(pool, scope="app")


async def test_a_plain_function_that_returns_something_asynchronous_fails_a_plain_handler(app):
    def sneaky():
        return session()

    @app.task(max_tries=1)
    def work(db: int = provide(sneaky)) -> None: ...

    await work.enqueue()
    await app.burst()
    (failed,) = await app.found(State.FAILED)
    assert failed.error.endswith("TypeError: provider sneaky is asynchronous, and its handler is a plain function")


async def test_a_decorated_handler_gets_its_injected_parameters(app, log):
    import functools

    def logged(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            log.append("decorator")
            return function(*args, **kwargs)

        return run

    @app.task
    @logged
    def work(number: int, db: int = provide(pool)) -> None:
        log.append((number, db))

    await work.enqueue(3)
    await app.burst()
    assert log == ["decorator", (3, 1)]


# -- processes ---------------------------------------------------------------------------------------------------------

CHILD = """
import os
from collections.abc import Iterator
from qworker import Context, Tasks, provide

tasks = Tasks("memory://injection-child")
opened = []

def pool() -> Iterator[str]:
    opened.append(1)
    yield f"{os.getpid()} {len(opened)}"
    with open(os.environ["CLOSED"], "a") as file:
        file.write(f"{os.getpid()}\\n")

def session(ctx: Context, text: str = provide(pool, scope="worker")) -> Iterator[str]:
    yield f"{text} {ctx.task}"

# No hooks: the function's name is enough.
@(lambda function: (tasks.task(process=True)(function), function)[1])
def work(number: int, value: str = provide(session)) -> str:
    return f"{value} {number}"
"""


async def test_the_values_of_a_worker_are_opened_once_in_each_process_and_closed_with_it(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    monkeypatch.setenv("CLOSED", str(closed))
    app = _import(f"injection_child_{os.getpid()}", CHILD, tmp_path, monkeypatch)
    work = app.tasks["work"]
    values = []

    class Every(Results):
        def message_settled(self, delivery, outcome, error, duration):
            super().message_settled(delivery, outcome, error, duration)
            values.append(self.found["work"][1])

    for number in range(3):
        await work.enqueue(number)
    worker = Worker(app.tasks, WorkerOptions(burst=True, concurrency=1))
    worker.observers.append(Every())
    async with asyncio.timeout(60):
        await worker.run()
    pid = values[0].split()[0]
    assert sorted(values) == [f"{pid} 1 work {number}" for number in range(3)]
    assert int(pid) != os.getpid()
    assert closed.read_text() == f"{pid}\n"
