"""The parameters of a handler.

Arguments are checked when a task is enqueued, and converted to the annotations when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from qworker.definition.callables import handler_name
from qworker.definition.parameters import can_be_json, is_injected, parameters_of
from qworker.definition.provided import Provided
from qworker.envelope import may_hold_not_finite
from qworker.errors import InvalidArguments, UsageError
from qworker.values import convert, encode, from_json

__all__ = ["Signature"]

_NOTHING: Any = object()
_SURPLUS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """The parameters of a handler, without the one that the worker fills.

    Args:
        function: The handler. `qworker.definition.parameters` finds its parameters through decorators.
        injected: The class of the parameter that the worker fills.
        name: The task's name. None: the name of the function.

    Raises:
        UsageError: An annotation cannot be read, or no JSON value can become it.
    """

    def __init__(self, function: Callable[..., Any], injected: type[Any], name: str | None = None) -> None:
        self.name = handler_name(function) if name is None else name
        parameters = parameters_of(function, injected)
        hints = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
        self.takes_injected = bool(parameters) and is_injected(parameters[0].annotation, injected)
        if self.takes_injected:
            parameters = parameters[1:]
        for parameter in parameters:
            if is_injected(parameter.annotation, injected):
                raise UsageError(f"{self.name}: {injected.__name__} must be the first parameter")
        # The end of the error text for a call that does not fit.
        self._hint = "; if a decorator gives one of them, it must set __signature__" if _decorated(function) else ""
        # The first parameter that the worker fills and a call could give by position.
        self._provided_next = next((p.name for p in parameters if _is_positional_provided(p)), None)
        self.provided, parameters = _without_provided(self.name, parameters)
        self._signature = inspect.Signature(parameters)
        self.returns = _returns(function)
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        self._positional_types = [_checked_type(self.name, hints.get(p.name, Any)) for p in positional]
        # The types by which alone a call of positional arguments can be accepted.
        self._quick = [_quick_type(wanted) for wanted in self._positional_types]
        self._required = sum(p.default is p.empty for p in positional)
        self._keyword_only_required = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
        self._positional_names = [p.name for p in positional]
        self._required_names = frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in _SURPLUS)
        self._star = self._type_of(parameters, hints, inspect.Parameter.VAR_POSITIONAL)
        self._double_star = self._type_of(parameters, hints, inspect.Parameter.VAR_KEYWORD)
        self._named = {
            p.name: _checked_type(self.name, hints.get(p.name, Any))
            for p in parameters
            if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
        }
        self._make_decoders()

    def _make_decoders(self) -> None:
        self._decoders = [_decoder(wanted) for wanted in self._positional_types]
        self._named_decoders = {name: _decoder(wanted) for name, wanted in self._named.items()}
        self._star_decoder, self._double_star_decoder = _decoder(self._star), _decoder(self._double_star)

    def __getstate__(self) -> dict[str, Any]:
        # Spark sends it to other processes, and decoders cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if not name.endswith(("_decoder", "_decoders"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_decoders()

    def _type_of(self, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any], kind: Any) -> Any:
        for parameter in parameters:
            if parameter.kind is kind:
                return _checked_type(self.name, hints.get(parameter.name, Any))
        return Any

    def check_json(self) -> None:
        """Check that a message can carry every required argument.

        Raises:
            UsageError: No JSON value can become an annotation.
        """
        for parameter in self._signature.parameters.values():
            optional = parameter.default is not parameter.empty or parameter.kind in _SURPLUS
            if not optional and not can_be_json(parameter.annotation):
                wanted = inspect.formatannotation(parameter.annotation)
                raise UsageError(
                    f"task {self.name!r}: no JSON value can become {wanted}, the annotation of {parameter.name!r}:"
                    " annotate what the message carries, such as an id or a path as text"
                )

    def shown(self, first: str | None = None, returns: Any = inspect.Signature.empty) -> inspect.Signature:
        """Return a signature with these parameters for `inspect.signature`, with `first` before them if it is given."""
        parameters = list(self._signature.parameters.values())
        if first is not None:
            parameters.insert(0, inspect.Parameter(first, inspect.Parameter.POSITIONAL_ONLY))
        return inspect.Signature(parameters, return_annotation=returns)

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that can be given by name, in order."""
        return list(self._named)

    def refuses_none(self, name: str) -> bool:
        """Return whether a parameter has a default and cannot be None. Without a value, leave such an argument out."""
        parameter = self._signature.parameters.get(name)
        if parameter is None or parameter.default is parameter.empty:
            return False
        try:
            self._one(name, None, self._named.get(name, Any))
        except InvalidArguments:
            return True
        return False

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check that the arguments of a call fit.

        Raises:
            InvalidArguments: An argument is missing, unknown or given twice.
        """
        if self._fits(args, kwargs):
            return
        self._check_provided(args, kwargs)
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArguments(f"task {self.name!r}: {error}; it takes {self._signature}{self._hint}") from error

    def check_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check that the values of a call fit the annotations, as they will in the worker.

        Args:
            args: The positional arguments, whose number fits.
            kwargs: The arguments by name, whose names fit.

        Raises:
            InvalidArguments: A value does not fit, or cannot be encoded.
        """
        # Most arguments have exactly the types of their annotations.
        if not kwargs and [*map(type, args)] == self._quick:
            return
        known = len(self._decoders)
        for i, value in enumerate(args):
            self._check_value(i + 1, value, self._decoders[i] if i < known else self._star_decoder)
        for name, value in kwargs.items():
            self._check_value(name, value, self._named_decoders.get(name, self._double_star_decoder))

    def _check_value(self, which: int | str, value: Any, decoder: msgspec.json.Decoder[Any] | None) -> None:
        if decoder is None or (type(value) is decoder.type and decoder.type in _QUICK):
            return
        try:
            decoder.decode(encode(value))
        except msgspec.ValidationError as error:
            # JSON has null for nan and infinity. The encoder of the call refuses them by their names.
            if not may_hold_not_finite(value):
                text = f"task {self.name!r}, argument {self._place(which)}: {_plain(error)}"
                raise InvalidArguments(text) from error
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
            # The encoder of the call refuses it.
            return

    def values(self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of some parameters in a call that fits, also those that are not given."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in names]

    def _check_provided(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check that no argument is for a parameter that the worker fills.

        Raises:
            InvalidArguments: One is.
        """
        if not self.provided:
            return
        given = next((name for name in self.provided if name in kwargs), None)
        if given is None and len(args) > len(self._positional_names):
            given = self._provided_next
        if given is not None:
            raise InvalidArguments(f"task {self.name!r} gets {given!r} by injection: do not pass it")

    def fits(self, count: int) -> bool:
        """Return whether a call with this number of positional arguments, and no other ones, fits."""
        return self.accepts((None,) * count, {})

    def accepts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call has all arguments that are needed and no other ones, whatever their values are."""
        try:
            self.check(args, kwargs)
        except InvalidArguments:
            return False
        return True

    def _fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call certainly fits.

        If the result is False, `bind` decides about surplus arguments and finds the error. It takes ten times as long.
        """
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
        """Convert arguments from JSON to the types of the annotations.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            strict: Whether to refuse a text for a number or a bool. A table of texts needs False.

        Raises:
            InvalidArguments: An argument does not fit. The text names it and says why.
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
            return convert(value, wanted, strict=strict)
        except msgspec.ValidationError as error:
            made = _with_truth_as_numbers(value, wanted)
            if made is not _NOTHING:
                return made
            raise InvalidArguments(f"task {self.name!r}, argument {self._place(which)}: {_plain(error)}") from error

    def _place(self, which: int | str) -> str:
        """Return an argument for an error text: its name, and the number of a positional one."""
        if isinstance(which, str):
            return which
        names = self._positional_names
        return f"{which} ({names[which - 1]})" if which <= len(names) else str(which)


# Types whose values are checked by their type alone. The encoder refuses nan and infinity.
_QUICK = frozenset({str, int, float, bool, bytes, dict, list})


def _decoder(wanted: Any) -> msgspec.json.Decoder[Any] | None:
    """Return the decoder of values of a type. None: every value fits."""
    return None if wanted is Any else msgspec.json.Decoder(wanted, dec_hook=from_json)


def _quick_type(wanted: Any) -> type | None:
    """Return the type if its values are checked by it alone. None: they are not."""
    return wanted if isinstance(wanted, type) and wanted in _QUICK else None


def _is_positional_provided(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, Provided) and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def _without_provided(
    name: str, parameters: list[inspect.Parameter]
) -> tuple[dict[str, Provided], list[inspect.Parameter]]:
    """Return the parameters that the worker fills, and the others. A message gives those behind one by name only.

    Raises:
        UsageError: One cannot be filled by name.
    """
    provided: dict[str, Provided] = {}
    left: list[inspect.Parameter] = []
    for parameter in parameters:
        if isinstance(parameter.default, Provided):
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(
                    f"task {name!r}: the injected parameter {parameter.name!r} must not be positional-only:"
                    " remove the `/` behind it"
                )
            provided[parameter.name] = parameter.default
        elif provided and parameter.kind is parameter.VAR_POSITIONAL:
            raise UsageError(
                f"task {name!r}: the injected parameter {next(iter(provided))!r} must come after *{parameter.name}"
            )
        elif provided and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            left.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        else:
            left.append(parameter)
    return provided, left


def _plain(error: msgspec.ValidationError) -> str:
    """Return the text of msgspec's error as a part of a sentence: `expected int, got str`."""
    text = str(error)
    return (text[:1].lower() + text[1:]).replace("`", "")


def _returns(function: Any) -> Any:
    """Return the annotation of the result as it is written."""
    try:
        annotations: Any = getattr(function, "__annotations__", None) or {}
    except NameError:
        # Python 3.14 evaluates annotations here, and they can name imports that only type checkers see.
        return inspect.Signature.empty
    return annotations.get("return", inspect.Signature.empty)


def _decorated(function: Any) -> bool:
    return hasattr(getattr(function, "func", function), "__wrapped__")


def _checked_type(name: str, wanted: Any) -> Any:
    if wanted is Any:
        return wanted
    try:
        msgspec.json.Decoder(wanted)
    except NameError as error:
        raise UsageError(
            f"task {name!r}: a field of {wanted!r} cannot be read: {error}; import what it names"
        ) from error
    except TypeError as error:
        raise UsageError(f"task {name!r}: no JSON value can become the annotation {wanted!r}: {error}") from error
    return wanted


def _with_truth_as_numbers(value: Any, wanted: Any) -> Any:
    """Convert a value with True and False as whole numbers, as Python does. `_NOTHING`: it does not fit either."""
    numbered = _numbered(value)
    if numbered is _NOTHING:
        return _NOTHING
    try:
        return convert(numbered, wanted)
    except msgspec.ValidationError:
        return _NOTHING


def _numbered(value: Any) -> Any:
    """Return a value with True and False as whole numbers. `_NOTHING`: the value has neither."""
    if value is True or value is False:
        return int(value)
    kind: Any = value.__class__
    if kind is list:
        made = [_numbered(item) for item in value]
        if all(item is _NOTHING for item in made):
            return _NOTHING
        return [old if new is _NOTHING else new for old, new in zip(value, made, strict=True)]
    if kind is dict:
        items = _numbered(list(value.values()))
        return _NOTHING if items is _NOTHING else dict(zip(value, items, strict=True))
    return _NOTHING
