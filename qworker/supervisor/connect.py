"""The backend at a worker's start: reached at once, or, where the worker is to wait for it, when it is there."""

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
    """The backend; None: the worker was told to end before it was there.

    Args:
        attempt_once: one attempt.
        waits: whether to try again until it is there.
        stopping: set when the worker is told to end.
        outage: says once that it is away, and once that it is back.

    Raises:
        BackendUnavailable: it is not there, and nobody waits for it.
        BackendError: it is there, and refuses this user, or is newer than this release: waiting would not help.
    """
    ending = asyncio.create_task(stopping.wait())
    try:
        while not stopping.is_set():
            attempt = asyncio.create_task(attempt_once())
            # An attempt lasts as long as its timeouts; a signal does not wait for them.
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
        # It came to its end meanwhile, and whatever that was counts no more.
        attempt.exception()
