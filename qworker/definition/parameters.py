"""The parameters of a handler, through its decorators.

A call goes to the outermost function and must fill its parameters. If it passes `*args` and `**kwargs` on to the
function that it wraps (`functools.wraps`), they are replaced by the parameters of that function. If a decorator sets
`__signature__`, that decides. `functools.wraps` replaces the wrapper's annotations by those of the wrapped function, so
the wrapper's own are lost.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from qworker.errors import UsageError
from qworker.values import is_known

__all__ = ["can_be_json", "is_injected", "parameters_of"]

Parameter = inspect.Parameter

_CONTEXT_NAMES = frozenset({"context", "ctx"})
_JSON_TYPES = (dict, list, str, int, float, bool, type(None))


class _Lost:
    """The annotation of a wrapper's own parameter."""


def is_injected(annotation: Any, injected: type[Any]) -> bool:
    """Return whether an annotation is `injected` or `injected[...]`."""
    return annotation is injected or typing.get_origin(annotation) is injected


def can_be_json(annotation: Any) -> bool:
    """Return whether some JSON value can become it. msgspec checks classes that it does not know with isinstance."""
    if annotation is Parameter.empty or annotation is Any:
        return True
    try:
        known = msgspec.inspect.type_info(annotation)
    except TypeError:
        return False
    except NameError:
        # A field's annotation cannot be read. The signature's own check reports it.
        return True
    return all(_is_possible(kind) for kind in _custom_types(known, set()))


def _is_possible(kind: type) -> bool:
    """Return whether a JSON value can become a class that msgspec does not know."""
    try:
        return is_known(kind) or any(issubclass(json_type, kind) for json_type in _JSON_TYPES)
    except TypeError:
        # A protocol that isinstance does not take.
        return True


def _custom_types(known: Any, seen: set[int]) -> Iterator[type]:
    """Yield the classes in a type that msgspec does not know."""
    if type(known) is tuple:
        for member in cast("tuple[object, ...]", known):
            yield from _custom_types(member, seen)
    elif isinstance(known, (msgspec.inspect.Type, msgspec.inspect.Field)) and id(known) not in seen:
        # Types can contain themselves.
        seen.add(id(known))
        if isinstance(known, msgspec.inspect.CustomType):
            yield known.cls
        for name in known.__struct_fields__:
            yield from _custom_types(getattr(known, name), seen)


def parameters_of(function: Any, injected: type[Any]) -> list[Parameter]:
    """Return the parameters in order. Their annotations are resolved, or `Parameter.empty` if there is none.

    Raises:
        UsageError: An annotation or the whole signature cannot be read.
    """
    found = _parameters(function, injected)
    return [p.replace(annotation=Parameter.empty) if p.annotation is _Lost else p for p in found]


def _parameters(function: Any, injected: type[Any]) -> list[Parameter]:
    if isinstance(function, functools.partial):
        inner = _stand_in(_parameters(function.func, injected))
        return _read_signature(functools.partial(inner, *function.args, **function.keywords))
    if inspect.ismethod(function):
        return _read_signature(types.MethodType(_stand_in(_parameters(function.__func__, injected)), function.__self__))
    # Not by `getattr`: a mock has every attribute.
    attributes: Any = getattr(function, "__dict__", None) or {}
    wrapped = attributes.get("__wrapped__")
    given = getattr(function, "__signature__", None)
    # `functools.wraps` copies a wrapped function's `__signature__` too.
    if isinstance(given, inspect.Signature) and given is not getattr(wrapped, "__signature__", None):
        return _resolve_annotations(list(given.parameters.values()), function)
    own = _own_parameters(function, wrapped, injected)
    return own if wrapped is None else _merge(own, _parameters(wrapped, injected), injected)


def _stand_in(parameters: list[Parameter]) -> Callable[..., Any]:
    def stand_in() -> None: ...

    vars(stand_in)["__signature__"] = inspect.Signature(parameters)
    return stand_in


def _read_signature(function: Any) -> list[Parameter]:
    try:
        return list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{_name(function)}: its parameters cannot be read: {error}; write a function that calls it"
        ) from error


# -- one function by itself --------------------------------------------------------------------------------------------


def _own_parameters(function: Any, wrapped: Any, injected: type[Any]) -> list[Parameter]:
    if not isinstance(function, types.FunctionType):
        call = getattr(function, "__call__", None)  # noqa: B004 - the method itself is wanted
        if inspect.ismethod(call):
            return _parameters(call, injected)
        # Written in C, such as what `functools.cache` makes.
        return _any_parameters() if wrapped is not None else _read_signature(function)
    # Another function object with the same code: without `__wrapped__` and a `__signature__` that were copied.
    bare = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    if _has_copied_annotations(function, wrapped):
        return [p.replace(annotation=_Lost) for p in _read_signature(bare)]
    annotations = _annotations(function)
    parameters = [p.replace(annotation=annotations.get(p.name, Parameter.empty)) for p in _read_signature(bare)]
    return _resolve_annotations(parameters, function)


def _any_parameters() -> list[Parameter]:
    return [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]


def _has_copied_annotations(function: Any, wrapped: Any) -> bool:
    """Return whether a wrapper has the annotations of the function that it wraps."""
    if wrapped is None:
        return False
    # Since Python 3.14 `functools.wraps` copies the function that creates them.
    makes = getattr(function, "__annotate__", None)
    if makes is not None:
        return makes is getattr(wrapped, "__annotate__", None)
    return _annotations(function) is getattr(wrapped, "__annotations__", None)


def _annotations(function: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = function.__annotations__
    except _UNREADABLE as error:
        raise _unreadable_error(function, error) from error
    return found


_UNREADABLE = (NameError, TypeError, AttributeError, SyntaxError)


def _unreadable_error(function: Any, error: Exception) -> UsageError:
    return UsageError(f"{_name(function)}: an annotation cannot be read: {error}; import what it names at run time")


def _resolve_annotations(parameters: list[Parameter], function: Any) -> list[Parameter]:
    """Return the parameters with resolved annotations instead of text."""
    inner = inspect.unwrap(function)
    names = {**getattr(function, "__globals__", {}), **getattr(inner, "__globals__", {})}

    def holder() -> None: ...

    holder.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not Parameter.empty}
    # Since Python 3.12.
    vars(holder)["__type_params__"] = getattr(function, "__type_params__", ())
    try:
        hints = typing.get_type_hints(holder, names)
    except _UNREADABLE as error:
        raise _unreadable_error(function, error) from error
    return [p.replace(annotation=_usable_hint(hints.get(p.name, Parameter.empty))) for p in parameters]


def _usable_hint(hint: Any) -> Any:
    """Return the hint, unless it is `P.args` or `P.kwargs`, which do not describe a single argument."""
    return Parameter.empty if isinstance(hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)) else hint


def _name(function: Any) -> str:
    name: str = getattr(function, "__name__", repr(function))
    return name


# -- a function and what it wraps --------------------------------------------------------------------------------------


def _merge(own: list[Parameter], inner: list[Parameter], injected: type[Any]) -> list[Parameter]:
    """Return the parameters of a wrapper that passes its `*args` and `**kwargs` on."""
    known = {p.name: p.annotation for p in inner}
    star = any(p.kind is p.VAR_POSITIONAL for p in own)
    double = any(p.kind is p.VAR_KEYWORD for p in own)
    named = [
        p.replace(annotation=_annotation_of(p, known, injected))
        for p in own
        if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}
    ]
    if not star and not double:
        return named
    if named and is_injected(named[0].annotation, injected):
        inner = inner[1:] if inner and is_injected(inner[0].annotation, injected) else inner
    taken = {p.name for p in named}
    left = [p for p in inner if p.name not in taken and not _is_filled_in(p, injected)]
    rest = _reachable(left, star=star, double=double)
    if any(p.kind is p.POSITIONAL_ONLY for p in rest):
        named = [p.replace(kind=p.POSITIONAL_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in named]
    together = sorted([*named, *rest], key=lambda p: p.kind)
    try:
        inspect.Signature(together)
    except ValueError:
        # Such as a default before a parameter without one, which no signature can have.
        return own
    return together


def _annotation_of(parameter: Parameter, known: Mapping[str, Any], injected: type[Any]) -> Any:
    """Return the annotation of a wrapper's own parameter. If it is lost, it is that of the same name inside."""
    if parameter.annotation is not _Lost:
        return parameter.annotation
    if parameter.name not in known and parameter.name.strip("_") in _CONTEXT_NAMES:
        return injected
    return known.get(parameter.name, Parameter.empty)


def _reachable(inner: list[Parameter], *, star: bool, double: bool) -> list[Parameter]:
    """Return the inner parameters that a call reaches through `*args` (`star`) and `**kwargs` (`double`)."""
    reached: list[Parameter] = []
    for parameter in inner:
        kind = parameter.kind
        if kind is Parameter.POSITIONAL_OR_KEYWORD and not (star and double):
            kind = Parameter.POSITIONAL_ONLY if star else Parameter.KEYWORD_ONLY
        by_position = kind in {Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL}
        by_name = kind in {Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD}
        if (by_position and not star) or (by_name and not double):
            continue
        reached.append(parameter.replace(kind=kind))
    return reached


def _is_filled_in(parameter: Parameter, injected: type[Any]) -> bool:
    """Return whether a decorator must fill it, because no message can and it has no default."""
    if parameter.default is not parameter.empty or is_injected(parameter.annotation, injected):
        return False
    return not can_be_json(parameter.annotation)
