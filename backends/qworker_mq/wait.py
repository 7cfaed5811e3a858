"""Waiting for a message to lease."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from qworker.names import check_queue
from qworker_mq.daemons import Mover
from qworker_mq.reap import StoreReaper
from qworker_mq.store import Store

__all__ = ["wait_for_work"]

# Seconds between checks that need no wake-up, and while a change may be too recent to show.
_RESCAN = 1.0
_UNSTABLE = 0.05


async def wait_for_work(store: Store, mover: Mover, reaper: StoreReaper, queues: Sequence[str], timeout: float) -> None:
    """Wait for a wake-up from this process or the directories, or until a message is due."""
    store.watch(queues)
    deadline = time.monotonic() + timeout
    with store.listen(queues) as event:
        while not store.place.is_replaced():
            event.clear()
            due, check = await _seconds_until_work(store, mover, reaper, queues)
            left = min(deadline - time.monotonic(), due)
            if left <= 0 or (left <= check and not await _wait_for_event(event, left)):
                return
            await _wait_for_event(event, min(left, check))


async def _seconds_until_work(
    store: Store, mover: Mover, reaper: StoreReaper, queues: Sequence[str]
) -> tuple[float, float]:
    """Return the seconds until a queue has a message to lease, as far as it is known now, and until the next check."""
    mover.sweep()
    soonest = math.inf
    check = _RESCAN
    for queue in queues:
        if store.can_skip(check_queue(queue)):
            continue
        open_queue = store.get(queue)
        if open_queue is None or store.is_paused(queue):
            continue
        with store.in_use.using(queue):
            reaper.promote(open_queue)
            await open_queue.window.refresh()
        if len(open_queue.window):
            return 0.0, 0.0
        due = open_queue.due.next_due()
        if due is not None:
            soonest = min(soonest, max(0.001, due - store.clock.time()))
        if not open_queue.window.is_stable:
            check = _UNSTABLE
    return soonest, check


async def _wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event, and return whether it was set."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
