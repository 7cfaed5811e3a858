"""`vsqs:` queues, shared live with any other implementation of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.directory import directory_history
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.max_body import check_bodies
from qworker.kit.parts import make_shares
from qworker.kit.settle import settle_by_queue
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import Draft, Lease, Query, QueueStats, Selection, Settlement, State, StoredMessage
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_vsqs import admin, browse
from qworker_vsqs.lease import VsqsLeases
from qworker_vsqs.options import VsqsOptions
from qworker_vsqs.publish import VsqsPublisher
from qworker_vsqs.reap import reap_expired
from qworker_vsqs.settle import settle_in_queue
from qworker_vsqs.store import VsqsStore
from qworker_vsqs.wait import wait_for_work

__all__ = ["VsqsBackend"]


class VsqsBackend(Backend):
    """Directories of messages: a message is a file, and its name is its state."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "the order is that of the ids",
        "unique_key": "the protocol has no keys",
        "hold": "the protocol keeps no ids of messages that are gone",
        "given_ids": "an id is the time of its creation",
        "fields": "a message consists of its contents only",
        "keep_done": "the protocol cannot keep finished messages: an ack deletes the file",
        "deaths": "the name of a message counts its tries only",
        "argv": "a message consists of its contents only",
    }

    def __init__(self, url: BackendURL, options: VsqsOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url = url
        self._clock = clock
        self.max_body = options.max_body
        self.directory = url.directory
        self._store = VsqsStore(self.directory, options, clock)
        self._publisher = VsqsPublisher(self._store)
        self._leases = VsqsLeases(options.unit, options.max_body)
        self.history = directory_history(url, self._store.path, default=False, clock=clock)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `vsqs:///dir`, with the options of `VsqsOptions`."""
        return cls(url, VsqsOptions.from_url(url), clock)

    async def open(self) -> None:
        """Open the directory, which is created if it does not exist."""
        self._store.open(create=True)

    async def aclose(self) -> None:
        """Close the store. Leases last until they expire."""
        await self.history.aclose()
        await self._store.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(self._store.path)

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, and on a file system without barriers or a journal that keeps renames."""
        return durability_at(self._store.path, sync=self._store.options.durable)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages. With a capacity, wait for room."""
        check_queue(queue)
        refuse_unsupported("vsqs", self.deviations, drafts)
        check_bodies(drafts, self.max_body)
        if not drafts:
            return []
        with self._store.in_use.using(queue), store_errors(f"publish to {queue}"):
            ids = await self._publisher.publish(self._store.get_or_create(queue), drafts)
        self._store.wake()
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease the oldest ready messages."""
        await wait_for_ready(self, queue, limit, timeout)
        if self._store.in_use.is_full(queue, self._store.queues):
            # The leases of this instance keep too many queues open.
            return []
        with self._store.in_use.using(queue), store_errors(f"lease from {queue}"):
            return await self._claim(queue, limit, visibility)

    async def _claim(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        directory = self._store.get(queue)
        if directory is None or directory.is_paused():
            return []
        await reap_expired(self._store, directory)
        leases = self._leases.claim(directory, limit, visibility, self._clock.time())
        directory.leases.update(leases)
        return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a message, for the end of a lease, or for a delay to be over."""
        await wait_for_work(self._store, queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        now = self._clock.time()
        lost: list[Lease] = []
        for lease in leases:
            directory = self._store.queues.get(lease.message.queue)
            with store_errors(f"extend leases of {lease.message.queue}"):
                if directory is None or not self._leases.extend(directory, lease, now, visibility):
                    lost.append(lease)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases and return the refused settlements."""

        async def settle_in(queue: str, some: Sequence[Settlement]) -> list[Settlement]:
            with self._store.in_use.using(queue):
                directory = self._store.get(queue)
                return list(some) if directory is None else await settle_in_queue(self._store, directory, some)

        return await settle_by_queue(settlements, settle_in)

    async def reap(self, queue: str) -> int:
        """Make expired messages ready with tries + 1, and due messages with the same tries."""
        with self._store.in_use.using(queue):
            directory = self._store.get(queue)
            if directory is None:
                return 0
            with store_errors(f"reap {queue}"):
                count = await reap_expired(self._store, directory)
        if count:
            self._store.wake()
        return count

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the directories that can be queues."""
        return admin.list_queues(self._store)

    async def create(self, queue: str) -> None:
        """Create the directory of a queue."""
        self._store.get_or_create(queue)

    async def delete(self, queue: str) -> None:
        """Delete the directory of a queue."""
        with self._store.in_use.using(queue):
            await admin.delete(self._store, queue)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue by listing it."""
        with self._store.in_use.using(queue):
            return await admin.count_messages(self._store, queue, self.history.retention)

    async def pause(self, queue: str) -> None:
        """Pause a queue for qworker's workers. The protocol has no pause that other programs would obey."""
        with self._store.in_use.using(queue):
            await admin.pause(self._store, queue)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with self._store.in_use.using(queue):
            await admin.resume(self._store, queue)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page by page."""
        with self._store.in_use.using(queue):
            async for page in browse.browse(self._store, queue, query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the messages by their ids."""
        self._store.require(queue)
        return make_shares(count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        with self._store.in_use.using(queue):
            return await browse.find(self._store, queue, ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again."""
        with self._store.in_use.using(queue):
            return await admin.requeue(self._store, queue, selection)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with self._store.in_use.using(queue):
            return await admin.remove(self._store, queue, selection)

    # -- what the contract does not have (qworker/backend/offers.py) ---------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory."""
        from qworker.kit.directory.body_sizes import examine_bodies
        from qworker.kit.directory.doctor import examine_directory

        checks = await examine_directory(url.directory)
        return checks + await examine_bodies(url.directory, ("*",), VsqsOptions.from_url(url).max_body)
