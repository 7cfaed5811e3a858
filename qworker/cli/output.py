"""The output of commands: tables, JSON documents, times in words, and progress on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TextIO

import click
import msgspec

from qworker.backend import Backend
from qworker.errors import QworkerError, UsageError
from qworker.names import printable
from qworker.streams import ERROR_STREAM, flush_output, silence_stdout
from qworker.url import mask

__all__ = [
    "Progress",
    "echo",
    "format_seconds",
    "format_time",
    "has_escapes",
    "preview_body",
    "print_error",
    "print_json",
    "print_problems",
    "print_table",
    "reporting",
    "say_where",
]

# The smallest width of a column of texts, in columns of the terminal.
_SHORTEST_TEXT = 12
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def echo(text: str, *, err: bool = False) -> None:
    """Print one line without control characters, because text from messages must not control the terminal."""
    click.echo(printable(text), file=ERROR_STREAM if err else None)


def print_error(error: Exception | str) -> None:
    """Print an error on standard error, on one line without passwords and control characters.

    An error of qworker is followed by its class in brackets, because the documentation has a section for each class.
    The text of a plain `UsageError` says all that there is to do.
    """
    in_class = isinstance(error, QworkerError) and type(error) is not UsageError
    where = f" [{type(error).__name__}]" if in_class else ""
    echo(f"qworker: {mask(' '.join(str(error).split()))}{where}", err=True)


def say_where(backend: Backend) -> None:
    """Print the whole path of the store on standard error, because a relative one depends on the working directory."""
    url = backend.describe()
    if ":///" in url:
        echo(f"qworker: the store is {url}", err=True)


def print_json(data: Any) -> None:
    """Print `data` as JSON on one line. If the encoding of standard output is not UTF-8, print ASCII."""
    text = msgspec.json.encode(data).decode()
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        text = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    click.echo(text)


@contextmanager
def reporting(done: str) -> Generator[None]:
    """Ignore errors of writing to standard output inside the block.

    The command has done its work. If it failed now, the user would run it again, and the work would be done twice.

    Args:
        done: A description of the work, for a line on standard error.
    """
    try:
        yield
        flush_output()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        echo(f"qworker: {done}; the report cannot be written to standard output: {error.strerror}", err=True)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[str] = ()) -> None:
    """Print rows under headings, as wide as the terminal. Columns of numbers are aligned to the right.

    If the terminal is too narrow, each row is printed as a few lines, one for each cell.

    Args:
        headings: The headings of the columns.
        rows: The cells of the rows.
        texts: The headings of the columns whose texts can be cut. Names and numbers are never cut.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(_columns(heading), *(_columns(row[i]) for row in cells)) for i, heading in enumerate(headings)]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(headings))]
    width = _terminal_width()
    if width is not None:
        fitted = _fitted(widths, [heading in texts for heading in headings], width)
        if fitted is None:
            _print_records(headings, cells, width)
            return
        widths = fitted

    def line(row: Sequence[str]) -> str:
        padded = [_padded(_cut(c, w), w, r) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    click.echo(line(headings))
    for row in cells:
        click.echo(line(row))


def print_problems(problems: Mapping[str, str | None]) -> None:
    """Print on standard error why queues cannot be used. None: the queue can be used."""
    for queue, problem in problems.items():
        if problem is not None:
            echo(f"queue {queue}: {problem}", err=True)


def _terminal_width() -> int | None:
    """Return the width from `COLUMNS` or of the terminal. None: there is no limit."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal():
        return int(given) or None
    return os.get_terminal_size(sys.stdout.fileno()).columns or None if sys.stdout.isatty() else None


def _fitted(widths: list[int], may_be_cut: list[bool], width: int) -> list[int] | None:
    """Return widths that fit, with the widest texts cut first. None: the texts would be too short."""
    fitted = list(widths)
    surplus = sum(widths) + 2 * (len(widths) - 1) - width
    while surplus > 0:
        widest = max((i for i, text in enumerate(may_be_cut) if text), key=lambda i: fitted[i], default=None)
        if widest is None or fitted[widest] <= _SHORTEST_TEXT:
            return None
        fitted[widest] -= 1
        surplus -= 1
    return fitted


def _print_records(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    margin = max(len(heading or "note") for heading in headings) + 2
    room = max(width - margin, _SHORTEST_TEXT)
    for number, row in enumerate(rows):
        if number:
            click.echo("")
        for heading, cell in zip(headings, row, strict=True):
            label, rest = heading or "note", cell
            while rest:
                part = _taken(rest, room)
                click.echo(f"{label.ljust(margin)}{part}")
                label, rest = "", rest[len(part) :]


def _columns(text: str) -> int:
    """Return the width of a text in columns of a terminal. A wide character takes two."""
    return len(text) if text.isascii() else len(text) + sum(unicodedata.east_asian_width(c) in "WF" for c in text)


def _taken(text: str, width: int) -> str:
    """Return the beginning of a text that fits into a width, and at least one character."""
    if text.isascii():
        return text[:width]
    taken = text[:width]
    while len(taken) > 1 and _columns(taken) > width:
        taken = taken[:-1]
    return taken


def _cut(text: str, width: int) -> str:
    return text if _columns(text) <= width else _taken(text, width - 1) + "…"


def _padded(text: str, width: int, right: bool) -> str:
    blank = " " * (width - _columns(text))
    return blank + text if right else text + blank


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit() or cell == "-"


def format_seconds(seconds: float | None) -> str:
    """Return a duration as text, such as `3.2 s`, `4 min` or `2 h`, or `-` for None."""
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


def format_time(seconds: float | None) -> str:
    """Return a Unix time as date and time in UTC, or `-` for None."""
    if seconds is None:
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f}"


def preview_body(body: bytes, width: int = 60) -> str:
    """Return the beginning of a body on one line."""
    text = printable(body[: 4 * width].decode(errors="replace").rstrip())
    return text if len(text) <= width else text[: width - 1] + "…"


def has_escapes(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Progress:
    """A counter on standard error. If standard error is not a terminal, it shows nothing."""

    _EVERY_S = 0.1

    def __init__(self, verb: str) -> None:
        self.count = 0
        self._verb = verb
        self._shown = has_escapes(sys.stderr)
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Self:
        """Return the counter."""
        return self

    def add(self, count: int) -> None:
        """Add to the count, and show it from time to time."""
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
        """Print the last count."""
        if self._shown and self.count:
            self._show(time.monotonic(), end="\n")
