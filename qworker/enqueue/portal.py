"""Run coroutines for code without an event loop, on a loop in a background thread that starts with the first call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from qworker.errors import UsageError

__all__ = ["check_blocking", "run_blocking"]

T = TypeVar("T")


class _BackgroundLoop:
    """The loop of this process, which starts with the first call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="qworker-portal", daemon=True).start()
            return self._loop


_background = _BackgroundLoop()
# A child has the parent's loop object, but not its thread. Another thread of the parent may have held the lock.
os.register_at_fork(after_in_child=_background.reset)


def run_blocking(coroutine: Coroutine[Any, Any, T], *, instead: str) -> T:
    """Run a coroutine, block this thread until it is done, and return its result.

    All threads of a process share one loop. A forked child starts its own.

    Args:
        coroutine: The coroutine.
        instead: The code to use in a running event loop, for the error text.

    Raises:
        UsageError: This thread runs an event loop, which the call would block, or gevent has replaced threads.
    """
    try:
        check_blocking(instead)
    except UsageError:
        coroutine.close()
        raise
    future = asyncio.run_coroutine_threadsafe(coroutine, _background.get())
    try:
        return _result(future)
    except BaseException:
        # An interrupt: the caller is gone, so its call is cancelled, unless it has happened already.
        future.cancel()
        raise


def check_blocking(instead: str) -> None:
    """Check that this thread can wait for a coroutine.

    Raises:
        UsageError: It runs an event loop, or gevent has replaced threads. See `run_blocking`.
    """
    problem = _problem(instead)
    if problem is not None:
        raise UsageError(problem)


def _problem(instead: str) -> str | None:
    """Return why this thread cannot wait for another thread's loop, or None."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        # Then the loop's thread is a greenlet of the caller's thread, and the loop runs in the other greenlets' thread.
        return (
            "gevent has replaced threads (monkey.patch_all), and this call needs real ones:"
            " use threads (gunicorn -k gthread),"
            " or gevent.get_hub().threadpool.apply(lambda: asyncio.run(task.enqueue(...)))"
        )
    if gevent is not None and gevent.is_module_patched("select"):
        # Then the loop's thread is a real one, in which gevent has nothing to wait for.
        return "gevent has replaced select, and this call needs the real one: use threads (gunicorn -k gthread)"
    return f"an event loop is running in this thread: use {instead}" if _has_running_loop() else None


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _result(future: concurrent.futures.Future[T]) -> T:
    # A wait without a timeout is not interrupted by a signal that another thread of the process receives.
    while True:
        try:
            return future.result(timeout=1.0)
        except concurrent.futures.TimeoutError:
            if future.done():
                # Its own error, or it has ended just after this wait.
                return future.result()
