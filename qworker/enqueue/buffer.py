"""Blocks in which calls are collected, and published when the block ends.

The open blocks are in a context variable, so they count for the code in the block and for the tasks and the threads
that copy its context. Such a task can outlive its block: then its calls go to the next outer block, or to the store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

from qworker.call import Call
from qworker.enqueue.portal import check_blocking, run_blocking
from qworker.enqueue.waiting_calls import WaitingCall, send_calls, wait_to_send
from qworker.jobs.job import Job
from qworker.jobs.source import JobApp

__all__ = ["buffered", "buffered_sync", "collect", "innermost"]


class _Buffer:
    """The calls of one block.

    Args:
        app: The app whose calls it takes. None: it takes those of every app.
        outer: The block around it.
    """

    __slots__ = ("_app", "_calls", "_lock", "_pid", "outer")

    def __init__(self, app: JobApp | None, outer: _Buffer | None) -> None:
        self._app = app
        self.outer = outer
        # None: the block has ended.
        self._calls: list[WaitingCall] | None = []
        self._lock = threading.Lock()
        # A forked child has a copy of the list. The parent sends the calls in it, and nothing would send the child's.
        self._pid = os.getpid()

    def take(self, waiting: WaitingCall) -> bool:
        """Take a call. Return False if the block has ended, or is for another app or of another process."""
        if os.getpid() != self._pid:
            return False
        # Without the lock, a call of another thread could come to the list after `end` has taken it, and be lost.
        with self._lock:
            if self._calls is None or self._app not in {None, waiting.app}:
                return False
            self._calls.append(waiting)
            return True

    def end(self) -> list[WaitingCall]:
        """End the block, and return its calls."""
        if os.getpid() != self._pid:
            return []
        with self._lock:
            calls, self._calls = self._calls or [], None
            return calls


_innermost: ContextVar[_Buffer | None] = ContextVar("qworker_buffer", default=None)
# Each call asks for it, so it is the method itself.
innermost = _innermost.get


def collect(app: JobApp, call: Call) -> Job[Any] | None:
    """Let a call wait for the end of a block, and return its job. Return None if no block takes it.

    Raises:
        MessageTooLarge: Its body is larger than `max_body`.
        NotSupported: The store does not support one of its options, or takes no ids.
    """
    waiting = wait_to_send(app, call)
    return waiting.job if _give(_innermost.get(), waiting) else None


def _give(buffer: _Buffer | None, waiting: WaitingCall) -> bool:
    """Give a call to a block, or to the nearest one around it that takes it. Return False if none does."""
    while buffer is not None:
        if buffer.take(waiting):
            return True
        buffer = buffer.outer
    return False


@contextmanager
def _open_block(app: JobApp | None) -> Generator[list[WaitingCall]]:
    """Collect calls in the block, and yield a list. After the block it has those that are to be published."""
    outer = _innermost.get()
    buffer = _Buffer(app, outer)
    _innermost.set(buffer)
    unsent: list[WaitingCall] = []
    try:
        yield unsent
    finally:
        # Not with a token: a block may end in another context than it began in, as the fixtures of tests do.
        _innermost.set(outer)
        calls = buffer.end()
    # An exception does not come here: the calls are dropped.
    unsent += [waiting for waiting in calls if not _give(outer, waiting)]


@asynccontextmanager
async def buffered(app: JobApp | None) -> AsyncGenerator[None]:
    """Collect the calls in the block, and publish them when it ends. See `Tasks.buffered`."""
    with _open_block(app) as unsent:
        yield
    if unsent:
        await send_calls(unsent)


@contextmanager
def buffered_sync(app: JobApp | None) -> Generator[None]:
    """Collect the calls in the block, and publish them when it ends. See `Tasks.buffered_sync`."""
    instead = "`async with tasks.buffered()`"
    # At the end it would be too late for this error.
    check_blocking(instead)
    with _open_block(app) as unsent:
        yield
    if unsent:
        run_blocking(send_calls(unsent), instead=instead)
