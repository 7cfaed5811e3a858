"""Moves the staged files of a sealed load into queue/ and delay/, where every program sees them.

The rename publishes a message, so the staged files are those that are not moved yet. If a process dies, the next one
continues there, also if workers have leased and acked the first messages. A partition is done when its directory can be
removed, because a listing can miss files and `rmdir` cannot.
"""

from __future__ import annotations

import asyncio
import os
import time

from qworker.bulk.contract import Manifest
from qworker.kit.files import list_names, remove_empty
from qworker.kit.opening import open_directory
from qworker_file.foreign import move_to_failed
from qworker_file.load_names import ItemNames, NameOf
from qworker_file.loads import finish_load, sealed_loads
from qworker_file.names import delay_name
from qworker_file.open_queue import OpenQueue
from qworker_file.store import Store

__all__ = ["move_loads", "move_run"]

# Files renamed between two wake-ups of workers.
_WAKE = 5_000
# Seconds for which one call of a reaper moves files.
_SHARE = 1.0


async def move_loads(store: Store, queue: OpenQueue) -> None:
    """Move staged files of the sealed loads that are part of a queue, for about a second.

    Raises:
        OSError: The store failed. Files that were moved stay moved.
    """
    files, ends = queue.files, time.monotonic() + _SHARE
    # The window of loads reports a damaged seal. The other loads, and the leases, do not wait for it.
    for load in sealed_loads(files.base, lambda _path, _reason: None):
        try:
            run = open_directory(load.name, files.base)
        except FileNotFoundError:
            continue
        try:
            is_moved = await move_run(store, queue, run, load.load, load.manifest, ends=ends)
            await store.commit({files.queue, files.delay, files.fail})
        finally:
            os.close(run)
        if not is_moved:
            return
        finish_load(load.name, files.base)


async def move_run(
    store: Store, queue: OpenQueue, run: int, load: str, manifest: Manifest, *, ends: float = float("inf")
) -> bool:
    """Move the rest of a sealed run. It can be repeated, also by several processes at once.

    Args:
        store: The store.
        queue: The queue.
        run: The open directory of the run.
        load: The load's name.
        manifest: Its seal.
        ends: Monotonic seconds at which to stop.

    Returns:
        Whether all of it was moved.

    Raises:
        OSError: A file cannot be moved. Those that were moved stay moved.
    """
    names = ItemNames(load, manifest, local_time=store.options.local_time)
    for number, partition in enumerate(manifest.partitions):
        name = f"{partition.partition}.{partition.attempt}"
        try:
            directory = open_directory(name, run)
        except FileNotFoundError:
            continue
        try:
            mover = _Mover(store, queue, names.of_partition(number))
            while True:
                if not await mover.move(directory, ends):
                    return False
                if remove_empty(name, run):
                    break
        finally:
            os.close(directory)
    return True


class _Mover:
    """A mover of the files of one attempt.

    Args:
        store: The store.
        queue: The queue.
        name: Returns the due time in milliseconds and the item of a staged name.
    """

    def __init__(self, store: Store, queue: OpenQueue, name: NameOf) -> None:
        self._store = store
        self._queue = queue
        self._name = name
        self._now_ms = int(store.clock.time() * 1000)
        self._ready: list[str] = []
        self._delayed: list[str] = []

    async def move(self, partition: int, ends: float) -> bool:
        """Rename all files of the attempt's directory. Return False if the time has ended before."""
        for chunk in sorted(await list_names(partition)):
            await self._move_chunk(chunk, partition)
            if len(self._ready) >= _WAKE:
                self._notify()
            await asyncio.sleep(0)
            if time.monotonic() >= ends:
                self._notify()
                return False
        self._notify()
        return True

    async def _move_chunk(self, chunk: str, partition: int) -> None:
        try:
            directory = open_directory(chunk, partition)
        except FileNotFoundError:
            # Another process published them.
            return
        except NotADirectoryError:
            move_to_failed(self._queue.files, partition, chunk, "it is not a directory of a bulk write")
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
            named = name(entry)
            if named is None:
                # The directory could not be removed while it is there.
                move_to_failed(self._queue.files, directory, entry, "no bulk write gave this name")
                continue
            due_ms, target = named
            delayed = due_ms > self._now_ms
            if delayed:
                target = delay_name(target, due_ms)
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
