"""Group commit: publishes, settlements and failures share their syncs.

A commit has two phases. First the data of new files is written to the disk, then the caller renames the files to their
visible names, then the directories are written to the disk. Renaming before the data is on the disk shows empty
messages after a power failure. All requests that are pending when a sync starts are part of it, whichever caller made
them.

A failed sync is final. The kernel drops the pages that it could not write and reports success for the next sync. So a
file whose sync failed is never synced again: its publish fails, and a repetition writes another file.

On ext4 with data=ordered, contents whose blocks are allocated and written out before a rename are as durable as the
rename. The journal commit that carries the rename (the sync of the directory) also carries every earlier allocation,
and flushes the disk's cache before its commit record. So one commit is enough where two `fsync`s need two. The wait
must come before the rename: with dioread_nolock a written extent counts only after its conversion, which the end of the
write-out includes.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Collection, Sequence

from qworker.kit.file_system import FileSystem
from qworker.kit.linux import finish_writing, start_writing, sync_file_system

__all__ = ["GroupCommit"]

# From this many files on, one `syncfs` is cheaper than a sync of each file. On ext4 the number is higher, because
# `sync_file_range` saves a commit there.
_MANY, _MANY_ORDERED = 16, 256


class _Request:
    """The sync that one caller waits for."""

    __slots__ = ("directories", "done", "error", "files")

    def __init__(self, files: Sequence[int], directories: Collection[int], done: asyncio.Future[None]) -> None:
        self.files = files
        self.directories = directories
        self.done = done
        self.error: OSError | None = None


class GroupCommit:
    """Syncs descriptors for all callers on one event loop, in one thread, one round after another.

    A round takes all requests that were made before it started, and none later. The thread runs only the long waits:
    every system call in it releases the GIL and has to win it back from a busy loop.

    Args:
        directory: Any descriptor of the file system, open as long as this object: `syncfs` reports the errors since it
            was opened.
        system: The promises of the file system.
    """

    def __init__(self, directory: int, system: FileSystem) -> None:
        self._directory = directory
        self._ordered = system.is_ordered
        self._many = _MANY_ORDERED if self._ordered else _MANY
        self._pending: list[_Request] = []
        self._rounds: queue.SimpleQueue[list[_Request] | None] = queue.SimpleQueue()
        self._running = False
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()

    async def data(self, files: Sequence[int]) -> None:
        """Write the contents of new files to the disk, so that the files may be renamed to their visible names.

        Raises:
            OSError: One of them was not written. Never sync it again.
        """
        await self._sync(files, ())

    async def directories(self, directories: Collection[int]) -> None:
        """Write the renames, links and unlinks in directories to the disk.

        Raises:
            OSError: The outcome is unknown.
        """
        await self._sync((), directories)

    async def both(self, files: Sequence[int], directories: Collection[int]) -> None:
        """Write names, and contents that need not be on the disk before them, in one commit.

        Raises:
            OSError: The outcome is unknown. Sync none of the files again.
        """
        await self._sync(files, directories)

    async def _sync(self, files: Sequence[int], directories: Collection[int]) -> None:
        request = _Request(files, directories, self._loop.create_future())
        self._pending.append(request)
        if not self._running:
            # Later in this turn of the loop, so that other requests of the same turn are included.
            self._running = True
            self._loop.call_soon(self._start_round)
        try:
            await asyncio.shield(request.done)
        except asyncio.CancelledError:
            # The thread uses the descriptors: they must stay open until it is done with them.
            await _wait_although_cancelled(request.done)
            raise
        if request.error is not None:
            raise request.error

    def _start_round(self) -> None:
        requests, self._pending = self._pending, []
        if not requests:
            self._running = False
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="qworker-commit", daemon=True)
            self._thread.start()
        self._rounds.put(requests)

    def _work(self) -> None:
        while (requests := self._rounds.get()) is not None:
            self._run(requests)
            try:
                self._loop.call_soon_threadsafe(self._end_round, requests)
            except RuntimeError:
                # The loop is closed: no task waits any more.
                return

    def _end_round(self, requests: list[_Request]) -> None:
        for request in requests:
            if not request.done.done():
                request.done.set_result(None)
        self._start_round()

    def _run(self, requests: list[_Request]) -> None:
        """Run one round, in the thread."""
        files = sum(len(request.files) for request in requests)
        if files >= self._many:
            error = _try(sync_file_system, self._directory)
            for request in requests:
                request.error = error
            return
        if self._ordered:
            # The disk writes the contents while the journal commits the directories.
            _each(requests, start_writing)
        done: dict[int, OSError | None] = {}
        for request in requests:
            for fd in request.directories:
                if fd not in done:
                    done[fd] = _try(os.fsync, fd)
                request.error = request.error or done[fd]
        _each(requests, finish_writing if self._ordered else os.fsync)

    async def aclose(self) -> None:
        """Stop the thread after all pending requests. Idempotent."""
        while self._running:
            await asyncio.sleep(0.001)
        if self._thread is not None:
            self._rounds.put(None)
            self._thread.join()
            self._thread = None


async def _wait_although_cancelled(done: asyncio.Future[None]) -> None:
    from anyio import CancelScope

    # A cancelled scope of anyio would cancel this wait again in each turn of the loop.
    with CancelScope(shield=True):
        while not done.done():
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                continue


def _each(requests: list[_Request], step: Callable[[int], None]) -> None:
    for request in requests:
        for fd in request.files:
            # After its first error a file is not touched again, and neither are those of the same batch: the batch has
            # failed.
            if request.error is not None:
                break
            request.error = _try(step, fd)


def _try(step: Callable[[int], None], fd: int) -> OSError | None:
    try:
        step(fd)
    except OSError as error:
        return error
    return None
