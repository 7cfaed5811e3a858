"""Injection: `provide` as the default of a parameter, and the graph of providers, resolved once at registration."""

from __future__ import annotations

import inspect
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, overload

from qworker.context import Context
from qworker.definition.callables import code_of, handler_name
from qworker.definition.parameters import is_injected, parameters_of
from qworker.definition.provided import Provided, Scope
from qworker.errors import UsageError
from qworker.validation import shown

__all__ = ["Provider", "provide", "resolve"]

T = TypeVar("T")


@overload
def provide(f: Callable[..., AsyncIterator[T]], *, scope: Scope = "attempt") -> T: ...


@overload
def provide(f: Callable[..., Iterator[T]], *, scope: Scope = "attempt") -> T: ...


@overload
def provide(f: Callable[..., Awaitable[T]], *, scope: Scope = "attempt") -> T: ...


@overload
def provide(f: Callable[..., T], *, scope: Scope = "attempt") -> T: ...


def provide(f: Callable[..., Any], *, scope: Scope = "attempt") -> Any:
    """Let the worker fill a parameter: write it as the parameter's default. The message does not have it.

    Args:
        f: The provider: a function, or a generator with one `yield`, whose rest runs when the attempt or the worker
            ends. For an `async def` handler it can be asynchronous. It may have parameters annotated `Context`, and
            parameters whose default is another `provide(...)`.
        scope: `attempt`: one value for each attempt, closed before the outcome is stored. `worker`: one value for the
            worker, or for each process of handlers with `process=True`, closed when it ends.

    Raises:
        UsageError: `f` is not a function, or the scope is not known.
    """
    if not callable(f):
        raise UsageError(f"provide() takes a function (got {shown(f)})")
    if scope not in {"attempt", "worker"}:
        raise UsageError(f"provide({handler_name(f)}): scope must be 'attempt' or 'worker' (got {shown(scope)})")
    return Provided(f, scope)


class Provider(NamedTuple):
    """A resolved provider.

    Attributes:
        function: The function that makes the value.
        scope: How long a value is kept.
        contexts: The parameters that take the context of the attempt.
        needs: The providers of other parameters, by name.
    """

    function: Callable[..., Any]
    scope: Scope
    contexts: tuple[str, ...]
    needs: tuple[tuple[str, Provider], ...]

    @property
    def name(self) -> str:
        """The name of the function."""
        return handler_name(self.function)

    @property
    def key(self) -> tuple[Callable[..., Any], Scope]:
        """What two parameters have in common that get the same value."""
        return self.function, self.scope


def resolve(
    provided: Mapping[str, Provided], handler: str, kind: Literal["async", "thread", "process"]
) -> tuple[tuple[str, Provider], ...]:
    """Return the providers of a handler's parameters, by name.

    Args:
        provided: The parameters with a provider.
        handler: The name of the handler.
        kind: Where it runs.

    Raises:
        UsageError: Providers form a cycle, one is asynchronous for a plain function, or one has a parameter without a
            value.
    """
    resolver = _Resolver(handler, is_async=kind == "async")
    return tuple((name, resolver.resolve(one, ())) for name, one in provided.items())


class _Resolver:
    def __init__(self, handler: str, *, is_async: bool) -> None:
        self._handler = handler
        self._is_async = is_async
        self._known: dict[tuple[Callable[..., Any], Scope], Provider] = {}

    def resolve(self, provided: Provided, path: tuple[Callable[..., Any], ...]) -> Provider:
        function, scope = provided.function, provided.scope
        name = handler_name(function)
        if function in path:
            circle = " -> ".join(handler_name(one) for one in (*path[path.index(function) :], function))
            raise UsageError(f"providers {circle} form a cycle")
        known = self._known.get((function, scope))
        if known is not None:
            return known
        if not self._is_async and _is_async(function):
            raise UsageError(
                f"task {self._handler!r} is a plain function: provider {name} must be a plain function or generator"
            )
        contexts: list[str] = []
        needs: list[tuple[str, Provider]] = []
        for parameter in _parameters(function):
            default: Any = parameter.default
            if isinstance(default, Provided):
                self._check_scope(name, scope, default)
                needs.append((parameter.name, self.resolve(default, (*path, function))))
            elif is_injected(parameter.annotation, Context):
                if scope == "worker":
                    raise UsageError(
                        f"provider {name} has the scope 'worker', so it cannot take the Context of an attempt:"
                        " leave the parameter out"
                    )
                contexts.append(parameter.name)
            elif default is parameter.empty:
                raise UsageError(
                    f"provider {name}: parameter {parameter.name!r} has no value: give it a default, annotate it with"
                    " Context, or use provide(...)"
                )
        found = self._known[function, scope] = Provider(function, scope, tuple(contexts), tuple(needs))
        return found

    def _check_scope(self, name: str, scope: Scope, inner: Provided) -> None:
        if scope == "worker" and inner.scope == "attempt":
            raise UsageError(
                f"provider {name} has the scope 'worker', so it cannot take {handler_name(inner.function)}, which has"
                " the scope 'attempt'"
            )


def _is_async(function: Any) -> bool:
    code = code_of(function)
    return inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)


def _parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters that need a value.

    Raises:
        UsageError: One can be given by position only.
    """
    if isinstance(function, type):
        made: Any = vars(function).get("__init__") or getattr(function, "__init__", None)
        # A class that is written in C gets no arguments.
        found = parameters_of(made, Context)[1:] if isinstance(made, types.FunctionType) else []
    else:
        found = parameters_of(function, Context)
    for parameter in found:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UsageError(
                f"provider {handler_name(function)}: parameter {parameter.name!r} can be given by position only:"
                " remove the `/` behind it"
            )
    return [p for p in found if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
