"""`sq:` queues: a queue is a topic, and this backend is one of its channels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.backend.offers import Follower
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.directory import directory_history
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.max_body import check_bodies
from qworker.kit.settle import settle_by_queue
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import Draft, Lease, Query, QueueStats, Selection, Settlement, State, StoredMessage
from qworker.names import check_id, check_queue
from qworker.url import BackendURL
from qworker_sq import admin, browse
from qworker_sq.follow import SqFollower
from qworker_sq.lease import claim, extend_leases
from qworker_sq.options import SqOptions
from qworker_sq.parts import divide
from qworker_sq.reap import reap_channel
from qworker_sq.settle import settle_in_channel
from qworker_sq.store import SqStore
from qworker_sq.wait import wait_for_work

__all__ = ["SqBackend"]


class SqBackend(Backend):
    """Segment logs in a directory: a message is a record, and each channel is a separate queue."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "a log has one order",
        "unique_key": "a log keeps no index of keys",
        "hold": "a log keeps no index of ids that are gone",
        "empty_bodies": "a record of length 0 is the end of the log",
        "fields": "a record consists of its bytes only",
        "keep_done": "a segment is deleted when every channel has read it",
        "deaths": "the journal of a channel counts tries only",
        "argv": "a record consists of its bytes only",
        "max_body_stored": "the size of a segment limits that of a record; a reader of the log reads whole records",
    }

    def __init__(self, url: BackendURL, options: SqOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url = url
        self.max_body = options.max_body
        self.directory = url.directory
        self._store = SqStore(self.directory, options, clock)
        self.history = directory_history(url, self._store.path, default=False, clock=clock)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `sq:///dir`, with the options of `SqOptions`."""
        return cls(url, SqOptions.from_url(url), clock)

    async def open(self) -> None:
        """Open the directory, which is created if it does not exist."""
        self._store.open(create=True)

    async def aclose(self) -> None:
        """Finish the writes in progress, and close. Other processes may lease from now on."""
        await self.history.aclose()
        await self._store.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(self._store.path)

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, and on a file system without a journal or barriers."""
        return durability_at(self._store.path, sync=self._store.options.durable)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Append messages to the topic, for every channel."""
        check_queue(queue)
        refuse_unsupported("sq", self.deviations, drafts)
        check_bodies(drafts, self.max_body)
        for draft in drafts:
            if draft.id is not None:
                check_id(draft.id)
        with self._store.in_use.using(queue):
            return await self._store.publish(queue, drafts) if drafts else []

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages, if this process owns the channel or can own it."""
        await wait_for_ready(self, queue, limit, timeout)
        if self._store.in_use.is_full(queue, self._store.topics):
            # The leases of this instance keep too many queues open.
            return []
        with self._store.in_use.using(queue):
            return await self._claim(queue, limit, visibility)

    async def _claim(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        channel = await self._store.get_channel(queue)
        if channel is None:
            return []
        with store_errors(f"lease from {queue}"):
            async with channel.section():
                leases = claim(channel, limit, visibility)
        self._store.topics[queue].leases.update(leases)
        return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a publish, a release, the death of the owner, or the moment at which a message becomes due."""
        await wait_for_work(self._store, queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        by_queue: dict[str, list[Lease]] = {}
        for lease in leases:
            by_queue.setdefault(lease.message.queue, []).append(lease)
        lost: list[Lease] = []
        for queue, some in by_queue.items():
            channel = self._store.get_open_channel(queue)
            lost += some if channel is None else extend_leases(channel, some, visibility)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases and return the refused settlements."""

        async def settle_in(queue: str, some: Sequence[Settlement]) -> list[Settlement]:
            with self._store.in_use.using(queue):
                channel = await self._store.get_channel(queue)
                return list(some) if channel is None else await settle_in_channel(channel, some)

        return await settle_by_queue(settlements, settle_in)

    async def reap(self, queue: str) -> int:
        """Make expired and due messages ready."""
        with self._store.in_use.using(queue):
            channel = await self._store.get_channel(queue)
            return 0 if channel is None else await reap_channel(channel)

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the topics."""
        return admin.list_queues(self._store)

    async def create(self, queue: str) -> None:
        """Create a topic, and our channel of it."""
        with self._store.in_use.using(queue):
            await self._store.get_or_create(check_queue(queue))

    async def delete(self, queue: str) -> None:
        """Delete a topic with all of its channels."""
        await admin.delete(self._store, queue)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages. The log ahead is read once, in slices. Later counts read only new records."""
        with self._store.in_use.using(queue):
            return await admin.count_messages(self._store, queue, self.history.retention)

    async def pause(self, queue: str) -> None:
        """Pause our channel."""
        with self._store.in_use.using(queue):
            await admin.set_paused(self._store, queue, True)

    async def resume(self, queue: str) -> None:
        """Resume our channel."""
        with self._store.in_use.using(queue):
            await admin.set_paused(self._store, queue, False)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page by page. The channel is not held between two pages."""
        with self._store.in_use.using(queue):
            async for page in browse.browse(self._store, queue, query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the log into ranges. The records that were handed out are one more part."""
        with self._store.in_use.using(queue):
            async with self._store.channel_section(queue) as channel:
                return divide(channel, state, count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        with self._store.in_use.using(queue):
            return await browse.find(self._store, queue, ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again."""
        with self._store.in_use.using(queue):
            return await admin.requeue(self._store, queue, selection)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages for our channel; other channels keep theirs."""
        with self._store.in_use.using(queue):
            return await admin.remove(self._store, queue, selection)

    # -- what the contract does not have (qworker/backend/offers.py) ---------------------------------------------------

    async def delete_channel(self, queue: str) -> None:
        """Delete our channel of a topic, so that it holds no segments any more. Idempotent.

        Raises:
            QueueNotFound: The topic does not exist.
        """
        with self._store.in_use.using(queue):
            await admin.delete_channel(self._store, queue)

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory."""
        from qworker.kit.directory.doctor import examine_directory

        return await examine_directory(url.directory)

    @classmethod
    def follower(cls, url: BackendURL, queue: str) -> Follower:
        """Follow a topic as the URL's channel."""
        return SqFollower(url, queue)
