"""The envelope: the JSON object that a task call becomes in a message's body. Described for other languages in docs/envelope.md.

{"task": "thumbnail", "args": ["a.png"], "kwargs": {"width": 640}, "headers": {"traceparent": "00-..."}}
"""

from __future__ import annotations

from typing import Any

import msgspec

from qworker.errors import BadArguments

__all__ = ["Envelope", "EnvelopeEncoder", "open_envelope"]


class Envelope(msgspec.Struct, frozen=True, gc=True):
    """A decoded envelope."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] = {}


class _Head(msgspec.Struct, frozen=True):
    task: str


_decode = msgspec.json.Decoder(Envelope).decode
_decode_head = msgspec.json.Decoder(_Head).decode
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
            BadArguments: an argument has no JSON form.
        """
        try:
            body = self._head + _encode(args)
            if kwargs:
                body += b',"kwargs":' + _encode(kwargs)
            if headers:
                body += b',"headers":' + _encode(headers)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise BadArguments(f"task {self._task!r}: an argument cannot be written as JSON: {error}") from error
        return body + b"}"
