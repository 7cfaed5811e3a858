"""Group commit: publishes, settlements and failures share their syncs.

A commit has two phases. The data of new files is put on the disk first, then the caller renames them into sight, then the
directories are put on the disk. Renaming before the data is there shows empty messages after a power cut. What is pending when a
sync starts rides on it, whichever caller asked.

A failed sync is final. The kernel drops the pages it could not write and calls the next sync a success, so a file whose sync failed
is never synced again: its publish fails, and a repetition writes another file.

On ext4 with data=ordered, contents whose blocks are allocated and written out before a rename are as durable as the rename: the
journal commit that carries the rename (the sync of the directory) carries every earlier allocation too, and flushes the disk's
cache before its commit record. So one commit does where two `fsync`s need two. The wait must come before the rename: with
dioread_nolock a written extent counts only after its conversion, which the end of the write-out includes.
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

# From this many files on, one `syncfs` is cheaper than a sync of each; on ext4, where `sync_file_range` saves a commit, later.
_MANY, _MANY_ORDERED = 16, 256


class _Request:
    """What one caller waits for."""

    __slots__ = ("directories", "done", "error", "files")

    def __init__(self, files: Sequence[int], directories: Collection[int], done: asyncio.Future[None]) -> None:
        self.files = files
        self.directories = directories
        self.done = done
        self.error: OSError | None = None


class GroupCommit:
    """Syncs descriptors for everybody on one event loop, in one thread, one round after another.

    A round takes all that was asked for before it started, and nothing later. The thread runs nothing but the long waits: every
    system call in it gives the GIL away and has to win it back from a busy loop.

    Args:
        directory: any descriptor of the file system, open as long as this object: `syncfs` reports the errors since its opening.
        system: what the file system promises.
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
        """Put the contents of new files on the disk, so that they may be renamed into sight.

        Raises:
            OSError: one of them was not written; sync it never again.
        """
        await self._sync(files, ())

    async def directories(self, directories: Collection[int]) -> None:
        """Put what was renamed, linked and unlinked in directories on the disk.

        Raises:
            OSError: the outcome is unknown.
        """
        await self._sync((), directories)

    async def both(self, files: Sequence[int], directories: Collection[int]) -> None:
        """Put contents that need not be there before their names, and names, on the disk in one commit.

        Raises:
            OSError: the outcome is unknown; sync none of the files again.
        """
        await self._sync(files, directories)

    async def _sync(self, files: Sequence[int], directories: Collection[int]) -> None:
        request = _Request(files, directories, self._loop.create_future())
        self._pending.append(request)
        if not self._running:
            # Later in this turn of the loop, so that what others ask for in the same turn rides along.
            self._running = True
            self._loop.call_soon(self._start_round)
        cancelled: asyncio.CancelledError | None = None
        while not request.done.done():
            try:
                await asyncio.shield(request.done)
            except asyncio.CancelledError as error:
                # The thread uses the descriptors: they must stay open until it is done with them.
                cancelled = error
        if cancelled is not None:
            raise cancelled
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
                # The loop is closed: nobody waits any more.
                return

    def _end_round(self, requests: list[_Request]) -> None:
        for request in requests:
            if not request.done.done():
                request.done.set_result(None)
        self._start_round()

    def _run(self, requests: list[_Request]) -> None:
        """In the thread: one round."""
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
        """End the thread, after everything that was asked for. Idempotent."""
        while self._running:
            await asyncio.sleep(0.001)
        if self._thread is not None:
            self._rounds.put(None)
            self._thread.join()
            self._thread = None


def _each(requests: list[_Request], step: Callable[[int], None]) -> None:
    for request in requests:
        for fd in request.files:
            # After its first error a file is not touched again, nor are those of the same batch: the batch has failed.
            if request.error is not None:
                break
            request.error = _try(step, fd)


def _try(step: Callable[[int], None], fd: int) -> OSError | None:
    try:
        step(fd)
    except OSError as error:
        return error
    return None
