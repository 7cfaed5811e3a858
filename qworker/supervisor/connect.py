"""The connection to the backend when a worker starts: at once, or, if the worker is to wait, when it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from qworker.backend import Backend
from qworker.errors import BackendError, BackendUnavailable
from qworker.kit.task_groups import run_until
from qworker.worker.outage import Outage

__all__ = ["connect"]


async def connect(
    attempt_once: Callable[[], Coroutine[Any, Any, Backend]], *, waits: bool, stopping: asyncio.Event, outage: Outage
) -> Backend | None:
    """Connect to the backend. Return None if the worker was stopped before.

    Args:
        attempt_once: Makes one attempt.
        waits: Whether to try again until the backend can be reached.
        stopping: Set when the worker is stopped.
        outage: Logs the start and the end of an outage once.

    Raises:
        BackendUnavailable: The backend cannot be reached, and the worker is not to wait.
        BackendError: The backend refuses this user, or is newer than this release: to wait would not help.
    """
    while not stopping.is_set():
        try:
            # An attempt can last as long as its timeouts. A signal does not wait for them.
            backend = await run_until(stopping.wait, attempt_once())
        except BackendError as error:
            if stopping.is_set():
                break
            if not waits or not isinstance(error, BackendUnavailable):
                raise
            with anyio.move_on_after(outage.record_failure(error)):
                await stopping.wait()
        else:
            if backend is not None:
                outage.record_success()
            return backend
    return None
