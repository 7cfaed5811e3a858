"""A handler's parameters: checked when a task is enqueued, converted to their annotations when it runs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from qworker.errors import BadArguments, UsageError

__all__ = ["Signature"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """What a handler takes, without the parameters that the worker fills in (`injected`, by annotation)."""

    def __init__(self, function: Callable[..., Any], injected: type[Any]) -> None:
        self.name = getattr(function, "__name__", "handler")
        plain = inspect.signature(function)
        hints = _hints(function)
        parameters = list(plain.parameters.values())
        self.takes_injected = bool(parameters) and hints.get(parameters[0].name) is injected
        if self.takes_injected:
            parameters = parameters[1:]
        for parameter in parameters:
            if hints.get(parameter.name) is injected:
                raise UsageError(f"{self.name}: {injected.__name__} must be the first parameter")
        self._signature = inspect.Signature(parameters)
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        self._positional_types = [_checked_type(self.name, hints.get(p.name, Any)) for p in positional]
        self._required = sum(p.default is p.empty for p in positional)
        self._keyword_only_required = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
        self._positional_names = [p.name for p in positional]
        self._required_names = frozenset(
            p.name for p in parameters if p.default is p.empty and p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}
        )
        self._star = self._type_of(parameters, hints, inspect.Parameter.VAR_POSITIONAL)
        self._double_star = self._type_of(parameters, hints, inspect.Parameter.VAR_KEYWORD)
        self._named = {
            p.name: _checked_type(self.name, hints.get(p.name, Any))
            for p in parameters
            if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
        }

    def _type_of(self, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any], kind: Any) -> Any:
        for parameter in parameters:
            if parameter.kind is kind:
                return _checked_type(self.name, hints.get(parameter.name, Any))
        return Any

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that can be given by name, in order."""
        return list(self._named)

    def refuses_none(self, name: str) -> bool:
        """Whether a parameter has a default and cannot be None: where there is no value, it is left out."""
        parameter = self._signature.parameters.get(name)
        if parameter is None or parameter.default is parameter.empty:
            return False
        try:
            self._one(name, None, self._named.get(name, Any))
        except BadArguments:
            return True
        return False

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See that a call fits.

        Raises:
            BadArguments: an argument is missing, unknown or given twice.
        """
        if self._fits(args, kwargs):
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArguments(f"task {self.name!r}: {error}; it takes {self._signature}") from error

    def _fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call without surplus arguments fits; `bind`, which takes ten times as long, knows the rest, and what is wrong."""
        if not kwargs:
            return not self._keyword_only_required and self._required <= len(args) <= len(self._positional_types)
        by_position = self._positional_names[: len(args)]
        return (
            len(by_position) == len(args)
            and kwargs.keys() <= self._named.keys()
            and kwargs.keys().isdisjoint(by_position)
            and self._required_names.issubset((*by_position, *kwargs))
        )

    def convert(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments from JSON as the annotations want them.

        Args:
            args: by position.
            kwargs: by name.
            strict: otherwise a number or a truth value may also be a text that says it, as in a table of texts.

        Raises:
            BadArguments: they do not fit; says which and why.
        """
        self.check(args, kwargs)
        types = self._positional_types
        known = len(types)
        made = [
            self._one(i + 1, value, types[i] if i < known else self._star, strict=strict)
            for i, value in enumerate(args)
        ]
        if not kwargs:
            return made, {}
        named = self._named
        return made, {
            name: self._one(name, value, named.get(name, self._double_star), strict=strict)
            for name, value in kwargs.items()
        }

    def _one(self, which: int | str, value: Any, wanted: Any, *, strict: bool = True) -> Any:
        if wanted is Any or type(value) is wanted:
            return value
        try:
            return msgspec.convert(value, wanted, strict=strict, str_keys=True)
        except msgspec.ValidationError as error:
            raise BadArguments(f"task {self.name!r}: argument {which}: {error}") from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        name = getattr(function, "__name__", repr(function))
        raise UsageError(f"{name}: an annotation cannot be read: {error}; import what it names at run time") from error


def _checked_type(name: str, wanted: Any) -> Any:
    if wanted is Any:
        return wanted
    try:
        msgspec.json.Decoder(wanted)
    except TypeError as error:
        raise UsageError(f"task {name!r}: no JSON value can become the annotation {wanted!r}: {error}") from error
    return wanted
