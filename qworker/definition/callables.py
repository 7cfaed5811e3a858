"""Callables as handlers: the valid ones, where each runs, and its name."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Literal

from qworker.errors import UsageError
from qworker.validation import shown

__all__ = ["Kind", "check_handler", "code_of", "handler_name", "kind_of", "not_run_error"]

Kind = Literal["async", "thread", "process"]


def handler_name(function: Any) -> str:
    """Return the default name of a handler: its function's name, or its class's name if it is an instance."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def check_handler(function: Any, decorator: str) -> None:
    """Check that a callable can be a handler.

    Args:
        function: The decorated object.
        decorator: The decorator as the user types it.

    Raises:
        UsageError: It cannot be a handler.
    """
    problem = _problem(function, decorator)
    if problem is not None:
        raise UsageError(f"{decorator}: {problem}")


def _problem(function: Any, decorator: str) -> str | None:
    if isinstance(function, str):
        return f"a name is given by keyword: write {decorator}(name={function!r})"
    if isinstance(function, (staticmethod, classmethod)):
        kind = "staticmethod" if isinstance(function, staticmethod) else "classmethod"
        advice = (
            "move the function out of its class" if kind == "classmethod" else f"write @staticmethod above {decorator}"
        )
        return f"a {kind} object is not a function: {advice}"
    if isinstance(function, type):
        return f"{function.__name__} is a class: decorate a function, or an instance that has __call__"
    if not callable(function):
        return f"a handler must be a function (got {shown(function)})"
    return _problem_of_function(function)


def _problem_of_function(function: Any) -> str | None:
    target = code_of(function)
    name = handler_name(function)
    if name == "<lambda>":
        return "a lambda cannot be a handler: write a function with `def`"
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        return (
            f"{name} has `yield`, so calling it runs nothing:"
            " remove `yield`, or call it from a handler that iterates over it"
        )
    if _is_method(function):
        return (
            f"{function.__qualname__} is a method, but nothing passes its `self`:"
            " move it out of the class, or register a bound method"
        )
    return None


def code_of(function: Any) -> Any:
    """Return the function that runs when `function` is called."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004 - the method itself is wanted


def _is_method(function: Any) -> bool:
    """Return whether it was defined in a class and is not bound to an instance."""
    qualname = getattr(function, "__qualname__", "")
    where = qualname.rpartition(".")[0]
    if not inspect.isroutine(function) or inspect.ismethod(function) or not where or where.endswith("<locals>"):
        return False
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (ValueError, TypeError):
        return False
    return first in {"self", "cls"}


def not_run_error(result: Any) -> TypeError | None:
    """Return the error of a handler that returned a coroutine or generator that never ran. None: its result is fine."""
    if isinstance(result, types.CoroutineType):
        result.close()
        return TypeError(
            "the handler returned a coroutine that was never awaited:"
            " declare it with `async def`, and await what it calls"
        )
    if isinstance(result, (types.GeneratorType, types.AsyncGeneratorType)):
        return TypeError(
            "the handler returned a generator that was never iterated over: iterate over it in the handler"
        )
    return None


def kind_of(function: Any, *, process: bool) -> Kind:
    """Return where a handler runs.

    Raises:
        UsageError: It cannot run in a process.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(code_of(function))
    if not process:
        return "async" if is_async else "thread"
    name = handler_name(function)
    if is_async:
        raise UsageError(f"task {name!r}: process=True needs a plain function: use `def`, not `async def`")
    if inspect.ismethod(function) or not hasattr(function, "__qualname__"):
        raise UsageError(
            f"task {name!r}: process=True needs a function at the top level of a module: write one that calls it"
        )
    return "process"
