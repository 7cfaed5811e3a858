"""`mq:///root`: the directory of an mq server as a backend, shared with other implementations of mq.

Options: `peers=N` (number of other processes that fetch: take one of the N + 1 oldest), `sync=full|off`, `daemons=0`
(leave new messages, and those that other programs fetched, to another mover and reaper), `delay=30` (seconds after
which a message returns that another program fetched).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.history.directory import directory_history
from qworker.kit.directory.in_use import QueuesInUse
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.files import check_writable
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import make_shares
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import Draft, Lease, Query, QueueStats, Selection, Settlement, State, StoredMessage
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_mq.admin import Admin
from qworker_mq.browse import Browser
from qworker_mq.daemons import Mover, Trash
from qworker_mq.ids import is_uuid
from qworker_mq.lease import RemoteMqLeases, extend_leases, lease_messages
from qworker_mq.options import MqOptions
from qworker_mq.publish import Publisher
from qworker_mq.reap import StoreReaper
from qworker_mq.settle import settle_messages
from qworker_mq.store import Store
from qworker_mq.wait import wait_for_work

__all__ = ["MqBackend"]

T = TypeVar("T")


class MqBackend(Backend):
    """Queues in an mq directory.

    Args:
        url: The root.
        clock: The source of the time.
        remote_leases: See `Backend.from_url`.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "mq has no priorities",
        "unique_key": "mq has no keys",
        "hold": "mq keeps no ids of messages that are gone",
        "given_ids": "an mq id is a UUID; only such ids can be given",
        "fields": "a message consists of its contents only",
        "retry_errors": "the record of a message has one line of the error: the history keeps all of it",
        "keep_done": "mq cannot keep finished messages: its reaper unlinks acked ones",
        "deaths": "the record of a message counts its tries only",
        "argv": "a message consists of its contents only",
    }

    # It is found by its name: the ids that can be given although given ids are a deviation.
    takes_id = staticmethod(is_uuid)

    def __init__(self, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._url = url
        self._options = MqOptions.from_url(url)
        self.max_body = self._options.max_body
        self._clock = clock
        self.directory = self._path = url.directory
        self.history = directory_history(url, self._path, default=False, clock=clock)
        self.remote_leases = RemoteMqLeases(self._open_store) if remote_leases else None
        self._doing = f"use {self._path}"
        self._store: Store | None = None
        # An open queue has three descriptors.
        self._in_use = QueuesInUse(3)
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `mq:///root`, with the options of `MqOptions`."""
        return cls(url, clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Open the directories, and create them if they do not exist."""
        with store_errors(self._doing):
            self._open_store()

    def _open_store(self) -> Store:
        if self._store is None:
            remote = self.remote_leases is not None
            store = self._store = Store(self._path, self._clock, self._options, self._in_use, has_remote_holders=remote)
            self._mover, self._trash = Mover(store), Trash(store)
            self._reaper = StoreReaper(store, self._mover, self._trash)
            self._publisher = Publisher(store)
            self._browser = Browser(store, self._reaper)
            self._admin = Admin(store, self._reaper, self._trash, self._browser)
        return self._store

    def _open_existing(self, queue: str) -> Store:
        """Open the directories to read or change a queue. A root that does not exist is not created."""
        check_queue(queue)
        if self._is_missing():
            raise queue_not_found(queue, self.directory)
        return self._open_store()

    def _is_missing(self) -> bool:
        return self._store is None and is_missing(self.directory)

    async def aclose(self) -> None:
        """Finish what runs, and close the directories."""
        await self.history.aclose()
        while self._running:
            await asyncio.wait(self._running)
        store, self._store = self._store, None
        if store is not None:
            await self._trash.aclose()
            await store.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(str(self._path))

    @property
    def durability(self) -> str:
        """`disk`. `process` with `sync=off`, and on a file system without a journal or barriers."""
        return durability_at(os.fspath(self._path), sync=self._options.sync)

    @contextmanager
    def _using(self, *queues: str) -> Generator[None]:
        """Keep queues open until the end of the block, and raise each `OSError` as a `BackendError`."""
        doing = f"use the queue {queues[0]!r} in {self._path}" if len(queues) == 1 else self._doing
        with store_errors(doing), self._in_use.using(*queues):
            yield

    async def _shield(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end an operation that a cancellation must not interrupt."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        refuse_unsupported("mq", self.deviations, drafts, takes_id=is_uuid)
        check_bodies(drafts, self.max_body)
        with self._using(queue):
            self._open_store()
            return await self._shield(self._publisher.publish(queue, drafts))

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages."""
        await wait_for_ready(self, queue, limit, timeout)
        with self._using(queue):
            store = self._open_store()
            self._mover.sweep()
            return await lease_messages(store, self._reaper, check_queue(queue), limit, visibility)

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a wake-up from this process or the directories, or until a message is due."""
        with store_errors(self._doing):
            # A wait uses its queues one after another.
            store = self._open_store()
            await wait_for_work(store, self._mover, self._reaper, queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases."""
        store = self._store
        if store is None:
            raise BackendUnavailable(f"{self.describe()} is closed")
        with store_errors(self._doing):
            return extend_leases(store, self._reaper, leases, visibility)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        with self._using(*{settlement.lease.message.queue for settlement in settlements}):
            store = self._open_store()
            return await self._shield(settle_messages(store, self._trash, settlements))

    async def reap(self, queue: str) -> int:
        """Return expired and due messages, and do the daemons' work."""
        with self._using(queue):
            self._open_store()
            return self._reaper.reap(check_queue(queue))

    # -- queues --------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the queues."""
        with store_errors(self._doing):
            if self._is_missing():
                return []
            self._open_store()
            self._mover.sweep()
            return await self._admin.queues()

    async def create(self, queue: str) -> None:
        """Create a queue."""
        with self._using(queue):
            store = self._open_store()
            store.get_or_create(queue)
            check_writable(store.root.tmp)
            await self._shield(store.sync_directories(store.root.queues))

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        with self._using(queue):
            check_queue(queue)
            if not self._is_missing():
                self._open_store()
                await self._shield(self._admin.delete(queue))

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        with self._using(queue):
            self._open_existing(queue)
            stats = await self._admin.stats(queue)
        return msgspec.structs.replace(stats, retention=self.history.retention)

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        with self._using(queue):
            self._open_existing(queue)
            await self._admin.pause(queue)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with self._using(queue):
            self._open_existing(queue)
            await self._admin.resume(queue)

    # -- messages ------------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages in a state."""
        with self._using(queue):
            self._open_existing(queue)
            async for page in self._browser.browse(queue, query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the messages by their ids."""
        with self._using(queue):
            self._open_existing(queue).require(queue)
        return make_shares(count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Find messages by their ids."""
        with self._using(queue):
            self._open_existing(queue)
            return await self._browser.find(queue, ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with self._using(queue):
            self._open_existing(queue)
            return await self._shield(self._admin.requeue(queue, selection))

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with self._using(queue):
            self._open_existing(queue)
            return await self._shield(self._admin.remove(queue, selection))

    # -- not in the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory."""
        from qworker.kit.directory.body_sizes import examine_bodies
        from qworker.kit.directory.doctor import examine_directory

        checks = await examine_directory(url.directory)
        return checks + await examine_bodies(url.directory, ("queues/*",), MqOptions.from_url(url).max_body)
