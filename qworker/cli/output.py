"""What people and programs read: tables, one JSON document, times in words, progress on a terminal."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TextIO

import click
import msgspec

from qworker.message import StoredMessage
from qworker.names import printable
from qworker.streams import ERROR_STREAM, flush_output, silence_stdout

__all__ = [
    "Progress",
    "as_data",
    "body_preview",
    "clock_time",
    "has_escapes",
    "print_json",
    "print_table",
    "reporting",
    "say",
    "span",
]

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def say(text: str, *, err: bool = False) -> None:
    """Print one line, without the control characters that a stored message could smuggle into a terminal."""
    click.echo(printable(text), file=ERROR_STREAM if err else None)


def print_json(data: Any) -> None:
    """Print `data` as one JSON document on one line; in ASCII where the encoding of standard output is not UTF-8."""
    text = msgspec.json.encode(data).decode()
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        text = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    click.echo(text)


@contextmanager
def reporting(done: str) -> Generator[None]:
    """Print in the body what was done. That it cannot be printed is no failure: the command would be run again, and do it twice.

    Args:
        done: what was done, as the beginning of a line.
    """
    try:
        yield
        flush_output()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        say(f"qworker: {done}; the report cannot be written to standard output: {error.strerror}", err=True)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings; columns of numbers stand to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells)) for i, heading in enumerate(headings)]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    click.echo(line(headings))
    for row in cells:
        click.echo(line(row))


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit() or cell == "-"


def span(seconds: float | None) -> str:
    """A length of time in words: `3.2 s`, `4 min`, `2 h`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86_400:.0f} d"


def clock_time(seconds: float | None) -> str:
    """A Unix time as people write it, in UTC; `-` for None."""
    if seconds is None:
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f}"


def body_preview(body: bytes, width: int = 60) -> str:
    """The beginning of a body on one line."""
    text = printable(body[: 4 * width].decode(errors="replace").rstrip())
    return text if len(text) <= width else text[: width - 1] + "…"


def as_data(stored: StoredMessage) -> dict[str, Any]:
    """A stored message for JSON: `body` where it is text, else `body_base64`."""
    message = stored.message
    data: dict[str, Any] = {"id": message.id, "queue": message.queue, "state": stored.state.value}
    data |= {"tries": message.tries, "enqueued_at": message.enqueued_at, "priority": message.priority}
    data |= {"key": message.key, "arguments": list(message.arguments)}
    data["origin"] = message.origin
    data["fields"] = dict(message.fields) if message.fields is not None else None
    data |= {"due_at": stored.due_at, "expires_at": stored.expires_at, "finished_at": stored.finished_at}
    data |= {"holder": stored.holder, "error": stored.error}
    try:
        data["body"] = message.body.decode()
    except UnicodeDecodeError:
        data["body_base64"] = base64.b64encode(message.body).decode()
    return data


def has_escapes(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Progress:
    """A count that moves on standard error while many messages are handled; silent where that is no terminal."""

    _EVERY_S = 0.1

    def __init__(self, verb: str) -> None:
        self.count = 0
        self._verb = verb
        self._shown = has_escapes(sys.stderr)
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Self:
        """Begin to count."""
        return self

    def add(self, count: int) -> None:
        """Count some more."""
        self.count += count
        now = time.monotonic()
        if self._shown and now - self._last >= self._EVERY_S:
            self._last = now
            self._show(now)

    def _show(self, now: float, end: str = "") -> None:
        rate = self.count / max(now - self._started, 1e-9)
        text = f"\r\x1b[K{self._verb} {self.count:,} ({rate:,.0f}/s)"
        print(text, end=end, file=ERROR_STREAM, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the last count on the screen."""
        if self._shown and self.count:
            self._show(time.monotonic(), end="\n")
