"""Handlers that wait for other jobs. Such a handler does not count as busy, or a parent could block its own child."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from qworker.jobs.records import AwaitedJob
from qworker.logs import RUNNING, Running

__all__ = ["HANDLER_WAITS", "HandlerWaits", "handler_waits"]


class HandlerWaits(Protocol):
    """The worker, or the process of a handler, as a handler that waits sees it. From any thread."""

    def begin(self, running: Running, job: AwaitedJob, /) -> None:
        """Report that the handler waits for a job from now on.

        Raises:
            UsageError: Too many handlers of the worker wait.
        """
        ...

    def end(self, running: Running, /) -> None:
        """Report that the handler continues."""
        ...


# Set where handlers run. The tasks and threads that a handler starts inherit it, and so does the loop of `portal`.
HANDLER_WAITS: ContextVar[HandlerWaits | None] = ContextVar("qworker_handler_waits", default=None)


@contextmanager
def handler_waits(job: AwaitedJob) -> Generator[None]:
    """Let the worker run another message inside the block, if a handler waits there.

    Args:
        job: The job that it waits for.

    Raises:
        UsageError: Too many handlers of the worker wait.
    """
    waits, running = HANDLER_WAITS.get(), RUNNING.get()
    if waits is None or running is None or running.is_over:
        yield
        return
    waits.begin(running, job)
    try:
        yield
    finally:
        waits.end(running)
