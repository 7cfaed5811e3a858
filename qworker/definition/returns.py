"""The type of a handler's result."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Coroutine
from datetime import timedelta
from typing import Any

from qworker.definition.parameters import can_be_json
from qworker.errors import UsageError
from qworker.validation import shown

__all__ = ["check_result_type", "check_returns", "result_type"]


def result_type(function: Any) -> Any:
    """Return the type to which the result of a handler is decoded. `Any` if its annotation says none."""
    returns = _annotation(function)
    return returns if can_be_json(returns) else Any


def check_result_type(name: str, function: Any) -> None:
    """Check that JSON can hold the result of a task.

    Raises:
        UsageError: No JSON value can become the annotation of the result.
    """
    returns = _annotation(function)
    if not can_be_json(returns):
        raise UsageError(
            f"task {name!r}: no JSON value can become {inspect.formatannotation(returns)}, the annotation of its"
            " result: return what JSON can hold, or leave out result="
        )


def check_returns(name: str, returns: Any) -> None:
    """Check the type that a caller gives for the result of a task.

    Raises:
        UsageError: No JSON value can become it.
    """
    if isinstance(returns, (int, float, timedelta)):
        raise UsageError(
            f"task {name!r}: result= is a type here (got {shown(returns)}): write .using(result=...) for the time"
        )
    if not can_be_json(returns):
        raise UsageError(
            f"task {name!r}: no JSON value can become {inspect.formatannotation(returns)}: give result= another type"
        )


def _annotation(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    try:
        returns = typing.get_type_hints(target, include_extras=True).get("return", Any)
    except Exception:  # noqa: BLE001 - it evaluates annotations of the app, which can name what only type checkers see
        return Any
    # A wrapper of an `async def` handler can be annotated so.
    if typing.get_origin(returns) in {Awaitable, Coroutine}:
        returns = typing.get_args(returns)[-1]
    # A type variable of a decorator, such as R of Callable[P, R], stands for any type.
    return Any if isinstance(returns, typing.TypeVar) else returns
