"""Optional methods of backends, found by their names.

`deviations_at` are the deviations of a URL, if they depend on it. `doctor` adds checks to `qworker doctor`.
`describe_file_system` names the file system of a directory in the first line of `qworker run`. `open_scan` is the
protocol's own source of messages for `qworker scan`. `follower` reads a store that is a log, for Spark's streams.
`count_too_large` counts the messages that a store delays because of their size. `glance` is what `explain` needs of a
queue, for a store in which `stats` takes as long as the queue is deep. `held_until` reads a hold. `make_due` lets a
delayed message run at once. `queues_with_cells`
finds out of many queues those that may have cells. `time` is the time of the store. `heads` lists finished messages
without their bodies, for the archive. `count` and `count_version` are for samplers, in a store in which `stats` takes
as long as the queue is deep, and `samples` is where past samples are stored. Import modules that only such a method
needs inside it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from qworker.backend.contract import Backend
from qworker.backend.registry import backend_class
from qworker.backend.scan_source import ScanOptions, ScanSource
from qworker.clock import Clock
from qworker.kit.doctor_check import Check
from qworker.kit.samples import SampleStore
from qworker.message import FinishedMessage, Message, QueueStats, State, StoredMessage
from qworker.url import BackendURL

__all__ = [
    "COUNTED",
    "Follower",
    "OffersCellSearch",
    "OffersCount",
    "OffersDeviations",
    "OffersDoctor",
    "OffersDue",
    "OffersFileSystem",
    "OffersFollower",
    "OffersGlance",
    "OffersHeads",
    "OffersHolds",
    "OffersKeyHolders",
    "OffersSamples",
    "OffersScan",
    "OffersTime",
    "OffersTooLarge",
    "QueueCount",
    "QueueGlance",
    "count_too_large_in",
    "deviations_at",
    "doctor_of",
    "file_system_of",
    "follower_of",
    "glance_at",
    "has_unique_key",
    "heads_of",
    "held_until",
    "offers_heads",
    "queues_with_cells",
    "samples_of",
    "scan_of",
    "store_time",
]


# Messages that `explain` counts at most.
COUNTED = 1_000


class QueueGlance(msgspec.Struct, frozen=True):
    """What can be said about a queue in the same time, however many messages it has.

    Attributes:
        is_paused: Whether the queue is paused.
        has_leases: Whether a message is leased.
        is_short: Whether its ready messages can be listed quickly: there are at most about `COUNTED`.
        retention: How long finished messages are kept, as text by state.
    """

    is_paused: bool
    has_leases: bool
    is_short: bool
    retention: Mapping[str, str]


class QueueCount(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a queue, with what a count finds on the way.

    Attributes:
        stats: The counts.
        exact: False if the queue changed during the count, so that some messages may be missing or counted twice.
        version: What `count_version` returned when the count began. None: it cannot be compared.
        next_due: Unix seconds at which a delayed message becomes ready. None: none is delayed.
        tasks: The number of ready messages of each task. "" is for messages without a task in their name, and for tasks
            beyond the first 200. Empty if the store does not say it.
        first: The ids of the ready messages that are leased next, at most 50, the next one first.
        last: The ids of the ready messages that are leased last, at most 50, the last one first.
    """

    stats: QueueStats
    exact: bool = True
    version: str | None = None
    next_due: float | None = None
    tasks: dict[str, int] = {}
    first: list[str] = []
    last: list[str] = []

    @property
    def messages(self) -> int:
        """The number of messages in all states."""
        stats = self.stats
        return stats.ready + stats.leased + stats.delayed + stats.failed + stats.done


class Follower(Protocol):
    """A reader of one queue's log, as the channel that the URL names.

    Positions are short text for the follower only. Each process opens its own follower.
    """

    async def open(self) -> None:
        """Open the queue. Create it and the channel if they do not exist."""
        ...

    async def aclose(self) -> None:
        """Close the follower. Idempotent."""
        ...

    async def begin(self, where: str) -> str:
        """Return the position to start at.

        Args:
            where: `channel`: the first message that the channel has not finished. `earliest`: the first stored message.
                `latest`: the end.
        """
        ...

    async def end(self) -> str:
        """Return the position after the last stored message."""
        ...

    async def kept(self, start: str) -> str:
        """Return a position, or the first one that is kept if messages after it are gone."""
        ...

    async def ahead(self, start: str, limit: int, end: str) -> str:
        """Return the position after the next `limit` messages, or `end` if there are fewer before it."""
        ...

    async def divide(self, start: str, end: str, wanted: int) -> list[str]:
        """Return about `wanted` parts that together have every message between two positions once."""
        ...

    def read(self, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a part in order, in pages. Until `commit`, every call yields the same messages."""
        ...

    async def commit(self, end: str) -> None:
        """Mark all messages before a position as finished for the channel."""
        ...


@runtime_checkable
class OffersDoctor(Protocol):
    """A backend class with its own checks."""

    async def doctor(self, url: BackendURL) -> list[Check]:
        """Check that queues can work at a URL."""
        ...


@runtime_checkable
class OffersDeviations(Protocol):
    """A backend class whose deviations depend on the URL."""

    def deviations_at(self, url: BackendURL) -> Mapping[str, str]:
        """Return the deviations of a URL, by rule."""
        ...


@runtime_checkable
class OffersFileSystem(Protocol):
    """A backend that keeps its queues in a directory, and works in another way if other hosts use it too."""

    def describe_file_system(self) -> str:
        """Return the type and source of the file system, and its class: local or shared."""
        ...


@runtime_checkable
class OffersGlance(Protocol):
    """A backend in which `stats` and the first page of `browse` take as long as the queue is deep."""

    async def glance(self, queue: str) -> QueueGlance:
        """Glance at a queue.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class OffersCount(Protocol):
    """A backend in which a count takes as long as the queue is deep."""

    async def count(self, queue: str, most: int | None = None) -> QueueCount | None:
        """Count a queue. None: it has more than `most` messages.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...

    async def count_version(self, queue: str) -> str | None:
        """Return a text that changes if the queue does, without a count. None: it would not show every change.

        Two changes within 2 s may give the same text.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class OffersSamples(Protocol):
    """A backend that stores the samples of its queues."""

    def samples(self) -> SampleStore:
        """Return where they are stored."""
        ...


@runtime_checkable
class OffersHolds(Protocol):
    """A backend with holds."""

    async def held_until(self, queue: str, message_id: str) -> float | None:
        """Return the Unix seconds until which a hold keeps an id taken. None: there is no hold, or it has ended.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class OffersDue(Protocol):
    """A backend in which a delayed message can be made due before its time."""

    async def make_due(self, queue: str, message_id: str) -> bool:
        """Make a delayed message due now, in one atomic step. Nothing else of it changes.

        Returns:
            Whether it was delayed. A message in another state is not changed.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class OffersKeyHolders(Protocol):
    """A backend that can say which message has a unique key."""

    async def key_holder(self, queue: str, key: str) -> str | None:
        """Return the id of the message that has a key of the queue. None: the key is free.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class OffersCellSearch(Protocol):
    """A backend in which one look at many queues costs less than a list of the cells of each."""

    async def queues_with_cells(self, queues: Sequence[str], group: str) -> list[str]:
        """Return those of some queues that may have cells of a group, in the same order.

        A queue that cannot be looked at may have some: its next use reports why.
        """
        ...


@runtime_checkable
class OffersTime(Protocol):
    """A backend whose store has a clock of its own."""

    async def time(self, queue: str) -> float:
        """Return the Unix seconds of the store that has a queue."""
        ...


@runtime_checkable
class OffersScan(Protocol):
    """A backend class with its own source of messages for `qworker scan`."""

    def open_scan(self, url: BackendURL, queue: str, options: ScanOptions) -> ScanSource:
        """Open the scan source of a queue.

        Raises:
            ScanError: The queue does not exist.
        """
        ...


@runtime_checkable
class OffersFollower(Protocol):
    """A backend class whose queues are logs."""

    def follower(self, url: BackendURL, queue: str) -> Follower:
        """Create a follower of one queue's log, without touching the store."""
        ...


@runtime_checkable
class OffersTooLarge(Protocol):
    """A backend that delays messages which are larger than `max_body`. `QueueStats.blocked` does not count them."""

    async def count_too_large(self, queue: str) -> int:
        """Return how many messages are delayed because they are larger than `max_body`."""
        ...


async def count_too_large_in(backend: object, queue: str) -> int:
    """Return how many messages of a queue a backend delays because they are larger than `max_body`."""
    return await backend.count_too_large(queue) if isinstance(backend, OffersTooLarge) else 0


@runtime_checkable
class OffersHeads(Protocol):
    """A backend that lists finished messages faster than it reads them."""

    def heads(self, queue: str, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Yield the finished messages of a part, each with its id, queue, state, time and location only.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...

    async def heads_version(self, queue: str, state: State) -> str | None:
        """Return a text that changes with the list of finished messages. None: it may have changed just now.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...

    def read_finished(self, queue: str, found: Sequence[FinishedMessage]) -> AsyncIterator[list[StoredMessage]]:
        """Yield those messages that are unchanged.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


def deviations_at(url: BackendURL) -> Mapping[str, str]:
    """Return the deviations of the backend of a URL, by rule.

    Raises:
        InvalidURL: No installed backend serves the scheme.
        MissingExtra: Its driver is not installed.
    """
    found = backend_class(url.scheme)
    offered: object = found
    return offered.deviations_at(url) if isinstance(offered, OffersDeviations) else found.deviations


def doctor_of(scheme: str) -> OffersDoctor | None:
    """Return the backend class of a scheme if it has its own checks.

    Raises:
        InvalidURL: No installed backend serves the scheme.
        MissingExtra: Its driver is not installed.
    """
    found: object = backend_class(scheme)
    return found if isinstance(found, OffersDoctor) else None


def file_system_of(backend: object) -> str | None:
    """Return the file system of a backend's directory and its class, or None if it does not matter."""
    return backend.describe_file_system() if isinstance(backend, OffersFileSystem) else None


async def glance_at(backend: Backend, queue: str) -> QueueGlance:
    """Glance at a queue. A backend that does not offer it counts the queue.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    found: object = backend
    if isinstance(found, OffersGlance):
        return await found.glance(queue)
    stats = await backend.stats(queue)
    return QueueGlance(stats.paused, stats.leased > 0, True, stats.retention)


async def held_until(backend: object, queue: str, message_id: str) -> float | None:
    """Return the Unix seconds until which a hold keeps an id taken. None: there is no hold.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    return await backend.held_until(queue, message_id) if isinstance(backend, OffersHolds) else None


async def has_unique_key(backend: object, message: Message) -> bool:
    """Return whether a message has its unique key still: one that runs can have lost it to a newer one.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    if message.unique_key is None:
        return False
    if not isinstance(backend, OffersKeyHolders) or (message.unique is not None and message.unique.scope == "app"):
        return True
    return await backend.key_holder(message.queue, message.unique_key) == message.id


async def queues_with_cells(backend: object, queues: Sequence[str], group: str) -> list[str]:
    """Return those of some queues that may have cells of a group, in the same order.

    Raises:
        BackendError: The store failed.
    """
    if isinstance(backend, OffersCellSearch):
        return await backend.queues_with_cells(queues, group)
    return list(queues)


async def store_time(backend: object, queue: str, clock: Clock) -> float:
    """Return the Unix seconds of the store that has a queue: those of the clock if it has none of its own.

    Raises:
        BackendError: The store failed.
    """
    return await backend.time(queue) if isinstance(backend, OffersTime) else clock.time()


def samples_of(backend: object) -> SampleStore | None:
    """Return where a backend stores samples, or None if it does not."""
    return backend.samples() if isinstance(backend, OffersSamples) else None


def heads_of(backend: object) -> OffersHeads | None:
    """Return a backend if it lists finished messages faster than it reads them."""
    return backend if isinstance(backend, OffersHeads) else None


def offers_heads(scheme: str) -> bool:
    """Return whether the backends of a scheme do. Raises the errors of `doctor_of`."""
    return isinstance(backend_class(scheme), OffersHeads)


def scan_of(scheme: str) -> OffersScan | None:
    """Return the backend class of a scheme if it has its own scan source. Raises the errors of `doctor_of`."""
    found: object = backend_class(scheme)
    return found if isinstance(found, OffersScan) else None


def follower_of(scheme: str) -> OffersFollower | None:
    """Return the backend class of a scheme if its queues are logs. Raises the errors of `doctor_of`."""
    found: object = backend_class(scheme)
    return found if isinstance(found, OffersFollower) else None
