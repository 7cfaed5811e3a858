"""The parts of ASGI that the server needs, without an object per request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from qworker.errors import UsageError

__all__ = [
    "UNREAD",
    "ASGIApp",
    "BodyTooLarge",
    "Disconnected",
    "Receive",
    "Scope",
    "Send",
    "call_if_unread",
    "get_header",
    "get_number",
    "get_query",
    "read_body",
    "respond",
    "segments",
    "wait_for_disconnect",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# The extension of the scope by which `qworker.asgi.protocol` reports responses that were not read.
UNREAD = "qworker.unread"

_EMPTY: Headers = [(b"content-length", b"0")]


class BodyTooLarge(Exception):
    """The body of the request is too large."""


class Disconnected(Exception):
    """The client has disconnected, or its body cannot be read."""


async def respond(send: Send, status: int, headers: Headers | None = None, body: bytes = b"") -> None:
    """Send a response."""
    if body:
        sent = [*(headers or ()), (b"content-length", b"%d" % len(body))]
    elif status == 204:
        sent = headers or []
    else:
        sent = [*headers, *_EMPTY] if headers else _EMPTY
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


def call_if_unread(scope: Scope, function: Callable[[], None]) -> None:
    """Call a function if the client leaves before it has read the response of this request.

    Servers other than qworker's do not report this.
    """
    extensions = scope.get("extensions")
    if extensions and UNREAD in extensions:
        extensions[UNREAD]["call"](function)


def get_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header with this name, which must be in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def segments(scope: Scope) -> list[str] | None:
    """Return the parts of the path, or None if one is not valid UTF-8.

    The path is split before the parts are decoded. So an encoded slash stays inside its part, and the check of names
    refuses it.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    parts = raw.split(b"?", 1)[0].split(b"/")[1:]
    if b"%" not in raw:
        return raw_text(parts)
    return raw_text([unquote_to_bytes(part) for part in parts])


def raw_text(parts: list[bytes]) -> list[str] | None:
    """Return the parts as text, or None if one is not valid UTF-8."""
    try:
        return [part.decode() for part in parts]
    except UnicodeDecodeError:
        return None


def get_query(scope: Scope) -> dict[str, str]:
    """Return the parameters of the query. If one is given twice, the last one counts."""
    raw: bytes = scope["query_string"]
    if not raw:
        return {}
    try:
        return dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, max_num_fields=32))
    except ValueError as error:
        raise UsageError("the query string is not valid") from error


def get_number(given: dict[str, str], name: str, default: float, *, least: float, most: float) -> float:
    """Return a number from the query.

    Raises:
        UsageError: The parameter is not a number, or is out of range.
    """
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UsageError(f"{name} must be a number from {least:g} to {most:g}")
    return value


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of the request.

    Raises:
        BodyTooLarge: The body or its Content-Length is more than `limit` bytes.
        Disconnected: The client disconnected before the end of the body.
    """
    declared = get_header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge
        return body
    parts: list[bytes] = []
    length = 0
    while True:
        if message["type"] != "http.request":
            raise Disconnected
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > limit:
            raise BodyTooLarge
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
