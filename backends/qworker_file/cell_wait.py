"""Waiting for cells, and for messages at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.cell import CellWatch
from qworker.kit.cell_wait import first_of, wait_for_change
from qworker.kit.directory.wait import wait_for_work
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue
from qworker_file.cell_hub import CellListener
from qworker_file.cells import read_version
from qworker_file.store import Store

__all__ = ["wait_for_either"]


async def wait_for_either(store: Store, queues: Sequence[str], timeout: float, watches: Sequence[CellWatch]) -> None:
    """Wait until a queue may have work, or a cell has changed.

    Raises:
        BackendUnavailable, PermissionDenied: The store failed.
    """
    cells = _wait_for_cells(store, watches, timeout)
    if queues:
        await first_of(cells, wait_for_work(store, queues, timeout))
    else:
        await cells


async def _wait_for_cells(store: Store, watches: Sequence[CellWatch], timeout: float) -> None:
    listener = CellListener()

    async def look() -> bool:
        return store.cell_hub.is_closed or any(_has_changed(store, watch, listener) for watch in watches)

    try:
        with store_errors("wait for cells"):
            await wait_for_change(look, listener.woken, timeout)
    finally:
        store.cell_hub.forget(listener)


def _has_changed(store: Store, watch: CellWatch, listener: CellListener) -> bool:
    """Subscribe to a cell, then return whether it has another version than its watch says."""
    queue = store.get(check_existing_queue(watch.queue))
    if queue is None:
        return watch.version != ""
    store.cell_hub.subscribe(queue.files, watch.group, watch.name, listener)
    return read_version(queue.files, watch.group, watch.name, store.clock.time()) != watch.version
