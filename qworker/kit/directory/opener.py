"""Opening the store of a backend instance, and its queues, when they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from qworker.kit.directory.followed_queue import FollowedQueue
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.directory.store import CLOSE_AFTER, DirectoryStore, log_replaced
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue

__all__ = ["StoreOpener"]

Store = TypeVar("Store", bound=DirectoryStore[Any])
T = TypeVar("T")
Queue = TypeVar("Queue", bound=FollowedQueue[Any, Any])


class StoreOpener(Generic[Store, Queue]):
    """Opens one store. An instance that only reads does not create it.

    Args:
        directory: The root.
        make: Opens the root, which is created if it does not exist.

    Attributes:
        store: The store, or None while it is not open.
    """

    def __init__(self, directory: Path, make: Callable[[], Store]) -> None:
        self._directory = directory
        self._make = make
        self.store: Store | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def open(self) -> Store:
        """Return the open store. If its directory was removed or replaced, it is opened again.

        Raises:
            BackendUnavailable: The directory would be in another place: nothing is mounted there, for example.
        """
        if self.store is None:
            with store_errors(f"open {self._directory}"):
                self.store = self._make()
        elif self.store.is_replaced():
            self._replace(self.store)
        return self.store

    async def call(self, function: Callable[[Store], Awaitable[T]]) -> T:
        """Call a function with the store, and once more if its directory was removed or replaced meanwhile.

        Raises:
            OSError: See the function. It has changed nothing if it raises `FileNotFoundError`.
        """
        store = self.open()
        try:
            return await function(store)
        except FileNotFoundError:
            if not store.is_replaced(now=True):
                raise
        return await function(self.open())

    def _replace(self, old: Store) -> None:
        with store_errors(f"open {self._directory}"):
            old.check_replaceable()
            self.store = self._make()
        log_replaced(str(self._directory))
        old.wake_all()
        task = asyncio.get_running_loop().create_task(_close_unused(old))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def names(self) -> list[str]:
        """Return the names of all queues, sorted."""
        store = self._open_existing()
        return [] if store is None else store.names()

    def get_queue(self, queue: str) -> Queue | None:
        """Return an open queue, or None if it does not exist."""
        name, store = check_existing_queue(queue), self._open_existing()
        return None if store is None else store.get(name)

    def require_queue(self, queue: str) -> Queue:
        """Return an open queue.

        Raises:
            QueueNotFound: It does not exist.
        """
        opened = self.get_queue(queue)
        if opened is None:
            raise queue_not_found(queue, self._directory)
        return opened

    def _open_existing(self) -> Store | None:
        return self.open() if self.store is not None or not is_missing(self._directory) else None

    async def aclose(self) -> None:
        """Close the store. Idempotent."""
        store, self.store = self.store, None
        if store is not None:
            await store.aclose()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _close_unused(store: DirectoryStore[Any]) -> None:
    """Close a replaced store after the calls that run now, and after the leases in it."""
    try:
        await asyncio.sleep(CLOSE_AFTER)
        while store.has_leases:
            await asyncio.sleep(CLOSE_AFTER)
    finally:
        await store.aclose()
