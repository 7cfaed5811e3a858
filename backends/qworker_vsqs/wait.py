"""Waiting until a queue may have a message to lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qworker.kit.store_errors import store_errors
from qworker_vsqs.reap import reap_expired
from qworker_vsqs.store import VsqsStore

__all__ = ["wait_for_work"]


async def wait_for_work(store: VsqsStore, queues: Sequence[str], timeout: float) -> None:
    """Wait for a message, for the end of a lease, or for a delay to be over."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout
    while not store.place.is_replaced():
        soonest = min([await _seconds_until_work(store, queue) for queue in queues], default=float("inf"))
        give_up = min(give_up, loop.time() + soonest)
        left = give_up - loop.time()
        if left <= 0:
            return
        await store.wait_for_change(left)


async def _seconds_until_work(store: VsqsStore, name: str) -> float:
    """Return when a queue has a message to lease, as far as is known now."""
    if store.in_use.can_skip(name, store.queues) or store.in_use.is_full(name, store.queues):
        return float("inf")
    with store.in_use.using(name):
        queue = store.get(name)
        if queue is None or queue.is_paused():
            return float("inf")
        with store_errors(f"read {name}"):
            await reap_expired(store, queue)
    if queue.window.has_ready:
        return 0.0
    expiry = queue.window.next_expiry()
    return float("inf") if expiry is None else max(0.001, store.options.unit.seconds(expiry) - store.clock.time())
