"""What is kept of a handler's error: text."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

__all__ = ["RemoteFailure", "error_type", "failure_text"]

# Characters of a traceback that are kept: its head and its tail.
_HEAD, _TAIL = 1000, 7000

_HERE = os.path.dirname(__file__)


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


def failure_text(error: BaseException) -> str:
    """The traceback from the handler's own frames on, bounded."""
    if isinstance(error, RemoteFailure):
        return error.text
    text = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    if len(text) <= _HEAD + _TAIL:
        return text.rstrip()
    return f"{text[:_HEAD]}\n... {len(text) - _HEAD - _TAIL} characters left out ...\n{text[-_TAIL:]}".rstrip()


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == _HERE:
        frames = frames.tb_next
    return frames
