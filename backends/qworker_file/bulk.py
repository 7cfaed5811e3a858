"""Bulk writes: each row is written as the file that it will be, in a directory under tmp/, and the commit renames it.

    tmp/staged/<load>/run-<run>/<partition>.<attempt>/<first row>/<row>.<due, ms>_<tries>[_<task>]
    -> load-<load>:<step>:<run>/..., from which workers lease (qworker_file.loads)

The commit renames the directory of the run. If it dies before that, the seal says what is left to do. If rows have a
due time or a priority, or other programs must see all of them, the commit renames each file to queue/ or delay/
(qworker_file.load_mover).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from qworker.bulk.contract import (
    BulkWriter,
    IncompleteLoad,
    LoadDone,
    Manifest,
    StagedPartition,
    missing,
    sort_partitions,
)
from qworker.bulk.load_files import LoadFiles, incomplete_loads
from qworker.errors import PublishUncertain
from qworker.kit.directory.opener import StoreOpener
from qworker.kit.files import remove_tree
from qworker.kit.max_body import check_batches
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import store_errors
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Draft
from qworker_file.bulk_write import BackgroundSync, write_partition
from qworker_file.load_mover import move_run
from qworker_file.loads import load_directory
from qworker_file.open_queue import OpenQueue
from qworker_file.store import Store

__all__ = ["FileBulkStore", "FileBulkWriter"]


class FileBulkStore:
    """The bulk writes of a store in a directory, as a `qworker.bulk.contract.BulkStore`.

    Args:
        stores: Opens the root.
    """

    def __init__(self, stores: StoreOpener[Store, OpenQueue]) -> None:
        self._stores = stores

    def writer(self, queue: str, name: str) -> FileBulkWriter:
        """Make a writer that stages under the queue's own tmp/."""
        return FileBulkWriter(self._stores, queue, name)

    async def incomplete_loads(self, queue: str) -> list[IncompleteLoad]:
        """Find seals under tmp/."""
        with store_errors(f"list the loads of {queue!r}"):
            opened = self._stores.get_queue(queue)
            return [] if opened is None else incomplete_loads(opened.files.tmp, opened.files.names)


class FileBulkWriter(BulkWriter):
    """The writer of one load.

    Args:
        stores: Opens the root.
        queue: The queue of the messages. It is created if it does not exist.
        load: The load's name.
    """

    def __init__(self, stores: StoreOpener[Store, OpenQueue], queue: str, load: str) -> None:
        super().__init__(queue, load)
        self._stores = stores

    async def done(self, step: int) -> LoadDone | None:
        """Read the mark in names/."""
        with store_errors(f"find the load {self.name}"):
            return None if self._stores.open().get(self.queue) is None else self._folder().done(step)

    async def sealed(self, step: int) -> Manifest | None:
        """Read the seal under tmp/."""
        with store_errors(f"find the load {self.name}"):
            return None if self._stores.open().get(self.queue) is None else self._folder().sealed(step)

    # -- staging -----------------------------------------------------------------------------------------------------

    async def stage(
        self, run: str, partition: int, attempt: str, batches: Iterable[Sequence[Draft]]
    ) -> StagedPartition:
        """Write one file for each message, and call `syncfs` once."""
        with store_errors(f"stage messages for {self.queue!r}"):
            store = self._stores.open()
            files = store.get_or_create(self.queue).files
            with files:
                directory = self._folder().make_run(run)
                checked = check_batches(batches, store.options.max_body)
                try:
                    name = f"{partition}.{attempt}"
                    flusher = BackgroundSync(store.root) if store.options.sync else None
                    try:
                        count, size, delayed = write_partition(
                            directory, name, checked, mode=files.item_mode, clock=store.clock, flusher=flusher
                        )
                        if flusher is not None:
                            await run_in_thread(BlockingCall.STAGE, flusher.finish)
                    except BaseException:
                        remove_tree(name, directory)
                        raise
                finally:
                    os.close(directory)
        return StagedPartition(run=run, partition=partition, attempt=attempt, count=count, size=size, delayed=delayed)

    async def discard(self, run: str) -> None:
        """Remove the run's directory."""
        with store_errors(f"discard a run of the load {self.name}"):
            self._folder().discard(run)

    # -- committing --------------------------------------------------------------------------------------------------

    async def seal(self, step: int, partitions: Sequence[StagedPartition]) -> Manifest | None:
        """Link the seal to its name under tmp/."""
        manifest = Manifest(
            step=step, sealed_at=self._stores.open().clock.time(), partitions=sort_partitions(partitions)
        )
        with store_errors(f"seal the load {self.name}"):
            folder = self._folder()
            if folder.sealed(step) is None and folder.done(step) is None:
                for partition in manifest.partitions:
                    if partition.count and not _is_there(folder, partition):
                        raise missing(self.name, partition)
            return folder.seal(manifest)

    async def publish(self, manifest: Manifest) -> LoadDone:
        """Make the staged files part of the queue, and write the mark."""
        with store_errors(f"publish the load {self.name}"):
            store, folder = self._stores.open(), self._folder()
            opened = store.get_or_create(self.queue)
            with opened.files:
                # Delayed messages are in delay/, and queue/ has the order of priorities. Other programs, and older
                # releases, see only these two.
                if store.options.fsq or any(partition.delayed != 0 for partition in manifest.partitions):
                    await self._move(store, opened, folder, manifest)
                else:
                    for run in manifest.runs:
                        folder.hand_over(manifest, run, opened.files.base, load_directory(self.name, manifest, run))
                    opened.loads.find()
                    store.notify(opened)
                published = LoadDone(
                    name=self.name,
                    step=manifest.step,
                    rows=manifest.rows,
                    rejected=manifest.rejected,
                    at=store.clock.time(),
                )
                # The mark is written only now: after it, no process searches for the rest of this step.
                folder.mark(published)
                folder.clean(manifest)
        return published

    async def _move(self, store: Store, opened: OpenQueue, folder: LoadFiles, manifest: Manifest) -> None:
        """Rename the staged files into queue/ and delay/, and sync both once."""
        for name in manifest.runs:
            run = folder.open_run(name)
            if run is None:
                continue
            try:
                await move_run(store, opened, run, self.name, manifest)
            finally:
                os.close(run)
        try:
            await store.commit({opened.files.queue, opened.files.delay, opened.files.fail})
        except OSError as error:
            raise PublishUncertain(
                f"the disk could not store the file names of the load {self.name}: run the load again"
            ) from error

    async def forget(self) -> None:
        """Remove the mark from names/."""
        with store_errors(f"forget the load {self.name}"):
            self._folder().forget()

    def _folder(self) -> LoadFiles:
        store = self._stores.open()
        files = store.get_or_create(self.queue).files
        return LoadFiles(files.tmp, files.names, self.name, mode=store.options.dir_mode, durable=store.options.sync)


def _is_there(folder: LoadFiles, partition: StagedPartition) -> bool:
    run = folder.open_run(partition.run)
    if run is None:
        return False
    try:
        directory = _open_partition(run, f"{partition.partition}.{partition.attempt}")
        if directory is None:
            return False
        os.close(directory)
        return True
    finally:
        os.close(run)


def _open_partition(run: int, name: str) -> int | None:
    try:
        return open_directory(name, run)
    except FileNotFoundError:
        return None
