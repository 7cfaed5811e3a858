"""The envelope: the JSON object that a task call becomes in a message's body. Described for other languages in docs/envelope.md.

{"task": "thumbnail", "args": ["a.png"], "kwargs": {"width": 640}, "headers": {"traceparent": "00-..."}}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from qworker.errors import InvalidArguments

__all__ = ["Envelope", "EnvelopeEncoder", "open_envelope"]


class Envelope(msgspec.Struct, frozen=True, gc=True):
    """A decoded envelope.

    Attributes:
        task: The task's name.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        headers: What travels with the call.
    """

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] = {}


class _Head(msgspec.Struct, frozen=True):
    task: str


_decode = msgspec.json.Decoder(Envelope).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_WITHOUT_NUMBERS = frozenset({str, int, bool, bytes})
# Several times as fast as `in`, for small bodies and for large ones.
_find_null = re.compile(b"null").search
_pack = msgspec.msgpack.Encoder().encode
# What a packed number begins with that is nan or infinite; other bytes may look like it.
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]", re.DOTALL)
_encode = msgspec.json.Encoder().encode


def open_envelope(body: bytes) -> Envelope | tuple[str, str] | None:
    """Read a body.

    Returns:
        The envelope; or, for an object that names a task but is damaged, the task's name and what is wrong; or None for a
        body that is no envelope.
    """
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        problem = str(error)
    except (UnicodeDecodeError, RecursionError):
        return None
    try:
        return _decode_head(body).task, problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class EnvelopeEncoder:
    """Makes one task's envelopes; what is the same in all of them is encoded once."""

    __slots__ = ("_head", "_task")

    def __init__(self, task: str) -> None:
        self._task = task
        self._head = b'{"task":' + _encode(task) + b',"args":'

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], headers: dict[str, str]) -> bytes:
        """The body for a call.

        Raises:
            InvalidArguments: an argument has no JSON form.
        """
        try:
            given = _encode(args)
            if kwargs:
                given += b',"kwargs":' + _encode(kwargs)
            # nan and infinity become null, which the worker would take for None, or refuse.
            if _find_null(given):
                self._check_numbers(args, kwargs)
            body = self._head + given
            if headers:
                body += b',"headers":' + _encode(headers)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidArguments(f"task {self._task!r}: an argument cannot be encoded as JSON: {error}") from error
        return body + b"}"

    def _check_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for which, value in (*enumerate(args, 1), *kwargs.items()):
            if value is None or value.__class__ in _WITHOUT_NUMBERS:
                continue
            number = _not_finite(msgspec.to_builtins(value)) if _may_hold_not_finite(value) else None
            if number is not None:
                raise InvalidArguments(
                    f"task {self._task!r}: argument {which}: JSON cannot contain {number}: use None or text instead"
                )


def _may_hold_not_finite(value: Any) -> bool:
    """A quick look, which is never wrong when it says no."""
    try:
        return _NOT_FINITE.search(_pack(value)) is not None
    except OverflowError:
        # Of a whole number that JSON has room for.
        return True


def _not_finite(value: Any) -> float | None:
    """The first number in it that is nan or infinite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    # As `to_builtins` makes them.
    kind: Any = value.__class__
    values: Iterable[Any] = value.values() if kind is dict else value if kind in {list, tuple, set, frozenset} else ()
    return next((found for item in values if (found := _not_finite(item)) is not None), None)
