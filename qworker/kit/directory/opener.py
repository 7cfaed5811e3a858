"""Opening the store of a backend instance, and its queues, when they are needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from qworker.kit.directory.closing import LateCloser, log_replaced
from qworker.kit.directory.followed_queue import FollowedQueue
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.directory.place import Place
from qworker.kit.directory.store import DirectoryStore
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue

__all__ = ["Opener", "StoreOpener"]


class ReplaceableStore(Protocol):
    """An open store whose directory can be removed or replaced."""

    @property
    def place(self) -> Place:
        """Where its directory is."""
        ...

    @property
    def has_leases(self) -> bool:
        """Whether it must stay open, because leases end by its descriptors."""
        ...

    def wake_all(self) -> None:
        """End all waits."""

    async def aclose(self) -> None:
        """Close it."""


AnyStore = TypeVar("AnyStore", bound=ReplaceableStore)
Store = TypeVar("Store", bound=DirectoryStore[Any])
T = TypeVar("T")
Queue = TypeVar("Queue", bound=FollowedQueue[Any, Any])


class Opener(Generic[AnyStore]):
    """Opens one store. An instance that only reads does not create it.

    Args:
        directory: The root.
        make: Opens the root, which is created if it does not exist.

    Attributes:
        store: The store, or None while it is not open.
    """

    def __init__(self, directory: Path, make: Callable[[], AnyStore]) -> None:
        self._directory = directory
        self._make = make
        self.store: AnyStore | None = None
        self._closer = LateCloser()

    def open(self) -> AnyStore:
        """Return the open store. If its directory was removed or replaced, it is opened again.

        Raises:
            BackendUnavailable: The directory would be in another place: nothing is mounted there, for example.
        """
        if self.store is None:
            with store_errors(f"open {self._directory}"):
                self.store = self._make()
        elif self.store.place.is_replaced():
            self._replace(self.store)
        return self.store

    async def call(self, function: Callable[[AnyStore], Awaitable[T]]) -> T:
        """Call a function with the store, and once more if its directory was removed or replaced meanwhile.

        Raises:
            OSError: See the function. It has changed nothing if it raises `FileNotFoundError`.
        """
        store = self.open()
        try:
            return await function(store)
        except FileNotFoundError:
            if not store.place.is_replaced(now=True):
                raise
        return await function(self.open())

    def _replace(self, old: AnyStore) -> None:
        with store_errors(f"open {self._directory}"):
            old.place.check_replaceable()
            self.store = self._make()
        log_replaced(str(self._directory))
        old.wake_all()
        self._closer.add(old.aclose, lambda: old.has_leases)

    def open_existing(self) -> AnyStore | None:
        """Return the open store, or None if its directory does not exist.

        A directory that was moved away is not created again by reads: it may come back, with its messages.
        """
        return None if is_missing(self._directory) else self.open()

    def require(self, queue: str) -> AnyStore:
        """Return the open store, to read or change a queue.

        Raises:
            QueueNotFound: The directory does not exist.
        """
        store = self.open_existing()
        if store is None:
            raise queue_not_found(queue, self._directory)
        return store

    async def aclose(self) -> None:
        """Close the store. Idempotent."""
        store, self.store = self.store, None
        if store is not None:
            await store.aclose()
        await self._closer.aclose()


class StoreOpener(Opener[Store], Generic[Store, Queue]):
    """Opens one store, and its queues."""

    def names(self) -> list[str]:
        """Return the names of all queues, sorted."""
        store = self.open_existing()
        return [] if store is None else store.names()

    def get_queue(self, queue: str) -> Queue | None:
        """Return an open queue, or None if it does not exist."""
        name, store = check_existing_queue(queue), self.open_existing()
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
