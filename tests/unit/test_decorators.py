"""Decorators of handlers: the outermost function is called, and what a caller gives is what it takes in the end."""

import functools
import inspect
from datetime import date
from typing import Any

import pytest

from qworker import Context, Tasks
from qworker.errors import InvalidArguments
from qworker.testing import run_until_idle

RAN: list[Any] = []


class Request:
    user = "someone"


class Session: ...


@pytest.fixture
def tasks(request):
    RAN.clear()
    return Tasks(f"memory://{request.node.name}")


async def ran(tasks: Tasks, task: Any, *args: Any, **kwargs: Any) -> list[Any]:
    await task.enqueue(*args, **kwargs)
    counts = await run_until_idle(tasks)
    assert counts.acked == 1, counts
    return RAN


def stored(function):
    """Adds a `Context`, with `functools.wraps`, which loses its annotation."""

    @functools.wraps(function)
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        RAN.append(context.task)
        return function(*args, **kwargs)

    return run


def stored_with_own_annotations(function):
    @functools.wraps(function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def run(job: Context, *args: Any, **kwargs: Any) -> Any:
        RAN.append(job.task)
        return function(*args, **kwargs)

    return run


def logged(function):
    """Hands on what it gets."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        RAN.append("logged")
        return function(*args, **kwargs)

    return run


def logged_async(function):
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        RAN.append("logged")
        return await function(*args, **kwargs)

    return run


def with_request(function):
    """Takes an argument out: no message can carry a `Request`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(Request(), *args, **kwargs)

    return run


def with_session(function):
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, session=Session(), **kwargs)

    return run


def signed(function):
    """Takes an argument out and a `Context` in, and says so."""

    @functools.wraps(function)
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        RAN.append(context.task)
        return function(Request(), *args, **kwargs)

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_ONLY, annotation=Context)
    run.__signature__ = signature.replace(parameters=[context, *parameters[1:]])
    return run


class Counted:
    """A decorator that is a class."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, context: Context, *args: Any, **kwargs: Any) -> Any:
        RAN.append(context.task)
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("decorator", [stored, stored_with_own_annotations, Counted])
async def test_a_decorator_may_add_a_context(tasks, decorator):
    @tasks.task
    @decorator
    def add(day: date, y: int) -> None:
        RAN.append((day, y))

    assert add.takes_context
    assert list(inspect.signature(add.enqueue).parameters) == ["day", "y"]
    assert await ran(tasks, add, date(2026, 1, 2), y=2) == ["add", (date(2026, 1, 2), 2)]
    for wrong in ((), (date(2026, 1, 2), 2, 3)):
        with pytest.raises(InvalidArguments):
            add.call(*wrong)


async def test_a_decorator_that_hands_on_leaves_the_signature_as_it_is(tasks):
    @tasks.task
    @logged_async
    async def add(context: Context, day: date, *, y: int = 1) -> None:
        RAN.append((context.task, day, y))

    assert await ran(tasks, add, date(2026, 1, 2)) == ["logged", ("add", date(2026, 1, 2), 1)]


async def test_a_decorator_may_take_the_context_and_hand_it_on(tasks):
    def both(function):
        @functools.wraps(function)
        def run(ctx: Context, *args: Any, **kwargs: Any) -> Any:
            return function(ctx, *args, **kwargs)

        return run

    @tasks.task
    @both
    def add(context: Context, x: int) -> None:
        RAN.append((context.task, x))

    assert await ran(tasks, add, 1) == [("add", 1)]


@pytest.mark.parametrize("decorator", [with_request, signed])
async def test_a_decorator_may_give_an_argument(tasks, decorator):
    @tasks.task
    @logged
    @decorator
    def send(request: Request, to: str, day: date) -> None:
        RAN.append((request.user, to, day))

    assert list(inspect.signature(send).parameters) == ["to", "day"]
    assert (await ran(tasks, send, "me", day=date(2026, 1, 2)))[-1] == ("someone", "me", date(2026, 1, 2))


async def test_a_decorator_may_give_an_argument_by_name(tasks):
    @tasks.task
    @stored
    @with_session
    def send(to: str, *, session: Session) -> None:
        RAN.append((to, type(session)))

    assert await ran(tasks, send, "me") == ["send", ("me", Session)]


async def test_what_a_decorator_gives_and_does_not_say_is_told_with_what_to_do(tasks):
    @tasks.task
    @with_request
    def send(request, to: str) -> None: ...

    with pytest.raises(
        InvalidArguments, match=r"missing a required argument: 'to'; .* decorator .* must set __signature__"
    ):
        send.call("me")


async def test_a_decorator_may_look_at_an_argument_by_its_name(tasks):
    def noted(function):
        @functools.wraps(function)
        def run(to: str, *args: Any, **kwargs: Any) -> Any:
            RAN.append(to)
            return function(to, *args, **kwargs)

        return run

    @tasks.task
    @noted
    def send(to: str, day: date) -> None:
        RAN.append(day)

    assert await ran(tasks, send, "me", date(2026, 1, 2)) == ["me", date(2026, 1, 2)]


async def test_a_decorator_may_ask_for_an_argument_of_its_own(tasks):
    def for_tenant(function):
        @functools.wraps(function)
        def run(tenant: str, *args: Any, dry: bool = False, **kwargs: Any) -> Any:
            RAN.append((tenant, dry))
            return function(*args, **kwargs)

        return run

    @tasks.task
    @for_tenant
    def send(to: str, /, day: date) -> None:
        RAN.append((to, day))

    assert await ran(tasks, send, "shop", "me", dry=True, day=date(2026, 1, 2)) == [
        ("shop", True),
        ("me", date(2026, 1, 2)),
    ]


async def test_a_wrapper_without_star_arguments_takes_what_it_says(tasks):
    def fixed(function):
        @functools.wraps(function)
        def run(context, day):
            RAN.append(context.task)
            return function(day, 7)

        return run

    @tasks.task
    @fixed
    def add(day: date, y: int) -> None:
        RAN.append((day, y))

    assert await ran(tasks, add, date(2026, 1, 2)) == ["add", (date(2026, 1, 2), 7)]


async def test_a_wrapper_hands_on_only_what_its_stars_can_carry(tasks):
    def by_name(function):
        @functools.wraps(function)
        def run(**kwargs: Any) -> Any:
            return function(**kwargs)

        return run

    @tasks.task
    @by_name
    def add(x: int, day: date) -> None:
        RAN.append((x, day))

    with pytest.raises(InvalidArguments):
        add.call(1, date(2026, 1, 2))
    assert await ran(tasks, add, x=1, day=date(2026, 1, 2)) == [(1, date(2026, 1, 2))]


async def test_a_cached_function_takes_what_it_wraps(tasks):
    @tasks.task
    @functools.cache
    def add(x: int, day: date) -> None:
        RAN.append((x, day))

    assert await ran(tasks, add, 1, day=date(2026, 1, 2)) == [(1, date(2026, 1, 2))]


async def test_a_raw_handler_may_be_decorated(tasks):
    @tasks.raw_handler()
    @stored
    def raw(message) -> None:
        RAN.append(message.body)

    from qworker import Draft

    backend = await tasks.backend()
    await backend.publish("default", (Draft(body=b"x"),))
    await run_until_idle(tasks)
    assert RAN == ["raw", b"x"]
