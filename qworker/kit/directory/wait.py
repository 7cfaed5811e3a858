"""Waiting until one of some queues may have work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from qworker.kit.directory.store import DirectoryStore
from qworker.kit.directory.waiter import Waiter
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue

__all__ = ["wait_for_work"]

# Seconds between two checks whether a missing queue was created, or one that is not open has messages.
_ABSENT_PAUSE = 1.0


async def wait_for_work(store: DirectoryStore[Any], queues: Sequence[str], timeout: float) -> bool:
    """Wait for a publish, a return to ready, a due time, the end of a pause, or a listing that finds something.

    Returns:
        Whether a change was reported. The lease that follows checks for itself, so a check here would be redundant.
    """
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout
    waiter = Waiter([check_existing_queue(name) for name in queues])
    store.add_waiter(waiter)
    try:
        with store_errors("wait for messages"):
            while True:
                due, check = await _next_events(store, waiter)
                left = ends - loop.time()
                if due <= 0 or left <= 0:
                    return False
                pause = min(due, check, left)
                if await waiter.sleep(pause):
                    return True
                if pause == due:
                    return False
    finally:
        store.remove_waiter(waiter)


async def _next_events(store: DirectoryStore[Any], waiter: Waiter) -> tuple[float, float]:
    """Return the known seconds until a queue has work (0 if it has work now), and the seconds until the next check."""
    if store.is_full():
        # The end of a lease wakes the waiter.
        return float("inf"), float("inf")
    due, check = float("inf"), _ABSENT_PAUSE
    for name in waiter.queues:
        if store.has_nothing_to_lease(name):
            continue
        queue = store.get(name)
        if queue is None:
            continue
        with queue.files:
            store.listen(queue)
            if await queue.has_work():
                return 0.0, 0.0
        due = min(due, queue.until_due())
        check = min(check, queue.until_check())
    return due, check
