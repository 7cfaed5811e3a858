"""What a store must do so that many processes put messages into a queue as one: all of them, once, or none.

    stage, stage, stage ... ────► seal ────► publish ────► done
          │                        the first seal of a step wins; from then on its content is fixed
          └────► discard

Any process may die between any two lines:

* before the seal nothing is visible, and nothing that was staged counts: the job is run again;
* after it the job's messages are those of the seal, whatever a later run would stage, and publishing goes on where it ended: a message
  leaves the staged ones in the very step that makes it visible, so what is staged still is what has to be published still;
* once it is done a mark stays under the job's name, and a later run of that job publishes nothing.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence

import msgspec

from qworker.errors import BackendError, InvalidName
from qworker.message import Draft
from qworker.names import check_queue, printable

__all__ = [
    "HalfPublished",
    "Manifest",
    "Published",
    "StagedPart",
    "Staging",
    "check_job",
    "message_id",
    "missing",
    "order_of",
]

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt of one task staged: this, and no message, goes from the tasks to the one that commits."""

    # Which run of the job, which of its partitions, and which attempt at that: unique in the world.
    run: str
    part: int
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
    parts: tuple[StagedPart, ...]

    @property
    def rows(self) -> int:
        """How many messages."""
        return sum(part.count for part in self.parts)

    @property
    def rejected(self) -> int:
        """How many rows were set aside."""
        return sum(part.rejected for part in self.parts)

    @property
    def runs(self) -> set[str]:
        """The runs that its parts come from: one, or none without parts."""
        return {part.run for part in self.parts}


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a job that is done."""

    job: str
    # The last step that was published.
    step: int
    rows: int
    rejected: int = 0
    # Unix seconds.
    at: float = 0.0


class HalfPublished(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose publishing has begun and not ended: somebody is at it, or died over it."""

    job: str
    manifest: Manifest


def check_job(name: str) -> str:
    """Return `name` if it can be a job's name: it becomes part of file names, keys and message ids.

    Raises:
        InvalidName: it cannot.
    """
    if not _JOB.fullmatch(name):
        raise InvalidName(
            f"{printable(name)!r} is no job name: use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    return name


def message_id(job: str, step: int, part: int, row: int) -> str:
    """The id of a message: the same whenever, wherever and however often its row is staged."""
    return f"{job}:{step}:{part}:{row}"


def order_of(parts: Iterable[StagedPart]) -> tuple[StagedPart, ...]:
    """Parts as a manifest has them: in the order of the partitions, without the ones that hold nothing at all."""
    return tuple(sorted((part for part in parts if part.count or part.rejected), key=lambda part: part.part))


def missing(job: str, part: StagedPart) -> BackendError:
    """The error of a seal that finds less than it is told."""
    return BackendError(
        f"partition {part.part} of the job {job} is not staged any more: nothing is published, run it again"
    )


class Staging(abc.ABC):
    """The messages of one job, on their way into one queue.

    A job is published in steps that rise: a batch job has one, 0; a stream has one per micro-batch. Instances in any number of processes
    on any number of hosts work on the same job; each belongs to the event loop of its backend.

    Args:
        queue: where the messages go.
        job: the job's name; within a queue it stands for one input.

    Raises:
        InvalidName: one of them is not allowed.
    """

    def __init__(self, queue: str, job: str) -> None:
        self.queue = check_queue(queue)
        self.job = check_job(job)

    @abc.abstractmethod
    async def done(self, step: int) -> Published | None:
        """The mark, if this step or a later one was published."""

    @abc.abstractmethod
    async def sealed(self, step: int) -> Manifest | None:
        """The seal of a step that is being published, by a process that works on it or died over it."""

    @abc.abstractmethod
    async def stage(self, run: str, part: int, attempt: str, batches: Iterable[Sequence[Draft]]) -> StagedPart:
        """Store messages where nobody leases them, durably when this returns. Their ids are given at publication.

        Attempts of one partition may run at the same time. `Draft.id` and `Draft.enqueued_at` are not kept, `Draft.delay` counts
        from now.

        Raises:
            StorageFull: and nothing of this attempt is left.
            NotSupported: a draft asks for what the store has no place for.
            BackendError: it is not staged.
        """

    @abc.abstractmethod
    async def seal(self, step: int, parts: Sequence[StagedPart]) -> Manifest | None:
        """Say which attempts are the step, once and for all. The queue is made before: what is half published is looked for in queues.

        Returns:
            The seal: this one, or an earlier one by another run, in which case these parts do not count and can be discarded. None: the
            step is done already.

        Raises:
            BackendError: some of the parts are not there (any more); nothing is sealed.
        """

    @abc.abstractmethod
    async def publish(self, manifest: Manifest) -> Published:
        """Make the messages of a seal visible, those that are not yet; durable when it returns. Then mark the job as done.

        May be repeated, also by several processes at once. Workers may take the first messages while the last are on their way.

        Raises:
            StorageFull, BackendUnavailable: call it again later, in any process.
        """

    @abc.abstractmethod
    async def discard(self, run: str) -> None:
        """Remove what a run staged, unless it is sealed. What nobody discards is removed after 36 hours."""

    @abc.abstractmethod
    async def forget(self) -> None:
        """Remove the mark: the job's name stands for nothing any more, and a later job may have it."""

    async def commit(self, step: int, parts: Sequence[StagedPart]) -> Published:
        """Seal and publish, and discard the parts if others count; the whole way from staged parts to a job that is done."""
        manifest = await self.seal(step, parts)
        for run in {part.run for part in parts} - (set() if manifest is None else manifest.runs):
            await self.discard(run)
        if manifest is not None:
            return await self.publish(manifest)
        done = await self.done(step)
        assert done is not None
        return done
