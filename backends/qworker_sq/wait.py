"""Waiting until a channel may have a message to lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qworker.kit.store_errors import store_errors
from qworker_sq.store import SqStore

__all__ = ["wait_for_work"]

# Seconds between two reads of the log without a wake-up: writers that are not qworker leave no wake-up.
_POLL_INTERVAL = 0.05


async def wait_for_work(store: SqStore, queues: Sequence[str], timeout: float) -> None:
    """Wait for a publish, a release, the death of the owner, or the moment at which a message becomes due."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout
    earliest = float("inf")
    while not store.place.is_replaced():
        store.changed.clear()
        due = min([await _seconds_until_work(store, queue) for queue in queues], default=float("inf"))
        earliest = min(earliest, loop.time() + due)
        left = min(give_up, earliest) - loop.time()
        if due <= 0 or left <= 0:
            return
        try:
            async with asyncio.timeout(min(left, _POLL_INTERVAL)):
                await store.changed.wait()
        except TimeoutError:
            pass


async def _seconds_until_work(store: SqStore, queue: str) -> float:
    """Return the seconds until a queue has a message for this instance, as far as is known now."""
    if store.in_use.can_skip(queue, store.topics) or store.in_use.is_full(queue, store.topics):
        return float("inf")
    with store.in_use.using(queue):
        return await _look(store, queue)


async def _look(store: SqStore, queue: str) -> float:
    channel = await store.get_channel(queue)
    if channel is None:
        return float("inf")
    with store_errors(f"use the queue {queue}"):
        channel.follow()
        ledger = channel.ledger
        now = store.clock.time()
        ledger.make_due(now)
        if ledger.paused or not channel.try_own():
            return float("inf")
        if ledger.cursor < channel.end() or ledger.next_ready(1):
            return 0.0
        due = ledger.next_due()
        return float("inf") if due is None else max(0.001, due - now)
