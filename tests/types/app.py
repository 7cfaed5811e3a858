"""An app as users write it: mypy and pyright, both strict, must find nothing here, and miss nothing that is marked.

A marked line that is no longer an error is one itself (`warn_unused_ignores`, `reportUnnecessaryTypeIgnoreComment`).
`make check` runs both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, assert_type

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session

from qworker import (
    Attempt,
    Backoff,
    Call,
    Context,
    FailedCall,
    Hook,
    Job,
    Message,
    NamedTask,
    Progress,
    Status,
    Task,
    Tasks,
    django,
    provide,
    sqlalchemy,
)

P = ParamSpec("P")
R = TypeVar("R")


class Pool:
    async def execute(self, statement: str) -> int:
        return len(statement)


@asynccontextmanager
async def lifespan(tasks: Tasks) -> AsyncGenerator[Pool]:
    yield Pool()


tasks = Tasks("memory://", lifespan=lifespan)
plain = Tasks()
assert_type(tasks, Tasks[Pool])
assert_type(plain, Tasks[Any])


# -- handlers and their state ------------------------------------------------------------------------------------------


@tasks.task
async def store(context: Context[Pool], row: int, *, note: str = "") -> int:
    assert_type(context.state, Pool)
    assert_type(context.max_tries, int | None)
    return await context.state.execute(note * row)


@tasks.task(name="other", queue="q", max_tries=3, timeout=timedelta(minutes=5), retry=Backoff(initial=5), priority=3)
def untyped(context: Context, row: int) -> None:
    assert_type(context.state, Any)


@tasks.task(process=True)
def plain_function(row: int) -> None: ...


@tasks.task
async def wrong_state(context: Context[int], row: int) -> None: ...


@plain.task
async def any_state(context: Context[Pool], row: int) -> None: ...


@tasks.raw_handler(queue="raw", timeout=5)
def raw(context: Context[Pool], message: Message) -> None: ...


def stored(function: Callable[P, R]) -> Callable[Concatenate[Context, P], R]:
    @wraps(function)
    def run(context: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return run


@tasks.task
@stored
def decorated(row: int) -> None: ...


# -- hooks, injection and failures -------------------------------------------------------------------------------------


class Timing(Hook):
    async def around(self, attempt: Attempt, go: Callable[[], Awaitable[object]]) -> object:
        return await go()

    def around_sync(self, attempt: Attempt) -> Iterator[None]:
        yield

    def publishing(self, call: Call) -> Call:
        return call.with_headers({"a": "b"})


class Managed(Hook):
    kinds = frozenset({"thread"})

    def around_sync(self, attempt: Attempt) -> AbstractContextManager[object]:
        return nullcontext()


hooked = Tasks("memory://", lifespan=lifespan, hooks=[Timing(), Managed()])
assert_type(hooked, Tasks[Pool])


async def session(context: Context) -> AsyncIterator[Pool]:
    yield Pool()


def connection() -> Iterator[Pool]:
    yield Pool()


async def connect() -> Pool:
    return Pool()


def make_pool() -> Pool:
    return Pool()


assert_type(provide(session), Pool)
assert_type(provide(connection), Pool)
assert_type(provide(connect), Pool)
assert_type(provide(make_pool, scope="worker"), Pool)
provide(make_pool, scope="app")  # type: ignore[call-overload]


@hooked.task
async def alert(failed: FailedCall, db: Pool = provide(session)) -> None:
    assert_type(failed.args, list[Any])


@hooked.task(hooks=[Timing()], on_failure=alert)
async def pay(context: Context[Pool], order: int, db: Pool = provide(session), *, note: str = "") -> int:
    return order


@hooked.task
async def wrong_provider(order: int, db: int = provide(session)) -> None: ...  # type: ignore[assignment]


async def injected() -> None:
    assert_type(await pay.enqueue(1, note="x"), Job[int])
    assert_type(await pay(1, db=Pool()), int)
    await pay.enqueue("1")  # type: ignore[call-overload]
    await pay.enqueue(1, note=5)  # type: ignore[call-overload]
    await pay.enqueue()  # type: ignore[call-overload]


# -- calls -------------------------------------------------------------------------------------------------------------


async def calls() -> None:
    assert_type(await store.enqueue(1, note="x"), Job[int])
    assert_type(store.enqueue_sync(1), Job[int])
    assert_type(await store(1), int)
    assert_type(decorated.call(1), Call)
    assert_type(untyped.using(delay=timedelta(seconds=5), headers={"a": "b"}).call(row=1), Call)
    assert_type(await tasks.enqueue_many([plain_function.call(1), any_state.call(2)]), list[Job[Any]])

    await store.enqueue("1")  # type: ignore[call-overload]
    await store.enqueue(1, no="x")  # type: ignore[call-overload]
    await store.using(delay=1).enqueue()  # type: ignore[call-overload]
    await wrong_state.enqueue(1)  # type: ignore[call-overload]
    store.delay(1)  # type: ignore[attr-defined]
    store.using(countdown=1)  # type: ignore[call-arg]
    store.using(delay="1")  # type: ignore[arg-type]


# -- jobs --------------------------------------------------------------------------------------------------------------


class Size:
    width: int


@tasks.task(result=timedelta(hours=1))
async def resize(context: Context[Pool], path: str) -> Size:
    context.progress(1, 2, text="page", data={"bytes": 5})
    return Size()


@tasks.task(result=3600)
def sizes(paths: list[str]) -> dict[str, Size]:
    return {}


async def jobs() -> None:
    job: Job[Size] = await resize.enqueue("a.png")
    assert_type(await job.result(timeout=10), Size)
    assert_type(await resize.using(result=600).enqueue("b.png"), Job[Size])
    assert_type(resize.using(result=None).enqueue_sync("b.png"), Job[Size])
    assert_type(resize.job("id"), Job[Size])
    assert_type(tasks.job("id", "default", Size), Job[Size])
    assert_type(tasks.job("id"), Job[Any])
    assert_type(await sizes.enqueue([]), Job[dict[str, Size]])
    assert_type(sizes.enqueue_sync([]).result_sync(timedelta(seconds=1)), dict[str, Size])
    assert_type(await plain_function.enqueue(1), Job[None])
    assert_type(await job.status(), Status)
    async for progress in job.progress():
        assert_type(progress.data, Mapping[str, object])
    for progress in job.progress_sync():
        assert_type(progress, Progress)
    async for status in tasks.jobs(state="failed", task=resize, queue="default"):
        assert_type(status.error, str | None)

    wrong: Job[str] = await resize.enqueue("a.png")  # type: ignore[assignment]
    resize.using(result="1h")  # type: ignore[arg-type]
    tasks.jobs(state="fail")  # type: ignore[arg-type]
    del wrong


def registering(function: Callable[[int], None], task: Task[[int], None]) -> None:
    tasks.task(max_retries=3)(function)  # type: ignore[call-overload]
    tasks.task(timeout="5m")(function)  # type: ignore[call-overload]
    tasks.task("name")  # type: ignore[call-overload]
    tasks.raw_handler(max_retries=3)  # type: ignore[call-arg]
    tasks.raw_handler(function)  # type: ignore[call-arg, arg-type]
    Tasks(url=5)  # type: ignore[arg-type]
    task.call("1")  # type: ignore[arg-type]


named = plain.named("mail.count", queue="mail", result=int)
assert_type(named, NamedTask[int])
assert_type(named.using(delay=60), NamedTask[int])
assert_type(plain.named("mail.send"), NamedTask[Any])
plain.include(Tasks(), prefix="lib.", queue="lib")


# -- calls that are sent later -----------------------------------------------------------------------------------------


async def later(rows: Session, async_rows: AsyncSession, scoped_rows: scoped_session[Session]) -> None:
    assert_type(sqlalchemy.enqueue_on_commit(rows, store, 1, note="x"), Job[int])
    assert_type(sqlalchemy.enqueue_on_commit(async_rows, store.using(delay=5), 1), Job[int])
    assert_type(sqlalchemy.enqueue_on_commit(scoped_rows, plain_function, 1), Job[None])
    assert_type(sqlalchemy.enqueue_on_commit(rows, named, 1), Job[int])
    assert_type(sqlalchemy.enqueue_on_commit(rows, store.call(1)), Job[Any])
    assert_type(django.enqueue_on_commit(store, 1), Job[int])
    assert_type(django.enqueue_on_commit(plain_function.using(id="1"), 1), Job[None])
    assert_type(django.enqueue_on_commit(store.call(1), database="other"), Job[Any])

    sqlalchemy.enqueue_on_commit(rows, store, "1")  # type: ignore[call-overload]
    sqlalchemy.enqueue_on_commit(store, 1)  # type: ignore[call-overload]
    django.enqueue_on_commit(store)  # type: ignore[call-overload]
    async with tasks.buffered():
        assert_type(await store.enqueue(1), Job[int])
    with tasks.buffered_sync():
        assert_type(store.enqueue_sync(1), Job[int])
