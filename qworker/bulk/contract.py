"""The contract of a store for many processes that publish as one: all messages of a load, each once, or none.

    stage, stage, stage ... ────► seal ────► publish ────► done
          │                        the first seal of a step wins; from then on its content is fixed
          └────► discard

Any process can die between any two calls:

* Before the seal nothing is visible, and staged messages do not count. Run the load again.
* After the seal the load's messages are those of the seal, whatever a later run stages. Publishing continues where it
  stopped: the step that makes a message visible also removes it from the staged ones, so the messages that are still
  staged are not published yet.
* When the load is done, a mark stays under its name. A later run of the load publishes nothing.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from qworker.errors import BackendError, InvalidName
from qworker.message import Draft
from qworker.names import check_existing_queue, printable

__all__ = [
    "BulkStore",
    "BulkWriter",
    "IncompleteLoad",
    "LoadDone",
    "Manifest",
    "OffersBulk",
    "StagedPartition",
    "check_load",
    "message_id",
    "missing",
    "sort_partitions",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StagedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """The partition that one attempt of one task staged.

    The tasks send this, and no messages, to the committing process.

    Attributes:
        run: The run of the load. Together with `partition` and `attempt` it is unique.
        partition: The number of the partition.
        attempt: The attempt at this partition.
        count: How many messages it staged.
        size: Bytes of all bodies.
        rejected: How many rows it rejected.
        delayed: How many messages have a due time or a priority. Unset: this is not known, as in seals of older
            releases.
    """

    run: str
    partition: int = msgspec.field(name="part")
    attempt: str
    count: int
    size: int = 0
    rejected: int = 0
    delayed: int | msgspec.UnsetType = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A seal: the attempts that count.

    Attributes:
        step: The step of the load.
        sealed_at: Unix seconds. A store that keeps a time in its messages' names uses this one.
        partitions: The attempts, in the order of their partitions.
    """

    step: int
    sealed_at: float
    partitions: tuple[StagedPartition, ...] = msgspec.field(name="parts")

    @property
    def rows(self) -> int:
        """The number of messages."""
        return sum(partition.count for partition in self.partitions)

    @property
    def rejected(self) -> int:
        """The number of rejected rows."""
        return sum(partition.rejected for partition in self.partitions)

    @property
    def runs(self) -> set[str]:
        """The runs that staged the partitions: one, or none if there are no partitions."""
        return {partition.run for partition in self.partitions}


class LoadDone(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a load that is done.

    Attributes:
        name: The load's name.
        step: The last step that was published.
        rows: The number of messages of that step.
        rejected: The number of its rejected rows.
        at: When it was published, in Unix seconds.
    """

    name: str = msgspec.field(name="job")
    step: int
    rows: int
    rejected: int = 0
    at: float = 0.0


class IncompleteLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load that was sealed and is not completely published: a process publishes it now, or died.

    Attributes:
        name: The load's name.
        manifest: Its seal.
    """

    name: str
    manifest: Manifest


def check_load(name: str) -> str:
    """Return `name` if it can be the name of a load. It becomes part of file names, keys and message ids.

    Raises:
        InvalidName: It is not valid.
    """
    if not _NAME.fullmatch(name):
        raise InvalidName(
            f"{printable(name)!r} is not a valid load name: use 1 to 64 of A-Z a-z 0-9 . _ - "
            "and start with a letter or digit"
        )
    return name


def message_id(load: str, step: int, partition: int, row: int) -> str:
    """Return the id of a message. It is the same whenever, wherever and however often its row is staged."""
    return f"{load}:{step}:{partition}:{row}"


def sort_partitions(partitions: Iterable[StagedPartition]) -> tuple[StagedPartition, ...]:
    """Sort partitions in the order of a manifest, without the empty ones."""
    return tuple(sorted((each for each in partitions if each.count or each.rejected), key=lambda each: each.partition))


def missing(load: str, partition: StagedPartition) -> BackendError:
    """Return the error for a seal whose partition is not staged."""
    return BackendError(
        f"partition {partition.partition} of the load {load} is not staged any more, and nothing was published: "
        "run the load again"
    )


class BulkWriter(abc.ABC):
    """The writer of one load into one queue.

    A load is published in rising steps: a batch has one, 0, and a stream has one for each micro-batch. Writers in any
    number of processes on any number of hosts can work on the same load. Each belongs to the event loop of its backend.

    Args:
        queue: The queue of the messages.
        load: The load's name. Within a queue it identifies one input.

    Raises:
        InvalidName: One of the names is not valid.
    """

    def __init__(self, queue: str, load: str) -> None:
        self.queue = check_existing_queue(queue)
        self.name = check_load(load)

    @abc.abstractmethod
    async def done(self, step: int) -> LoadDone | None:
        """Return the mark if this step or a later one was published."""

    @abc.abstractmethod
    async def sealed(self, step: int) -> Manifest | None:
        """Return the seal of a step that is not completely published, by this or another process."""

    @abc.abstractmethod
    async def stage(
        self, run: str, partition: int, attempt: str, batches: Iterable[Sequence[Draft]]
    ) -> StagedPartition:
        """Store messages where no worker leases them.

        They are durable when this returns, and get their ids when they are published.

        Attempts at one partition can run at the same time. `Draft.id` and `Draft.enqueued_at` are not kept.
        `Draft.delay` counts from now.

        Args:
            run: The run of the load, different from all others.
            partition: The number of the partition.
            attempt: The attempt at this partition, different from all others.
            batches: The messages.

        Raises:
            StorageFull: The store is full. Nothing of this attempt is left.
            MessageTooLarge: A body is larger than the backend's `max_body`. Nothing of this attempt is left.
            NotSupported: The store cannot keep a field of a draft.
            BackendError: The messages are not staged.
        """

    @abc.abstractmethod
    async def seal(self, step: int, partitions: Sequence[StagedPartition]) -> Manifest | None:
        """Decide which attempts are the step.

        The queue is created first, because incomplete loads are searched for in queues.

        Returns:
            The seal: this one, or an earlier one by another run. In that case these partitions do not count and can be
            discarded. None if the step is done.

        Raises:
            BackendError: Some of the partitions are not staged. Nothing is sealed.
        """

    @abc.abstractmethod
    async def publish(self, manifest: Manifest) -> LoadDone:
        """Make the remaining messages of a seal visible, then mark the load as done. Durable when it returns.

        It can be repeated, also by several processes at once. Workers can take the first messages before the last ones
        are published.

        Raises:
            StorageFull: Call it again later, in any process.
            BackendUnavailable: Call it again later, in any process.
        """

    @abc.abstractmethod
    async def discard(self, run: str) -> None:
        """Remove the messages that a run staged, unless it is sealed.

        If this is not called, they are removed after 36 hours.
        """

    @abc.abstractmethod
    async def forget(self) -> None:
        """Remove the mark, so that the name can be used for another load."""

    async def commit(self, step: int, partitions: Sequence[StagedPartition]) -> LoadDone:
        """Seal the staged partitions and publish them. If another seal counts, discard them and publish that one."""
        manifest = await self.seal(step, partitions)
        for run in {partition.run for partition in partitions} - (set() if manifest is None else manifest.runs):
            await self.discard(run)
        if manifest is not None:
            return await self.publish(manifest)
        done = await self.done(step)
        assert done is not None
        return done


class BulkStore(Protocol):
    """A store that keeps staged messages itself, next to its queues."""

    def writer(self, queue: str, name: str) -> BulkWriter:
        """Make the writer of one load, without touching the store.

        Raises:
            InvalidName: The queue's or the load's name is not valid.
        """
        ...

    async def incomplete_loads(self, queue: str) -> list[IncompleteLoad]:
        """Return the loads that were sealed and are not completely published, the oldest first.

        Raises:
            BackendError: The store failed, or a seal is damaged.
        """
        ...


@runtime_checkable
class OffersBulk(Protocol):
    """A backend with its own bulk store. This is optional: without it, `qworker.bulk` spools to files."""

    @property
    def bulk(self) -> BulkStore | None:
        """The bulk store; None if this instance does not have one."""
        ...
