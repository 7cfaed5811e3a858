"""The envelope: the JSON object that encodes a task call in a message's body.

docs/reference/envelope.md describes it for other languages.

{"task": "thumbnail", "args": ["a.png"], "kwargs": {"width": 640}, "headers": {"traceparent": "00-..."},
 "options": {"result": 3600}}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, overload

import msgspec

from qworker.errors import InvalidArguments
from qworker.retry import MOST_DELAY
from qworker.validation import check_headers
from qworker.values import encode as _encode
from qworker.values import pack as _pack
from qworker.values import to_builtins

__all__ = [
    "ORIGINAL_ID",
    "CallOptions",
    "EncodedResult",
    "Envelope",
    "EnvelopeEncoder",
    "add_headers",
    "change_options",
    "encode_result",
    "may_hold_not_finite",
    "open_envelope",
]


# The header that keeps a given id from which the message's id was hashed.
ORIGINAL_ID = "qworker-id"


class CallOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of a call that travel with it, because the worker or a caller needs them. Older workers ignore them.

    A body comes from outside: a value that is out of range counts as if it were not there.

    Attributes:
        result: Seconds for which the result is kept. None: it is not kept. Unset: the task's own option.
        timeout: Seconds that an attempt may take. None: no limit. Unset: the task's own option.
        max_tries: The number of failed attempts after which it fails. None: no limit. Unset: the task's own option.
        expires: Seconds from the enqueue after which it is not started any more. None: it never expires.
    """

    result: float | msgspec.UnsetType | None = msgspec.UNSET
    timeout: float | msgspec.UnsetType | None = msgspec.UNSET
    max_tries: int | msgspec.UnsetType | None = msgspec.UNSET
    expires: float | None = None

    @overload
    def kept_result(self, own: float | None) -> float | None: ...

    @overload
    def kept_result(self, own: float | msgspec.UnsetType | None) -> float | msgspec.UnsetType | None: ...

    def kept_result(self, own: float | msgspec.UnsetType | None) -> float | msgspec.UnsetType | None:
        """Return the seconds for which the result is kept; `own`, that of the task, if the call does not say it.

        A body comes from outside: a time that no store can keep is None.
        """
        if self.result is msgspec.UNSET:
            return own
        return self.result if self.result is not None and 0 < self.result <= MOST_DELAY else None

    def allowed_time(self, own: float | None) -> float | None:
        """Return the timeout of an attempt in seconds; `own`, that of the task, if the call does not say it."""
        given = self.timeout
        return own if given is msgspec.UNSET or (given is not None and not 0 < given <= MOST_DELAY) else given

    def allowed_tries(self, own: int | None) -> int | None:
        """Return the maximum number of failed attempts; `own`, that of the task, if the call does not say it."""
        given = self.max_tries
        return own if given is msgspec.UNSET or (given is not None and given < 1) else given


class Envelope(msgspec.Struct, frozen=True, gc=True):
    """A decoded envelope.

    Attributes:
        task: The task's name.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        headers: The headers of the call: texts by name.
        options: The options that travel with the call. None: it has none.
    """

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] = {}
    options: CallOptions | None = None


class _Head(msgspec.Struct, frozen=True):
    task: str


_decode = msgspec.json.Decoder(Envelope).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_WITHOUT_NUMBERS = frozenset({str, int, bool, bytes})
# A search with a regular expression is several times as fast as `in`.
_find_null = re.compile(b"null").search
# The first bytes of a packed number that is nan or infinite. Other data can contain the same bytes.
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]", re.DOTALL)


def open_envelope(body: bytes) -> Envelope | tuple[str, str] | None:
    """Decode a body.

    Returns:
        The envelope. If the body names a task but is not valid: the task's name and what is wrong. If the body is not
        an envelope: None.
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


class _Parts(msgspec.Struct, omit_defaults=True):
    """An envelope whose arguments stay as they are written."""

    task: str
    args: msgspec.Raw
    kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] = {}
    options: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def change_options(body: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return the body of a call with other options that travel with it."""
    parts = msgspec.json.decode(body, type=_Parts)
    old = CallOptions() if parts.options is msgspec.UNSET else msgspec.json.decode(parts.options, type=CallOptions)
    parts.options = msgspec.Raw(_encode(msgspec.structs.replace(old, **changes)))
    return _encode(parts)


def add_headers(body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the body of a call with more headers.

    Raises:
        UsageError: They are not texts by name.
    """
    check_headers(headers)
    parts = msgspec.json.decode(body, type=_Parts)
    parts.headers |= headers
    return _encode(parts)


class EnvelopeEncoder:
    """The encoder of one task's envelopes. It encodes their common beginning once."""

    __slots__ = ("_head", "_task")

    def __init__(self, task: str) -> None:
        self._task = task
        self._head = b'{"task":' + _encode(task) + b',"args":'

    def encode(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        headers: dict[str, str],
        options: CallOptions | None = None,
    ) -> bytes:
        """Return the body of a call.

        Raises:
            InvalidArguments: An argument cannot be encoded as JSON.
        """
        try:
            given = _encode(args)
            if kwargs:
                given += b',"kwargs":' + _encode(kwargs)
            # nan and infinity become null. The worker would take it for None, or refuse it.
            if _find_null(given):
                self._check_numbers(args, kwargs)
            body = self._head + given
            if headers:
                body += b',"headers":' + _encode(headers)
            if options is not None:
                body += b',"options":' + _encode(options)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidArguments(f"task {self._task!r}: an argument cannot be encoded as JSON: {error}") from error
        return body + b"}"

    def _check_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for which, value in (*enumerate(args, 1), *kwargs.items()):
            if value is None or value.__class__ in _WITHOUT_NUMBERS:
                continue
            number = _not_finite(to_builtins(value)) if may_hold_not_finite(value) else None
            if number is not None:
                raise InvalidArguments(
                    f"task {self._task!r}: argument {which}: JSON cannot contain {number}: use None or text instead"
                )


class EncodedResult(msgspec.Struct, frozen=True):
    """The value that a handler returned, encoded where the handler ran.

    Attributes:
        body: The value as JSON. Empty if it cannot be encoded.
        problem: Why it cannot be encoded. None: it is encoded.
    """

    body: bytes = b""
    problem: str | None = None


def encode_result(value: Any) -> EncodedResult:
    """Encode the value of a handler as arguments are encoded.

    A value that cannot be encoded does not fail the attempt: the work is done, and another attempt would repeat it.
    """
    try:
        body = _encode(value)
        if _find_null(body) and value is not None and may_hold_not_finite(value):
            number = _not_finite(to_builtins(value))
            if number is not None:
                return EncodedResult(problem=f"JSON cannot contain {number}: use None or text instead")
    except Exception as error:  # noqa: BLE001 - it may be the code of the value's class
        return EncodedResult(problem=f"{type(error).__name__}: {error}")
    return EncodedResult(body)


def may_hold_not_finite(value: Any) -> bool:
    """Return whether a value can contain nan or infinity. The check is fast, and False is always right."""
    try:
        return _NOT_FINITE.search(_pack(value)) is not None
    except OverflowError:
        # JSON can hold larger whole numbers than msgpack.
        return True


def _not_finite(value: Any) -> float | None:
    """Return the first number in a value that is nan or infinite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    # `to_builtins` creates only these containers.
    kind: Any = value.__class__
    values: Iterable[Any] = value.values() if kind is dict else value if kind in {list, tuple, set, frozenset} else ()
    return next((found for item in values if (found := _not_finite(item)) is not None), None)
