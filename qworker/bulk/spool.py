"""The bulk writer for stores that cannot stage messages: rows wait in files, and the committing process publishes them.

The files are in a folder that all processes share. Nothing is visible before the commit, an attempt that does not count
leaves nothing, and a load that is done is never published again. If a commit dies, the next one continues after the
last batch that is known to be stored. One batch may be uncertain: it is published again with the same ids. A store that
keeps given ids does not store it twice while the messages exist. Other stores can then hold up to one batch twice. The
bodies pass through the committing process, one batch at a time.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from qworker.backend import Backend
from qworker.bulk.cleanup import clean_up_staged
from qworker.bulk.contract import (
    BulkWriter,
    IncompleteLoad,
    LoadDone,
    Manifest,
    StagedPartition,
    message_id,
    missing,
    sort_partitions,
)
from qworker.bulk.load_files import LoadFiles, incomplete_loads
from qworker.errors import BackendError, UsageError
from qworker.kit.files import read_file, write_new
from qworker.kit.max_body import check_batches
from qworker.kit.opening import create_file, open_directory, open_entry, open_file
from qworker.kit.store_errors import store_errors
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Draft

__all__ = ["SpooledBulkWriter", "incomplete_spooled"]

# Messages in one batch. At most this many can be stored twice, by a store that does not keep given ids.
BATCH = 100
_LENGTH = struct.Struct(">I")
_STRAY = 36 * 3600.0
_MODE = 0o700


class _SpooledDraft(Draft, frozen=True, kw_only=True, gc=False):
    """A draft with the names that its fields have in spooled files."""

    unique_key: str | None = msgspec.field(default=None, name="key")
    argv: tuple[str, ...] = msgspec.field(default=(), name="arguments")
    original_id: str | None = msgspec.field(default=None, name="origin")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_SpooledDraft).decode


class _Progress(msgspec.Struct, frozen=True):
    """The part of a seal that is known to be published.

    Attributes:
        partition: The index of the partition in the manifest.
        row: The number of its rows that are stored.
    """

    partition: int = msgspec.field(default=0, name="part")
    row: int = 0


class SpooledBulkWriter(BulkWriter):
    """A bulk writer that spools to files.

    Args:
        backend: The store.
        queue: The queue of the messages.
        load: The load's name.
        folder: A folder on a file system that all processes of the load see. It is created if it does not exist. None:
            next to the store's directory.

    Raises:
        UsageError: There is no folder, and the store has no directory.
    """

    def __init__(self, backend: Backend, queue: str, load: str, folder: Path | None) -> None:
        super().__init__(queue, load)
        self._backend = backend
        self._folder = _place(backend, self.queue, folder)
        self._takes_ids = "given_ids" not in backend.deviations

    async def done(self, step: int) -> LoadDone | None:
        """Read the mark."""
        with self._files() as files:
            return files.done(step)

    async def sealed(self, step: int) -> Manifest | None:
        """Read the seal."""
        with self._files() as files:
            return files.sealed(step)

    async def stage(
        self, run: str, partition: int, attempt: str, batches: Iterable[Sequence[Draft]]
    ) -> StagedPartition:
        """Write a file of drafts."""
        with self._files() as files:
            folder = files.make_run(run)
            name = f"{partition}.{attempt}"
            try:
                fd = create_file(name, folder)
                try:
                    with os.fdopen(fd, "wb") as file:
                        count, size = _write(file, check_batches(batches, self._backend.max_body))
                        file.flush()
                        os.fsync(file.fileno())
                except BaseException:
                    os.unlink(name, dir_fd=folder)
                    raise
                os.fsync(folder)
            finally:
                os.close(folder)
        return StagedPartition(run=run, partition=partition, attempt=attempt, count=count, size=size)

    async def seal(self, step: int, partitions: Sequence[StagedPartition]) -> Manifest | None:
        """Link the seal to its name."""
        manifest = Manifest(step=step, sealed_at=time.time(), partitions=sort_partitions(partitions))
        # This comes first, because incomplete loads are searched for in queues.
        await self._backend.create(self.queue)
        with self._files() as files:
            if files.sealed(step) is None and files.done(step) is None:
                for partition in manifest.partitions:
                    with _staged(files, partition) as file:
                        if file is None and partition.count:
                            raise missing(self.name, partition)
            return files.seal(manifest)

    async def publish(self, manifest: Manifest) -> LoadDone:
        """Publish the rest of the seal, one batch at a time."""
        with self._files() as files:
            async with self._alone():
                return await self._publish(files, manifest)

    async def _publish(self, files: LoadFiles, manifest: Manifest) -> LoadDone:
        done = files.done(manifest.step)
        if done is not None:
            return done
        progress = self._progress(manifest.step)
        for number in range(progress.partition, len(manifest.partitions)):
            first = progress.row if number == progress.partition else 0
            partition = manifest.partitions[number]
            with _staged(files, partition) as file:
                if file is not None:
                    await self._publish_partition(manifest, number, first, file)
                elif partition.count:
                    raise BackendError(
                        f"{self._folder}: partition {partition.partition} of the load {self.name} has been removed"
                    )
        published = LoadDone(
            name=self.name, step=manifest.step, rows=manifest.rows, rejected=manifest.rejected, at=time.time()
        )
        files.mark(published)
        self._progress_file(manifest.step).unlink(missing_ok=True)
        files.clean(manifest)
        return published

    async def _publish_partition(self, manifest: Manifest, number: int, first: int, file: BinaryIO) -> None:
        partition = manifest.partitions[number]
        for start, drafts in _read(file, first):
            ids = [
                message_id(self.name, manifest.step, partition.partition, row) if self._takes_ids else None
                for row in range(start, start + len(drafts))
            ]
            given = [msgspec.structs.replace(draft, id=name) for draft, name in zip(drafts, ids, strict=True)]
            await self._backend.publish(self.queue, given)
            self._keep(manifest.step, _Progress(number, start + len(drafts)))

    async def discard(self, run: str) -> None:
        """Remove the run's folder, and runs that are older than 36 hours."""
        with self._files() as files:
            await run_in_thread(BlockingCall.STAGE, files.discard, run)
        parent = open_directory(self._folder)
        try:
            await run_in_thread(BlockingCall.STAGE, clean_up_staged, parent, time.time() - _STRAY)
        finally:
            os.close(parent)

    async def forget(self) -> None:
        """Remove the mark."""
        with self._files() as files:
            files.forget()
        (self._folder / f"lock-{self.name}").unlink(missing_ok=True)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _progress_file(self, step: int) -> Path:
        return self._folder / f"progress-{self.name}-{step}"

    def _progress(self, step: int) -> _Progress:
        folder = open_directory(self._folder)
        try:
            stored = read_file(self._progress_file(step).name, folder)
        finally:
            os.close(folder)
        return _Progress() if stored is None else msgspec.json.decode(stored, type=_Progress)

    def _keep(self, step: int, progress: _Progress) -> None:
        folder = open_directory(self._folder)
        try:
            write_new(self._progress_file(step).name, folder, msgspec.json.encode(progress))
        finally:
            os.close(folder)

    # -- the folder --------------------------------------------------------------------------------------------------

    @contextmanager
    def _files(self) -> Generator[LoadFiles]:
        with store_errors(f"use the folder of staged messages {self._folder}"):
            self._folder.mkdir(_MODE, parents=True, exist_ok=True)
            fd = open_directory(self._folder)
            try:
                yield LoadFiles(fd, fd, self.name, mode=_MODE, durable=True)
            finally:
                os.close(fd)

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """Allow only one process to publish at a time: two would both publish a batch that neither has recorded yet."""
        fd = open_entry(self._folder / f"lock-{self.name}", os.O_RDWR | os.O_CREAT)
        try:
            await run_in_thread(BlockingCall.LOCK, fcntl.flock, fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


async def incomplete_spooled(backend: Backend, queue: str, folder: Path | None) -> list[IncompleteLoad]:
    """Return the loads in a folder that are sealed and not completely published, the oldest first."""
    try:
        place = _place(backend, queue, folder)
    except UsageError:
        # Nothing can be staged without a folder.
        return []
    with store_errors(f"read the folder of staged messages {place}"):
        try:
            fd = open_directory(place)
        except FileNotFoundError:
            return []
        try:
            return incomplete_loads(fd, fd)
        finally:
            os.close(fd)


def _place(backend: Backend, queue: str, folder: Path | None) -> Path:
    return (folder or _beside(backend)) / queue


def _beside(backend: Backend) -> Path:
    """Return `<directory>.staged`. It is not in the directory, where other programs would find it."""
    directory = backend.directory
    if directory is None:
        scheme = backend.describe().partition(":")[0]
        raise UsageError(
            f"{scheme}: cannot keep staged messages itself: name a folder that all processes see "
            "(the option `staging_dir`)"
        )
    return directory.with_name(f"{directory.name}.staged")


@contextmanager
def _staged(files: LoadFiles, partition: StagedPartition) -> Generator[BinaryIO | None]:
    """Open the file of an attempt; None if it does not exist."""
    folder = files.open_run(partition.run)
    if folder is None:
        yield None
        return
    try:
        fd, _ = open_file(f"{partition.partition}.{partition.attempt}", folder)
    except FileNotFoundError:
        yield None
        return
    finally:
        os.close(folder)
    with os.fdopen(fd, "rb") as file:
        yield file


def _write(file: BinaryIO, batches: Iterable[Sequence[Draft]]) -> tuple[int, int]:
    """Write drafts. Return their number, and the bytes of their bodies."""
    count = size = 0
    for drafts in batches:
        for draft in drafts:
            fields = msgspec.structs.asdict(draft)
            if draft.delay > 0 and draft.due_at is None:
                fields |= {"delay": 0.0, "due_at": time.time() + draft.delay}
            record = _encode(_SpooledDraft(**fields))
            file.write(_LENGTH.pack(len(record)) + record)
            size += len(draft.body)
        count += len(drafts)
    return count, size


def _read(file: BinaryIO, first: int) -> Iterator[tuple[int, list[Draft]]]:
    """Yield batches of drafts, starting at a row: the number of the first row of each, and the batch."""
    drafts: list[Draft] = []
    row = 0
    while head := file.read(_LENGTH.size):
        record = file.read(_LENGTH.unpack(head)[0])
        if row >= first:
            drafts.append(_decode(record))
        row += 1
        if len(drafts) == BATCH:
            yield row - len(drafts), drafts
            drafts = []
    if drafts:
        yield row - len(drafts), drafts
