"""What cannot work is refused where it is written, in one line that says what to do."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from qworker import Backoff, Context, Message, Tasks
from qworker.errors import UsageError
from qworker.testing import run_until_idle


@pytest.fixture
def tasks(request):
    return Tasks(f"memory://{request.node.name}")


def refusal(attempt, kind=UsageError) -> str:
    with pytest.raises(kind) as raised:
        attempt()
    text = str(raised.value)
    assert "\n" not in text
    return text


def plain(a: int = 0) -> None: ...


BAD_OPTIONS = [
    ({"max_tries": 0}, "max_tries must be at least 1, or None for unlimited (got 0)"),
    ({"max_tries": 2.5}, "max_tries must be a whole number (got 2.5)"),
    ({"max_tries": "5"}, "max_tries must be a whole number (got '5')"),
    ({"max_tries": True}, "max_tries must be a whole number (got True)"),
    ({"timeout": 0}, "timeout must be more than 0 seconds (got 0)"),
    ({"timeout": "5m"}, "timeout must be a number of seconds (got '5m'): write timeout=300"),
    ({"timeout": "soon"}, "timeout must be a number of seconds (got 'soon')"),
    ({"timeout": math.nan}, "timeout must be a number of seconds (got nan)"),
    ({"timeout": math.inf}, "timeout must be a number of seconds (got inf)"),
    ({"timeout": True}, "timeout must be a number of seconds (got True)"),
    ({"timeout": 10**400}, "timeout must be a number of seconds"),
    ({"timeout": timedelta(0)}, "timeout must be more than 0 seconds"),
    ({"retry": -1}, "retry delays must not be negative (got -1)"),
    ({"retry": "5"}, "retry must be a policy such as Backoff(initial=5)"),
    ({"retry": {OSError: 5}, "fail_on": ValueError}, "retry= is a mapping: write ValueError: NoRetry into it"),
    ({"queue": 5}, "queue must be text (got 5)"),
    ({"queue": ["a"]}, "queue must be text (got ['a'])"),
    ({"process": "yes"}, "process must be True or False (got 'yes')"),
]


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS)
def test_an_option_of_a_handler_is_checked_when_it_is_given(tasks, options, text):
    assert refusal(lambda: tasks.task(**options)(plain)).startswith(f"task 'plain': {text}")
    assert refusal(lambda: tasks.task(plain, **options)).startswith(f"task 'plain': {text}")
    assert refusal(lambda: tasks.raw_handler(**options)(_raw)).startswith(f"handler '_raw': {text}")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority": 10}, "task 'plain': priority must be from 0 to 9 (got 10)"),
        ({"priority": True}, "task 'plain': priority must be a whole number (got True)"),
        ({"name": 5}, "name must be text (got 5)"),
        ({"name": ""}, "name must not be empty"),
    ],
)
def test_an_option_of_a_task_alone_is_checked_too(tasks, options, text):
    assert refusal(lambda: tasks.task(**options)(plain)).startswith(text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"initial": -1}, "Backoff: initial must be a number from 0 to 315360000 (got -1)"),
        ({"multiplier": "x"}, "Backoff: multiplier must be a number from 1 to 1000 (got 'x')"),
        ({"maximum": math.nan}, "Backoff: maximum must be a number from 0 to 315360000 (got nan)"),
        ({"maximum": math.inf}, "Backoff: maximum must be a number"),
        ({"multiplier": 0.5}, "Backoff: multiplier must be a number from 1 to 1000 (got 0.5)"),
        ({"initial": True}, "Backoff: initial must be a number"),
    ],
)
def test_a_backoff_is_checked_when_it_is_made(fields, text):
    assert refusal(lambda: Backoff(**fields)).startswith(text)


def test_a_backoff_takes_every_kind_of_number_and_counts_with_floats():
    backoff = Backoff(initial=Decimal("0.5"), maximum=10**6, multiplier=1000)
    assert (backoff.initial, backoff.max_delay(10**9)) == (0.5, 1e6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay": math.nan}, "delay must be a number of seconds (got nan)"),
        ({"delay": True}, "delay must be a number of seconds (got True)"),
        ({"delay": -1}, "delay must be at least 0 seconds (got -1)"),
        ({"delay": "10m"}, "delay must be a number of seconds (got '10m'): write delay=600"),
        ({"delay": 1e300}, "delay must be at most 315360000 seconds (got 1e+300)"),
        ({"delay": datetime(2026, 1, 1, tzinfo=UTC)}, "delay must be a number of seconds (got datetime.datetime"),
        ({"due_at": math.nan}, "due_at must be a datetime, or a number of Unix seconds (got nan)"),
        ({"due_at": True}, "due_at must be a datetime, or a number of Unix seconds (got True)"),
        ({"due_at": datetime(2026, 1, 1)}, "due_at must have a time zone (got 2026-01-01 00:00:00)"),  # noqa: DTZ001
        ({"due_at": 1.7e12}, "due_at must be a time in Unix seconds, before the year 10000"),
        ({"delay": 1, "due_at": 2}, "delay and due_at cannot be given together"),
        ({"priority": 10}, "priority must be from 0 to 9 (got 10)"),
        ({"priority": 1.0}, "priority must be a whole number (got 1.0)"),
        ({"unique_key": 5}, "unique_key must be text (got 5)"),
        ({"id": 5}, "id must be text (got 5)"),
        ({"queue": 5}, "queue must be text (got 5)"),
        ({"headers": {"attempt": 1}}, "headers must map text to text (got 'attempt': 1)"),
        ({"headers": {1: "a"}}, "headers must map text to text (got 1: 'a')"),
        ({"headers": "a=b"}, "headers must map text to text (got 'a=b')"),
    ],
)
def test_an_option_of_a_call_is_checked_when_it_is_given(tasks, options, text):
    task = tasks.task(plain)
    assert refusal(lambda: task.using(**options)).startswith(text)


def test_times_may_be_timedeltas(tasks):
    task = tasks.task(timeout=timedelta(minutes=5))(plain)
    assert task.options.timeout == 300.0
    assert tasks.raw_handler(timeout=timedelta(minutes=5))(_raw)
    assert tasks.raw_handlers["default"].options.timeout == 300.0
    assert task.using(delay=timedelta(minutes=1)).call().draft.delay == 60.0


def _raw(message: Message) -> None: ...


def test_headers_of_a_source_are_checked_where_they_are_used(tasks):
    task = tasks.task(plain)

    def sources() -> Any:
        return {"user": 5}

    tasks.add_header_source(sources)
    assert refusal(task.call) == "the headers of sources must map text to text (got 'user': 5)"
    assert "takes a function" in refusal(lambda: tasks.add_header_source({"a": "b"}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"max_retries": 3},
            "task() has no option 'max_retries': did you mean max_tries= (it counts the first run too)?",
        ),
        ({"queue_name": "q"}, "task() has no option 'queue_name': did you mean queue=?"),
        ({"time_limit": 3}, "task() has no option 'time_limit': did you mean timeout= (in seconds)?"),
        ({"countdown": 3}, "task() has no option 'countdown': did you mean task.using(delay=...) (in seconds)?"),
        ({"delay": 3}, "task() has no option 'delay': did you mean task.using(delay=...)?"),
        ({"bind": True}, "task() has no option 'bind': annotate the handler's first parameter with Context instead"),
        ({"acks_late": True}, "task() has no option 'acks_late': leave it out"),
        ({"priorty": 3}, "task() has no option 'priorty': did you mean priority=?"),
        (
            {"colour": 3},
            "task() has no option 'colour': it has name, queue, max_tries, timeout, retry, retry_on, fail_on, process",
        ),
    ],
)
def test_a_mistaken_option_of_a_task_names_the_one_that_was_meant(tasks, options, text):
    assert refusal(lambda: tasks.task(**options)).startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"countdown": 3}, "using() has no option 'countdown': did you mean delay= (in seconds)?"),
        ({"eta": 3}, "using() has no option 'eta': did you mean due_at= (Unix seconds or a datetime)?"),
        ({"delay_ms": 3}, "using() has no option 'delay_ms': did you mean delay= (in seconds)?"),
        ({"queue_name": "q"}, "using() has no option 'queue_name': did you mean queue=?"),
        ({"backoff": 3}, "using() has no option 'backoff': did you mean retry="),
        ({"header": {}}, "using() has no option 'header': did you mean headers=?"),
    ],
)
def test_a_mistaken_option_of_a_call_names_the_one_that_was_meant(tasks, options, text):
    assert refusal(lambda: tasks.task(plain).using(**options)).startswith(text)


def test_options_are_given_by_name(tasks):
    assert refusal(lambda: tasks.task(plain).using(5)).startswith(
        "using() takes its options by name (got 5): write using("
    )
    assert refusal(lambda: tasks.raw_handler(_raw)).startswith(
        "raw_handler() takes its options by name (got <function _raw"
    )
    assert (
        refusal(lambda: tasks.task("report"))
        == "@tasks.task: a name is given by keyword: write @tasks.task(name='report')"
    )
    assert refusal(lambda: Tasks("memory://", lifespans=None)).startswith(
        "Tasks() has no option 'lifespans': did you mean lifespan=?"
    )


def test_an_apps_own_options_are_checked_when_it_is_made():
    async def lifespan(app: Tasks) -> Any:
        yield app

    assert refusal(lambda: Tasks(Path("spool"))) == "url must be text (got PosixPath('spool'))"
    assert "write @asynccontextmanager above lifespan" in refusal(lambda: Tasks(lifespan=lifespan))
    assert "lifespan must be a function" in refusal(lambda: Tasks(lifespan=5))


@pytest.mark.parametrize("method", ["delay", "apply_async", "send", "kiq", "defer"])
def test_a_method_of_another_library_names_enqueue(tasks, method):
    task = tasks.task(plain)
    for owner in (task, task.using(delay=1)):
        assert "`await task.enqueue(...)`" in refusal(lambda owner=owner: getattr(owner, method), AttributeError)
        assert not hasattr(owner, method)
        assert method not in dir(owner)
        assert "enqueue" in dir(owner)


async def test_what_is_not_a_call_is_refused_by_enqueue_many(tasks):
    task = tasks.task(plain)
    for wrong in ([task], [1], [{"a": 1}]):
        with pytest.raises(
            UsageError, match=r"enqueue_many\(\) takes calls \(got .*\): make each with task.call\(...\)"
        ):
            await tasks.enqueue_many(wrong)


def test_a_mistaken_attribute_is_an_ordinary_attribute_error(tasks):
    refusal(lambda: tasks.task(plain).nonsense, AttributeError)


# -- what can be a handler -------------------------------------------------------------------------------------------


class Shop:
    def method(self, a: int) -> None: ...

    @staticmethod
    def static(a: int) -> None: ...

    @classmethod
    def of_class(cls, a: int) -> None: ...

    def __call__(self, a: int) -> None: ...


def generator(a: int) -> Any:
    yield a


async def async_generator(a: int) -> Any:
    yield a


class Iterating:
    def __call__(self, a: int) -> Any:
        yield a


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (generator, "generator has `yield`, so calling it runs nothing"),
        (async_generator, "async_generator has `yield`, so calling it runs nothing"),
        (Iterating(), "Iterating has `yield`, so calling it runs nothing"),
        (functools.partial(generator, 1), "generator has `yield`, so calling it runs nothing"),
        (lambda a: None, "a lambda cannot be a handler: write a function with `def`"),
        (Shop, "Shop is a class: decorate a function"),
        (vars(Shop)["static"], "a staticmethod object is not a function: write @staticmethod above @tasks."),
        (vars(Shop)["of_class"], "a classmethod object is not a function: move the function out of its class"),
        (Shop.method, "Shop.method is a method, but nothing passes its `self`"),
        (5, "a handler must be a function (got 5)"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)
def test_what_cannot_be_run_as_a_handler_is_refused_at_registration(tasks, function, problem):
    assert refusal(lambda: tasks.task(name="x")(function)).startswith(f"@tasks.task: {problem}")
    assert refusal(lambda: tasks.raw_handler()(function)).startswith(f"@tasks.raw_handler: {problem}")
    assert not tasks.registered_tasks
    assert not tasks.raw_handlers


def test_a_function_becomes_a_task_once(tasks):
    task = tasks.task(plain)
    assert refusal(lambda: tasks.task(task)) == "@tasks.task: 'plain' is already a task: decorate a function once"
    assert "is already a task" in refusal(lambda: tasks.raw_handler()(task))


async def test_instances_partials_and_bound_methods_are_handlers(tasks):
    ran: list[object] = []

    class Adder:
        def __init__(self, start: int) -> None:
            self.start = start

        def __call__(self, a: int) -> None:
            ran.append(("sync", self.start + a))

        def bound(self, context: Context, a: datetime) -> None:
            ran.append(("bound", context.task, a.year))

    class AsyncAdder(Adder):
        async def __call__(self, a: int) -> None:
            ran.append(("async", self.start + a))

    async def nested(self: int, context: Decimal, a: int) -> None:
        ran.append(("partial", self, context, a))

    handlers = [
        (tasks.task(Adder(10)), (1,), {}),
        (tasks.task(AsyncAdder(20)), (1,), {}),
        (tasks.task(Adder(0).bound), (datetime(2026, 1, 2, tzinfo=UTC),), {}),
        (tasks.task(functools.partial(nested, 1, a=5)), (Decimal("0.5"),), {}),
    ]
    assert [task.name for task, _, _ in handlers] == ["Adder", "AsyncAdder", "bound", "nested"]
    assert [task.kind for task, _, _ in handlers] == ["thread", "async", "thread", "async"]
    for task, args, kwargs in handlers:
        await task.enqueue(*args, **kwargs)
    counts = await run_until_idle(tasks, concurrency=1)
    assert counts.acked == 4
    assert ran == [("sync", 11), ("async", 21), ("bound", "bound", 2026), ("partial", 1, Decimal("0.5"), 5)]


def test_a_handler_in_a_process_is_found_by_its_name(tasks):
    for function in (Shop().method, functools.partial(plain, 1), Shop()):
        assert "process=True needs a function at the top level of a module" in refusal(
            lambda function=function: tasks.task(process=True)(function)
        )


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_whose_result_was_to_be_run_has_failed(tasks, is_async):
    """A decorator can hide a generator or a coroutine function.

    Its body does not run, so its message must not be acked.
    """

    async def later() -> None: ...

    if is_async:

        async def hiding(which: str) -> object:
            return later() if which == "coroutine" else generator(1)
    else:

        def hiding(which: str) -> object:
            return later() if which == "coroutine" else generator(1)

    task = tasks.task(max_tries=1)(hiding)
    for which in ("coroutine", "generator"):
        await task.enqueue(which)
    counts = await run_until_idle(tasks)
    assert (counts.acked, counts.failed) == (0, 2)


def test_a_raw_handler_takes_a_message(tasks):
    def nothing() -> None: ...

    def two(context: Any, message: Message) -> None: ...

    def with_context(context: Context, message: Message) -> None: ...

    for wrong in (nothing, two):
        assert "must take a Message" in refusal(lambda wrong=wrong: tasks.raw_handler()(wrong))
    tasks.raw_handler()(with_context)


def test_mocks_can_be_handlers(tasks):
    assert tasks.task(Mock()).call(1, a=2).draft.task == "Mock"
    assert tasks.task(AsyncMock()).kind == "async"


def test_a_field_that_cannot_be_read_is_refused_at_registration(tasks):
    @dataclass
    class Order:
        item: Nowhere  # noqa: F821

    def ship(order: Order) -> None: ...

    ship.__annotations__ = {"order": Order}
    assert "cannot be read: name 'Nowhere' is not defined; import what it names" in refusal(lambda: tasks.task(ship))


def test_an_argument_that_no_message_can_carry_is_refused_at_registration(tasks):
    class Client: ...

    def fetch(client: Client, url: str) -> None: ...

    def optional(url: str, client: Client | None = None, other: Client = Client()) -> None: ...  # noqa: B008

    fetch.__annotations__ = {"client": Client, "url": str}
    optional.__annotations__ = {"url": str, "client": Client | None, "other": Client}
    assert "no JSON value can become" in refusal(lambda: tasks.task(fetch))
    tasks.task(optional)
