"""The text that is kept of a handler's error, and its summary in one line."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, get_args

__all__ = [
    "BLANKED",
    "CANCELLED",
    "CHAINED",
    "CODE",
    "MODULE",
    "FailureCode",
    "ProcessDied",
    "RemoteFailure",
    "blank_values",
    "cancelled_text",
    "code_of",
    "error_type",
    "failure_text",
    "summary",
    "summary_of",
    "with_cause",
    "with_code",
    "without_code",
]

# Why a message failed, for programs.
FailureCode = Literal["error", "timeout", "poison", "arguments", "expired", "cancelled"]

# The code of a message that was cancelled on purpose.
CANCELLED: Literal["cancelled"] = "cancelled"
# The first line of a kept text can be a code. Without this line it is `error`.
CODE = re.compile(rf"code: ({'|'.join(get_args(FailureCode))})\n")

# The numbers of characters that are kept of the head and of the tail of a long text.
_HEAD, _TAIL = 1000, 7000
# Characters of the name of who cancels a message.
_MOST_OF_A_NAME = 200

# The directories of the modules that call handlers. Their frames are left out of tracebacks.
_HERE = os.path.dirname(__file__)
_OWN = {os.path.join(_HERE, *path) for path in ((), ("worker",), ("worker", "handlers"), ("definition",))}

# `BLANKED`, `CHAINED`, `CODE` and `MODULE` must be valid regular expressions of Java too: Spark reads the same texts.
# Python writes these lines between the tracebacks of a chain. The last traceback is of the error that was raised.
CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
# The first line of a traceback. All lines of an exception group begin with a margin.
_HEADER = re.compile(r"(?P<group>  \+ Exception Group )?Traceback \(most recent call last\):(?:\n|\Z)")
_MARGIN = "  | "
_LEFT_OUT = re.compile(r"\.\.\. \d+ characters left out \.\.\.")
# The module of an error's type, at the beginning of a line.
MODULE = re.compile(r"(?:[^\W\d]\w*\.|<locals>\.)+(?=[^\W\d]\w*(?::|\Z))")

# The parts of an error that differ between messages, each with its replacement. The order counts.
BLANKED = (
    # Quoted text. The quotes of "can't" and "don't" are inside of words.
    (re.compile(r"(?<![0-9A-Za-z_])b?(?:'[^']*'|\"[^\"]*\")(?![0-9A-Za-z_])"), "'...'"),
    # UUIDs and addresses in memory.
    (re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"), "#"),
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    # Numbers, also with a sign, a fraction or several parts.
    (re.compile(r"(?:(?<![0-9A-Za-z_)#.-])[-+])?(?<![0-9A-Za-z])[0-9]+(?:\.[0-9]+)*(?![0-9A-Za-z])"), "#"),
    # Hexadecimal digits, and other ids that mix letters and digits.
    (re.compile(r"(?<![0-9A-Za-z])(?=[a-fA-F]*[0-9])[0-9a-fA-F]{6,}(?![0-9A-Za-z])"), "#"),
    (re.compile(r"(?<![0-9A-Za-z])(?=[A-Za-z]*[0-9])[0-9A-Za-z]{16,}(?![0-9A-Za-z])"), "#"),
    # Numbers with letters beside them, such as 30s.
    (re.compile(r"(?:(?<![0-9A-Za-z_)#.-])[-+])?[0-9]+(?:\.[0-9]+)*"), "#"),
)


class RemoteFailure(Exception):
    """An error of a handler that ran in another process, as text.

    Attributes:
        type_name: The name of its class.
        text: Its traceback.
        classes: The names of its class and the bases of that, from `qworker.retry.class_names`.
    """

    def __init__(self, type_name: str, text: str, classes: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.type_name = type_name
        self.text = text
        self.classes = classes


class ProcessDied(RemoteFailure):
    """The death of a handler's process."""

    def __init__(self, text: str) -> None:
        super().__init__("ProcessDied", text)


class NotBegun(RemoteFailure):
    """A failure of the worker before it called the handler.

    A process or thread could not be started, or a process could not import the app, or enter its lifespan.
    """


def error_type(error: BaseException | None) -> str:
    """Return the name of an error's class, or an empty text without an error."""
    if isinstance(error, RemoteFailure):
        return error.type_name
    return "" if error is None else type(error).__name__


# -- codes -----------------------------------------------------------------------------------------------------------


def cancelled_text(by: str) -> str:
    """Return the text that is kept of a cancelled message: its code, and in a second line who cancelled it."""
    name = " ".join(by.encode(errors="replace").decode().split())[:_MOST_OF_A_NAME]
    return f"code: {CANCELLED}\ncancelled" + (f" by {name}" if name else "")


def code_of(text: str | None) -> str | None:
    """Return the code of a kept text; None if it has none."""
    found = None if text is None else CODE.match(text)
    return None if found is None else found[1]


def with_code(text: str, code: FailureCode) -> str:
    """Return a text to keep, with the line of its code. `error` is not written: older readers show the line."""
    return text if code == "error" else f"code: {code}\n{text}"


def without_code(text: str) -> str:
    """Return a kept text without the line of its code."""
    found = CODE.match(text)
    return text if found is None else text[found.end() :]


# -- writing ---------------------------------------------------------------------------------------------------------


def with_cause(reason: str, cause: BaseException | None) -> str:
    """Return a reason with the traceback of its cause. Never raises."""
    more = "" if cause is None else _formatted(cause)
    # A cause that was never raised has no traceback, and its text is the reason already.
    return _kept(f"{reason}\n\n{more}" if more not in {"", reason} else reason, reason)


def failure_text(error: BaseException) -> str:
    """Return the traceback of an error, shortened, without the frames that called the handler. Never raises."""
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
    """Return a text that every store can keep. A traceback that is cut begins with its summary."""
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
    """Return `Type: first line of the message`. Never raises."""
    if isinstance(error, RemoteFailure):
        return summary(error.text)
    try:
        lines = traceback.format_exception_only(error)
    except Exception:  # noqa: BLE001 - it runs code of whatever was raised
        return type(error).__name__
    # The lines about the place of a SyntaxError come before its type.
    told = next((n for n, line in enumerate(lines) if not line.startswith(" ")), 0)
    return _first_line("".join(lines[told:]).splitlines())


def summary(text: str) -> str:
    """Return one line that summarizes a kept text.

    For a traceback this is `Type: first line of the message`, for any other text its first line.
    """
    text = without_code(text).strip("\n")
    if _HEADER.match(text) is None and not _begins_a_chain(text):
        return next((line.strip() for line in text.splitlines() if line.strip()), "")
    last = CHAINED.split(text)[-1]
    header = _HEADER.match(last)
    if header is None:
        # The last error was never raised.
        return _first_line(last.splitlines())
    # Frames and message of a group begin with the margin. The lines of its members are indented more.
    margin = _MARGIN if header["group"] else ""
    lines = [line[len(margin) :] for line in last[header.end() :].splitlines() if line.startswith(margin)]
    told = next((n for n, line in enumerate(lines) if line[:1].strip() and not _LEFT_OUT.fullmatch(line)), len(lines))
    return _first_line(lines[told:])


def blank_values(line: str) -> str:
    """Return an error in one line without what differs between messages: quoted text, numbers and ids."""
    for pattern, replacement in BLANKED:
        line = pattern.sub(replacement, line)
    return line


def _begins_a_chain(text: str) -> bool:
    """Return whether a text begins with a chain whose first error was never raised and so has no frames."""
    linked = CHAINED.search(text)
    return linked is not None and "\n\n" not in text[: linked.start()]


def _first_line(lines: list[str]) -> str:
    """Return an error's first line, without the module of its type.

    If the line ends after the type, the next line is added, because the message begins there.
    """
    said = [stripped for line in lines if (stripped := line.strip())]
    if not said:
        return ""
    first = said[0]
    if first.endswith(":") and " " not in first and len(said) > 1:
        first = f"{first} {said[1]}"
    return MODULE.sub("", first, count=1) if MODULE.match(first) else first
