"""What a store must do so that many processes put messages into a queue as one: all of them, once, or none.

    stage, stage, stage ... ────► seal ────► publish ────► done
          │                        the first seal of a step wins; from then on its content is fixed
          └────► discard

Any process may die between any two lines:

* before the seal nothing is visible, and nothing that was staged counts: the load is run again;
* after it the load's messages are those of the seal, whatever a later run would stage, and publishing goes on where it ended: a message
  leaves the staged ones in the very step that makes it visible, so what is staged still is what has to be published still;
* once it is done a mark stays under the load's name, and a later run of that load publishes nothing.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from qworker.errors import BackendError, InvalidName
from qworker.message import Draft
from qworker.names import check_queue, printable

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

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StagedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt of one task staged: this, and no message, goes from the tasks to the one that commits."""

    # Which run of the load, which of its partitions, and which attempt at that: unique in the world.
    run: str
    partition: int = msgspec.field(name="part")
    attempt: str
    count: int
    # Bytes of all bodies.
    size: int = 0
    # Rows that were set aside instead.
    rejected: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A seal: the attempts that count."""

    step: int
    # Unix seconds: the time that the messages bear, where the store keeps one in their names.
    sealed_at: float
    # In the order of their partitions.
    partitions: tuple[StagedPartition, ...] = msgspec.field(name="parts")

    @property
    def rows(self) -> int:
        """How many messages."""
        return sum(partition.count for partition in self.partitions)

    @property
    def rejected(self) -> int:
        """How many rows were set aside."""
        return sum(partition.rejected for partition in self.partitions)

    @property
    def runs(self) -> set[str]:
        """The runs that its partitions come from: one, or none without partitions."""
        return {partition.run for partition in self.partitions}


class LoadDone(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a load that is done."""

    name: str = msgspec.field(name="job")
    # The last step that was published.
    step: int
    rows: int
    rejected: int = 0
    # Unix seconds.
    at: float = 0.0


class IncompleteLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load whose publishing has begun and not ended: somebody is at it, or died over it."""

    name: str
    manifest: Manifest


def check_load(name: str) -> str:
    """Return `name` if it can be a load's name: it becomes part of file names, keys and message ids.

    Raises:
        InvalidName: it cannot.
    """
    if not _JOB.fullmatch(name):
        raise InvalidName(
            f"{printable(name)!r} is not a valid load name: use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    return name


def message_id(load: str, step: int, partition: int, row: int) -> str:
    """The id of a message: the same whenever, wherever and however often its row is staged."""
    return f"{load}:{step}:{partition}:{row}"


def sort_partitions(partitions: Iterable[StagedPartition]) -> tuple[StagedPartition, ...]:
    """Parts as a manifest has them: in the order of the partitions, without the ones that hold nothing at all."""
    return tuple(sorted((each for each in partitions if each.count or each.rejected), key=lambda each: each.partition))


def missing(load: str, partition: StagedPartition) -> BackendError:
    """The error of a seal that finds less than it is told."""
    return BackendError(
        f"partition {partition.partition} of the load {load} is not staged any more: nothing is published, run it again"
    )


class BulkWriter(abc.ABC):
    """The messages of one load, on their way into one queue.

    A load is published in steps that rise: a batch load has one, 0; a stream has one per micro-batch. Instances in any number of processes
    on any number of hosts work on the same load; each belongs to the event loop of its backend.

    Args:
        queue: where the messages go.
        load: the load's name; within a queue it stands for one input.

    Raises:
        InvalidName: one of them is not allowed.
    """

    def __init__(self, queue: str, load: str) -> None:
        self.queue = check_queue(queue)
        self.name = check_load(load)

    @abc.abstractmethod
    async def done(self, step: int) -> LoadDone | None:
        """The mark, if this step or a later one was published."""

    @abc.abstractmethod
    async def sealed(self, step: int) -> Manifest | None:
        """The seal of a step that is being published, by a process that works on it or died over it."""

    @abc.abstractmethod
    async def stage(
        self, run: str, partition: int, attempt: str, batches: Iterable[Sequence[Draft]]
    ) -> StagedPartition:
        """Store messages where nobody leases them, durably when this returns. Their ids are given at publication.

        Attempts of one partition may run at the same time. `Draft.id` and `Draft.enqueued_at` are not kept, `Draft.delay` counts
        from now.

        Raises:
            StorageFull: and nothing of this attempt is left.
            NotSupported: a draft asks for what the store has no place for.
            BackendError: it is not staged.
        """

    @abc.abstractmethod
    async def seal(self, step: int, partitions: Sequence[StagedPartition]) -> Manifest | None:
        """Say which attempts are the step, once and for all. The queue is made before: incomplete loads are looked for in queues.

        Returns:
            The seal: this one, or an earlier one by another run, in which case these partitions do not count and can be discarded. None: the
            step is done already.

        Raises:
            BackendError: some of the partitions are not there (any more); nothing is sealed.
        """

    @abc.abstractmethod
    async def publish(self, manifest: Manifest) -> LoadDone:
        """Make the messages of a seal visible, those that are not yet; durable when it returns. Then mark the load as done.

        May be repeated, also by several processes at once. Workers may take the first messages while the last are on their way.

        Raises:
            StorageFull, BackendUnavailable: call it again later, in any process.
        """

    @abc.abstractmethod
    async def discard(self, run: str) -> None:
        """Remove what a run staged, unless it is sealed. What nobody discards is removed after 36 hours."""

    @abc.abstractmethod
    async def forget(self) -> None:
        """Remove the mark: the load's name stands for nothing any more, and a later load may have it."""

    async def commit(self, step: int, partitions: Sequence[StagedPartition]) -> LoadDone:
        """Seal and publish, and discard the partitions if others count; the whole way from staged partitions to a load that is done."""
        manifest = await self.seal(step, partitions)
        for run in {partition.run for partition in partitions} - (set() if manifest is None else manifest.runs):
            await self.discard(run)
        if manifest is not None:
            return await self.publish(manifest)
        done = await self.done(step)
        assert done is not None
        return done


class BulkStore(Protocol):
    """A store that keeps staged messages itself, beside its queues."""

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
    """A backend with a bulk store of its own. A backend needs none: without it, `qworker.bulk` spools to files."""

    @property
    def bulk(self) -> BulkStore | None:
        """The bulk store; None if this instance has none."""
        ...
