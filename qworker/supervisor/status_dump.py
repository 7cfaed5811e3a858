"""The status dump of a worker, for SIGUSR1: each message, its age, the rest of its lease, and its handler's stack."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from qworker.names import printable
from qworker.worker.delivery import Delivery, RunningMessage

__all__ = ["format_status"]

# Frames of a handler's stack that are shown, the innermost ones.
_DEPTH = 12
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

_Place = tuple[FrameType, int]


def format_status(running: Iterable[RunningMessage], loop: asyncio.AbstractEventLoop, frame: FrameType | None) -> str:
    """Return the status dump as text.

    Args:
        running: The running messages of the worker.
        loop: The event loop of the worker.
        frame: Where the main thread was interrupted: in a handler that blocks the event loop, or in the loop itself.
    """
    messages = sorted(running, key=lambda message: message.started)
    lines = [f"worker {os.getpid()}: {len(messages)} running"]
    now = time.monotonic()
    lines += [_line(message, now) for message in messages]
    for places in (*_tasks(loop), *_threads(frame)):
        own = _outside(places)
        message = _message(places)
        if own and message is not None:
            lines.append(f"  {message}:")
            lines += [f"    {text}" for text in _format(own)]
    return "\n".join(lines) + "\n"


def _line(message: RunningMessage, now: float) -> str:
    note = f", {message.progress_text}" if message.progress_text else ""
    return printable(
        f"  {message.task} {message.message_id} of {message.queue}: tries {message.tries}, token {message.token},"
        f" for {now - message.started:.1f} s, lease left {message.lease_remaining:.1f} s{note}"
    )


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[list[_Place]]:
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        yield list(_awaits(task.get_coro()))


def _awaits(waiting: Any) -> Iterator[_Place]:
    """Yield the frames of a suspended coroutine, outermost first: each is suspended in the next one."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if isinstance(frame, FrameType):
            yield frame, frame.f_lineno
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None) or _stepped(frame)


def _stepped(frame: Any) -> Any:
    """Return the coroutine of the handler, which `_HandlerCall` of the executor steps instead of awaiting it."""
    return frame.f_locals.get("coroutine") if isinstance(frame, FrameType) and _is_ours(frame) else None


def _threads(frame: FrameType | None) -> Iterator[list[_Place]]:
    frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - the only way there
    for thread in threading.enumerate():
        top = frame if thread is threading.main_thread() else frames.get(thread.ident or 0)
        if top is not None:
            yield list(traceback.walk_stack(top))[::-1]


def _outside(places: list[_Place]) -> list[_Place]:
    """Return the handler's part of a stack: the frames inside the innermost one of qworker, or nothing without one."""
    last = max((i for i, (frame, _) in enumerate(places) if _is_ours(frame)), default=None)
    if last is None:
        return []
    rest = places[last + 1 :]
    return rest[-_DEPTH:] if any(not _is_library(frame) for frame, _ in rest) else []


def _message(places: list[_Place]) -> str | None:
    """Return the message of a stack: the executor and the threads have it in a local variable."""
    for frame, _ in places:
        if _is_ours(frame):
            for value in list(frame.f_locals.values()):
                if isinstance(value, Delivery):
                    return printable(f"{value.task} {value.lease.message.id}")
    return None


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_library(frame: FrameType) -> bool:
    """Return whether a frame is of the standard library. A stack of only such frames waits."""
    return frame.f_code.co_filename.startswith((os.path.dirname(os.__file__) + os.sep, "<frozen"))


def _format(places: list[_Place]) -> list[str]:
    summary = traceback.StackSummary.extract(iter(places))
    return [printable(f"{f.filename}:{f.lineno} {f.name}: {f.line or ''}".rstrip(": ")) for f in summary]
