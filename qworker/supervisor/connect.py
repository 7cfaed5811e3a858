"""The connection to the backend when a worker starts: at once, or, if the worker is to wait, when it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from qworker.backend import Backend
from qworker.errors import BackendUnavailable
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
    ending = asyncio.create_task(stopping.wait())
    try:
        while not stopping.is_set():
            attempt = asyncio.create_task(attempt_once())
            # An attempt can last as long as its timeouts. A signal does not wait for them.
            await asyncio.wait({attempt, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                await _abandon(attempt)
                return None
            try:
                backend = attempt.result()
            except BackendUnavailable as error:
                if not waits:
                    raise
                await asyncio.wait({ending}, timeout=outage.record_failure(error))
            else:
                outage.record_success()
                return backend
        return None
    finally:
        ending.cancel()


async def _abandon(attempt: asyncio.Task[Backend]) -> None:
    attempt.cancel()
    await asyncio.wait({attempt})
    if not attempt.cancelled():
        # It has ended meanwhile. Its result does not count any more.
        attempt.exception()
