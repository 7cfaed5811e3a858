"""Numbers, times and bodies as text for pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
from markupsafe import Markup, escape

from qworker.charts import format_text
from qworker.envelope import Envelope, open_envelope
from qworker.message import Message, StoredMessage
from qworker.parcel import unpack

__all__ = [
    "DASH",
    "MOST_BODY",
    "Body",
    "age",
    "arguments_of",
    "body_of",
    "duration",
    "number",
    "rate",
    "search_text_of",
    "show",
    "text_json_of",
    "when",
    "with_code",
    "without_ages",
]

T = TypeVar("T")

# What is not known.
DASH = "\N{EN DASH}"

# Bytes of a body that are shown.
MOST_BODY = 64 * 1024
# Characters of arguments in a list.
_MOST_ARGUMENTS = 160
_SECRET = re.compile(r"passw(or)?d|secret|token|api_?key|authorization|cookie|credential", re.IGNORECASE)
_MASK = "••••"
_AGE = re.compile('(<time data-age="[^"]*" datetime="[^"]*">)[^<]*')
# Characters that change the direction of the text around them, or cannot be seen.
_HIDDEN = re.compile("[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def show(value: object) -> str:
    """Return a value as text in which every control character can be seen. Markup is returned unchanged."""
    if isinstance(value, Markup) or (isinstance(value, str) and value.isascii() and value.isprintable()):
        return value
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", format_text("" if value is None else value))


def with_code(text: str) -> Markup:
    """Return a text in which what stands in backticks is code."""
    parts = show(text).split("`")
    if len(parts) % 2 == 0:
        # One of them has no other end.
        return escape(show(text))
    return Markup().join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def duration(seconds: float | None) -> str:
    """Return a duration, such as `250 ms`, `3.2 s`, `4 min` or `2 h`. None is a dash."""
    if seconds is None:
        return DASH
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, name in ((10, 1, "s"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds:.1f} s" if limit == 10 else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def age(at: float | None, now: float, form: str = "{}") -> str:
    """Return the time since a moment, or until it, as an element whose text a script keeps up to date.

    Args:
        at: Unix seconds of the moment. None: a dash.
        now: Unix seconds.
        form: What is said of the duration, in the place of `{}`. With `in {}` it is the time until the moment.
    """
    if at is None:
        return DASH
    seconds = max(0.0, at - now if form == "in {}" else now - at)
    text = form.format(f"{seconds:.0f} s" if seconds < 120 else duration(seconds))
    moment = _iso(at)
    return text if moment is None else Markup(f'<time data-age="{form}" datetime="{moment}">{text}</time>')


def without_ages(html: str) -> str:
    """Return HTML with empty ages, which is the same until something else changes. A script fills them in."""
    return _AGE.sub(r"\1", html)


def number(value: int | None) -> str:
    """Return a count with separators. None is a dash."""
    return DASH if value is None else f"{value:,}"


def rate(value: float | None, *, signed: bool = False) -> str:
    """Return a rate per second. None is a dash."""
    if value is None:
        return DASH
    if abs(value) < 0.05:
        return "0"
    sign = "+" if signed else ""
    return f"{value:{sign},.1f}" if abs(value) < 100 else f"{value:{sign},.0f}"


def when(seconds: float | None) -> Markup | str:
    """Return a moment as an element that a script can show in local time."""
    if seconds is None:
        return DASH
    exact = _iso(seconds)
    if exact is None:
        return f"{seconds:.0f}"
    return Markup(f'<time datetime="{exact}" title="{exact}">{exact[:10]} {exact[11:19]}Z</time>')


@lru_cache(maxsize=4096)
def _iso(seconds: float) -> str | None:
    """Return a moment in ISO format, or None if no calendar has it."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC).isoformat(timespec='milliseconds')[:-6]}Z"
    except (OverflowError, ValueError, OSError):
        return None


class Body(msgspec.Struct, frozen=True):
    """A body for people.

    Attributes:
        size: Bytes.
        text: The text, or its beginning. None: it is not text.
        is_cut: Whether the text is only the beginning.
    """

    size: int
    text: str | None
    is_cut: bool = False


def arguments_of(message: Message, *, masked: bool) -> str:
    """Return the arguments of a call, or the beginning of a raw body, on one line."""
    inner = unpack(message)
    opened = open_envelope(inner.body)
    if isinstance(opened, Envelope):
        kwargs = _masked(opened.kwargs) if masked else opened.kwargs
        args = _masked(opened.args) if masked else opened.args
        text = ", ".join([*map(_json, args), *(f"{name}={_json(one)}" for name, one in kwargs.items())])
    else:
        text = " ".join(inner.argv) or inner.body[: 4 * _MOST_ARGUMENTS].decode(errors="replace")
    return text if len(text) <= _MOST_ARGUMENTS else text[: _MOST_ARGUMENTS - 1] + "…"


def body_of(message: Message, *, masked: bool) -> Body:
    """Return the body, indented if it is JSON. With `masked`, the values of keys that look secret are dots."""
    body = unpack(message).body
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return Body(len(body), None)
    if len(body) > MOST_BODY:
        # A body that cannot be read as a whole cannot be masked.
        return Body(len(body), None if masked else text[:MOST_BODY], is_cut=True)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Body(len(body), text)
    return Body(len(body), msgspec.json.format(_json(_masked(value) if masked else value), indent=2))


def search_text_of(stored: StoredMessage, *, masked: bool) -> str:
    """Return the text of a message in which people search: its arguments or body, and its error."""
    message = stored.message
    body = body_of(message, masked=True).text if masked else unpack(message).body.decode(errors="replace")
    return "\n".join((body or "", *message.argv, *(message.fields or {}).values(), stored.error or ""))


def text_json_of(stored: StoredMessage, *, masked: bool) -> dict[str, Any]:
    """Return a message for programs. With `masked`, the values of keys that look secret are dots, also in its body."""
    data = stored.to_text_json()
    if masked:
        data.pop("body_base64", None)
        data |= {"body": body_of(stored.message, masked=True).text, "fields": _masked(data["fields"])}
    return data


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _masked(value: T) -> T:
    try:
        masked: T = _mask(value)
    except RecursionError:
        # It is nested too deeply to be searched.
        return type(value)()
    return masked


def _mask(value: object) -> Any:
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value)
        return {key: _MASK if _SECRET.search(key) else _mask(one) for key, one in pairs.items()}
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [_mask(one) for one in items]
    return value
