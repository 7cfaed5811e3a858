"""Waiting for cells, and for messages at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from qworker.cell import CellWatch
from qworker.kit.cell_wait import first_of, wait_for_change
from qworker.names import check_queue
from qworker_redis.cell_hub import CellHub
from qworker_redis.cells import RedisCells, channel_of, member_of
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["CellWaiter"]


class CellWaiter:
    """Waits for the cells of one backend.

    Args:
        store: The store of the backend.
        cells: Its cells.
    """

    def __init__(self, store: RedisStore, cells: RedisCells) -> None:
        self._store = store
        self._cells = cells
        self._hubs: dict[int, CellHub] = {}
        # How often the backend was closed: calls that began before it end.
        self._closed = 0

    async def wait(
        self, watches: Sequence[CellWatch], timeout: float, messages: Coroutine[Any, Any, Any] | None
    ) -> None:
        """Wait until a cell has another version than its watch says, or `messages` has ended."""
        cells = self._wait(watches, timeout)
        await (cells if messages is None else first_of(cells, messages))

    async def aclose(self) -> None:
        """End the subscriptions, and the calls that wait."""
        self._closed += 1
        while self._hubs:
            await self._hubs.popitem()[1].aclose()

    async def _wait(self, watches: Sequence[CellWatch], timeout: float) -> None:
        woken = asyncio.Event()
        closed = self._closed
        by_queue: dict[str, list[CellWatch]] = {}
        for watch in watches:
            by_queue.setdefault(check_queue(watch.queue), []).append(watch)

        async def look() -> bool:
            if self._closed != closed:
                return True
            for watch in watches:
                await self._hub(watch.queue).subscribe(_channel(watch), woken)
            return any([await self._has_changed(queue, some) for queue, some in by_queue.items()])

        try:
            await wait_for_change(look, woken, timeout)
        finally:
            for watch in watches:
                self._hub(watch.queue).unsubscribe(_channel(watch), woken)

    async def _has_changed(self, queue: str, watches: Sequence[CellWatch]) -> bool:
        versions = await self._cells.versions(queue, [member_of(watch.group, watch.name) for watch in watches])
        return any(watch.version != version for watch, version in zip(watches, versions, strict=True))

    def _hub(self, queue: str) -> CellHub:
        """Return the subscriptions to the server of a queue. A cluster has one for each slot that is used."""
        slot = queue_slot(queue) if self._store.options.mode == "cluster" else 0
        hub = self._hubs.get(slot)
        if hub is None:
            hub = self._hubs[slot] = CellHub(self._store, slot)
        return hub


def _channel(watch: CellWatch) -> bytes:
    return channel_of(watch.queue, member_of(watch.group, watch.name))
