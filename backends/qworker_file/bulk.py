"""Bulk writes: each row is written as the file that it will be, in a directory under tmp/, and the commit renames it.

The rename publishes a message, so the files under tmp/ are those that are not published yet. If a commit dies, the next
one continues there, also if workers have leased and acked the first messages. A partition is done when its directory
can be removed, because a listing can miss files and `rmdir` cannot.

    tmp/staged/<load>/run-<run>/<partition>.<attempt>/<first row>/<row>.<due, ms>_<tries>[_<task>]
    -> queue/_<timestamp>_<entropy>_0_~<load>:<step>:<partition>:<row>_<tries>[_<task>]
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence

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
from qworker.errors import PublishUncertain
from qworker.kit.directory.opener import StoreOpener
from qworker.kit.files import list_names, remove_empty, remove_tree
from qworker.kit.max_body import check_batches
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import store_errors
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Draft
from qworker_file.bulk_write import BackgroundSync, write_partition
from qworker_file.names import MAX_OWN, byte_length, delay_name, stem_for
from qworker_file.open_queue import OpenQueue
from qworker_file.store import Store

__all__ = ["FileBulkStore", "FileBulkWriter"]

# Files renamed between two wake-ups of workers.
_WAKE = 5_000


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
                        count, size = write_partition(
                            directory, name, checked, mode=files.item_mode, clock=store.clock, flusher=flusher
                        )
                        if flusher is not None:
                            await run_in_thread(BlockingCall.STAGE, flusher.finish)
                    except BaseException:
                        remove_tree(name, directory)
                        raise
                finally:
                    os.close(directory)
        return StagedPartition(run=run, partition=partition, attempt=attempt, count=count, size=size)

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
        """Rename the staged files into queue/ and delay/, sync both once, and write the mark."""
        with store_errors(f"publish the load {self.name}"):
            store, folder = self._stores.open(), self._folder()
            opened = store.get_or_create(self.queue)
            with opened.files:
                names = _Names(self.name, manifest, store)
                for number, partition in enumerate(manifest.partitions):
                    await _publish_partition(
                        folder, partition, _StagedFilePublisher(store, opened, names.make_names(number))
                    )
                try:
                    await store.commit({opened.files.queue, opened.files.delay})
                except OSError as error:
                    raise PublishUncertain(
                        f"the disk could not store the file names of the load {self.name}: run the load again"
                    ) from error
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

    async def forget(self) -> None:
        """Remove the mark from names/."""
        with store_errors(f"forget the load {self.name}"):
            self._folder().forget()

    def _folder(self) -> LoadFiles:
        store = self._stores.open()
        files = store.get_or_create(self.queue).files
        return LoadFiles(files.tmp, files.names, self.name, mode=store.options.dir_mode, durable=store.options.sync)


class _Names:
    """The names that staged files get. All processes that publish this seal give the same names."""

    def __init__(self, load: str, manifest: Manifest, store: Store) -> None:
        self._load = load
        self._manifest = manifest
        self._local = store.options.local_time
        self._now_ms = int(store.clock.time() * 1000)
        # The first nanosecond of each partition. They follow one another, so that the queue has the order of the rows.
        self._starts: list[int] = []
        start = int(manifest.sealed_at * 1e9)
        for partition in manifest.partitions:
            self._starts.append(start)
            start += partition.count

    def make_names(self, number: int) -> Callable[[str], tuple[bool, str]]:
        """Return a function for one partition. It maps a staged name to whether it is due later, and its name."""
        start = self._starts[number]
        first = message_id(self._load, self._manifest.step, self._manifest.partitions[number].partition, 0)
        # The fields of a stem, from the pid up to the row.
        given = stem_for(first, "0_0_0").split("_", 2)[2][:-1]
        stamps: dict[int, str] = {}

        def name(staged: str) -> tuple[bool, str]:
            head, _, rest = staged.partition("_")
            row, _, due = head.partition(".")
            second, ns = divmod(start + int(row), 1_000_000_000)
            stamp = stamps.get(second)
            if stamp is None:
                moment = time.localtime(second) if self._local else time.gmtime(second)
                stamp = stamps[second] = time.strftime("%Y%m%d%H%M%S", moment)
            stem = f"{stamp}_{ns:09d}_{given}{int(row)}"
            item = f"_{stem}_{rest}"
            if byte_length(item) > MAX_OWN:
                # The task's name is only a label: the envelope contains all of it.
                item = f"_{stem}_{rest.partition('_')[0]}"
            due_ms = int(due)
            return (True, delay_name(item, due_ms)) if due_ms > self._now_ms else (False, item)

        return name


class _StagedFilePublisher:
    """A publisher of the files of one attempt.

    Args:
        store: The store.
        queue: The queue.
        name: Returns, for a staged name, whether it is due later, and its name.
    """

    def __init__(self, store: Store, queue: OpenQueue, name: Callable[[str], tuple[bool, str]]) -> None:
        self._store = store
        self._queue = queue
        self._name = name
        self._ready: list[str] = []
        self._delayed: list[str] = []

    async def show(self, partition: int) -> None:
        """Rename all files of the attempt's directory."""
        for chunk in sorted(await list_names(partition)):
            await self._show_chunk(chunk, partition)
            if len(self._ready) >= _WAKE:
                self._notify()
            await asyncio.sleep(0)
        self._notify()

    async def _show_chunk(self, chunk: str, partition: int) -> None:
        try:
            directory = open_directory(chunk, partition)
        except FileNotFoundError:
            # Another process published them.
            return
        try:
            while True:
                self._rename(sorted(await list_names(directory)), directory)
                if remove_empty(chunk, partition):
                    return
        finally:
            os.close(directory)

    def _rename(self, staged: list[str], directory: int) -> None:
        queue, delay, name = self._queue.files.queue, self._queue.files.delay, self._name
        for entry in staged:
            delayed, target = name(entry)
            try:
                os.rename(entry, target, src_dir_fd=directory, dst_dir_fd=delay if delayed else queue)
            except FileNotFoundError:
                # Another process published it, or this process did and the reply was lost.
                continue
            (self._delayed if delayed else self._ready).append(target)

    def _notify(self) -> None:
        if self._ready or self._delayed:
            self._queue.added(self._ready, self._delayed)
            self._store.notify(self._queue)
            self._ready, self._delayed = [], []


async def _publish_partition(folder: LoadFiles, partition: StagedPartition, files: _StagedFilePublisher) -> None:
    """Rename all files of an attempt, if that was not done before."""
    run = folder.open_run(partition.run)
    if run is None:
        return
    try:
        name = f"{partition.partition}.{partition.attempt}"
        directory = _open_partition(run, name)
        if directory is None:
            return
        try:
            while True:
                await files.show(directory)
                if remove_empty(name, run):
                    return
        finally:
            os.close(directory)
    finally:
        os.close(run)


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
