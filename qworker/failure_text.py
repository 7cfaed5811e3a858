"""What is kept of a handler's error: text, whose news a reader finds again."""

from __future__ import annotations

import os
import re
import traceback
from types import TracebackType

__all__ = ["CHAINED", "MODULE", "RemoteFailure", "error_type", "failure_text", "summary", "summary_of", "with_cause"]

# Characters of a text that are kept: its head and its tail.
_HEAD, _TAIL = 1000, 7000

# The directories of the modules that call handlers: their frames say nothing about a failure.
_HERE = os.path.dirname(__file__)
_OWN = {os.path.join(_HERE, *path) for path in ((), ("worker",), ("worker", "handlers"), ("definition",))}

# These two are of Java too: Spark reads the same texts.
# What Python writes between the tracebacks of a chain; the last one tells what was raised in the end.
CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
# The head of a traceback, or of an exception group's, whose lines all stand behind a margin.
_HEADER = re.compile(r"(?P<group>  \+ Exception Group )?Traceback \(most recent call last\):(?:\n|\Z)")
_MARGIN = "  | "
_LEFT_OUT = re.compile(r"\.\.\. \d+ characters left out \.\.\.")
# The module of a type at the beginning of its line.
MODULE = re.compile(r"(?:[^\W\d]\w*\.|<locals>\.)+(?=[^\W\d]\w*(?::|\Z))")


class RemoteFailure(Exception):
    """An error in a handler's own process, which has only its text to give, or that process's death."""

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(text)
        self.type_name = type_name
        self.text = text


def error_type(error: BaseException | None) -> str:
    """The name of an error's class; empty without an error."""
    if isinstance(error, RemoteFailure):
        return error.type_name
    return "" if error is None else type(error).__name__


# -- writing ---------------------------------------------------------------------------------------------------------


def with_cause(reason: str, cause: BaseException | None) -> str:
    """A reason, and after it the traceback of its cause. Never raises."""
    more = "" if cause is None else _formatted(cause)
    # A cause that was made and never raised says nothing more.
    return _kept(f"{reason}\n\n{more}" if more not in {"", reason} else reason, reason)


def failure_text(error: BaseException) -> str:
    """The traceback from the handler's own frames on, bounded. Never raises."""
    if isinstance(error, RemoteFailure):
        return error.text
    return _kept(_formatted(error), summary_of(error))


def _formatted(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
    except Exception:  # noqa: BLE001 - it runs code of whatever was raised
        return summary_of(error)
    return "".join(lines).rstrip()


def _kept(text: str, news: str) -> str:
    """The text as every store can keep it, bounded: what is cut begins with the news."""
    text = text.encode(errors="replace").decode()
    if len(text) <= _HEAD + _TAIL:
        return text
    if _HEADER.match(text):
        text = f"{summary(news)}\n\n{text}"
    return f"{text[:_HEAD]}\n... {len(text) - _HEAD - _TAIL} characters left out ...\n{text[-_TAIL:]}"


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) in _OWN:
        frames = frames.tb_next
    return frames


# -- reading ---------------------------------------------------------------------------------------------------------


def summary_of(error: BaseException) -> str:
    """`Type: the first line of its message`. Never raises."""
    if isinstance(error, RemoteFailure):
        return summary(error.text)
    try:
        lines = traceback.format_exception_only(error)
    except Exception:  # noqa: BLE001 - it runs code of whatever was raised
        return type(error).__name__
    # A SyntaxError's place comes before it.
    told = next((n for n, line in enumerate(lines) if not line.startswith(" ")), 0)
    return _first_line("".join(lines[told:]).splitlines())


def summary(text: str) -> str:
    """What went wrong, in one line, out of a text that was kept: of a traceback the error's `Type: first line`, of others the first line."""
    text = text.strip("\n")
    if _HEADER.match(text) is None and not _begins_a_chain(text):
        return next((line.strip() for line in text.splitlines() if line.strip()), "")
    last = CHAINED.split(text)[-1]
    header = _HEADER.match(last)
    if header is None:
        # It was never raised.
        return _first_line(last.splitlines())
    # A group's frames and message stand behind the margin; what is in it stands further in.
    margin = _MARGIN if header["group"] else ""
    lines = [line[len(margin) :] for line in last[header.end() :].splitlines() if line.startswith(margin)]
    told = next((n for n, line in enumerate(lines) if line[:1].strip() and not _LEFT_OUT.fullmatch(line)), len(lines))
    return _first_line(lines[told:])


def _begins_a_chain(text: str) -> bool:
    """Whether the first of a chain of errors was never raised, and so has no frames."""
    linked = CHAINED.search(text)
    return linked is not None and "\n\n" not in text[: linked.start()]


def _first_line(lines: list[str]) -> str:
    """An error's first line, without its type's module; with the next one where its message begins there."""
    said = [stripped for line in lines if (stripped := line.strip())]
    if not said:
        return ""
    first = said[0]
    if first.endswith(":") and " " not in first and len(said) > 1:
        first = f"{first} {said[1]}"
    return MODULE.sub("", first, count=1) if MODULE.match(first) else first
