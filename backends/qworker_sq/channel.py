"""One channel of a topic as a queue: its journal, its lock, its owner, and the position that other programs see.

Every change is made in a section: the channel's lock is held for some microseconds, the rows that other processes have
appended are applied, then the new rows are appended and applied. Syncs happen outside, in rounds. The position in the
state file moves only after its rows are synced, because the log may be deleted up to it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from qworker.errors import BackendUnavailable
from qworker.kit.files import make_directory, try_unlink
from qworker.kit.opening import open_directory, open_regular
from qworker.kit.own_files import write_own
from qworker.kit.segments.format import split
from qworker.kit.store_errors import store_errors
from qworker_sq import holder
from qworker_sq.ahead_counter import AheadCounter
from qworker_sq.frames import FrameFile
from qworker_sq.group_commit import ChannelCommit
from qworker_sq.ledger import Ledger, RowKind
from qworker_sq.names import position_id
from qworker_sq.topic import Topic, sync_directories

__all__ = ["Channel"]

_log = structlog.get_logger("qworker.sq")
# A journal with this many bytes, and four times the size after its last rewrite, is rewritten.
_REWRITE = 4 << 20
# Seconds that a thread waits for a section, which other processes hold for microseconds.
_PATIENCE = 10.0


class Channel:
    """A channel of an open topic.

    Args:
        topic: The topic. The caller closes it.
        name: The channel's name, checked.
        index: Its entry in the state file. None: a temporary channel, which begins at the write position, belongs to
            this instance alone, and leaves nothing behind.

    Attributes:
        unsynced: Settlements whose sync failed (place, token): they are done, but perhaps not durably.
    """

    def __init__(self, topic: Topic, name: str, index: int | None) -> None:
        self.topic = topic
        self.name = name
        self.ledger = Ledger()
        self._index = index
        self._mutex = threading.Lock()
        self._owner: tuple[int, int] | None = None
        self._descriptors: list[int] = []
        # Body files of failed messages that no round has synced.
        self._unsynced_bodies: list[int] = []
        # Bodies that are not needed once the rows so far are synced.
        self._finished: list[int] = []
        self._trimming: asyncio.Task[int] | None = None
        self.unsynced: set[tuple[int, int]] = set()
        self._dropping: list[int] = []
        self._synced = topic.durable and index is not None
        self._covers = 0
        self._start = self.end()
        # Until the first round: the entries of new side files may not be durable.
        self._new_folders: tuple[int, ...] = ()
        self._private: TemporaryDirectory[str] | None = None
        if index is None:
            self._private = TemporaryDirectory(prefix="qworker-sq-")
            self.folder = self._keep(open_directory(self._private.name))
        else:
            folders = self._keep(make_directory("channels", topic.side))
            self.folder = topic.parts.add(name, folders, self._keep(make_directory(name, folders)))
            topic.parts.add("channels", topic.side, folders)
            self._new_folders = (self.folder, folders, topic.side, topic.folder)
        self._fail = topic.parts.add("fail", self.folder, self._keep(make_directory("fail", self.folder)))
        self._lock = self._keep(open_regular("lock", self.folder, os.O_RDWR | os.O_CREAT))
        self.journal = FrameFile(
            self.folder,
            "journal",
            apply=self.ledger.apply,
            restart=self.ledger.reset,
            snapshot=self.ledger.snapshot_row,
        )
        self._rounds = ChannelCommit(
            topic.pool, prepare=self._prepare, on_success=self._on_synced, on_failure=self._mark_unsynced
        )
        self._ahead = AheadCounter()
        self._start_following()

    def _keep(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    def _start_following(self) -> None:
        self.journal.follow()
        place = self._place()
        self.ledger.foreign_progress(place)
        self._published = place
        self._trimmed = place >> 32

    def _place(self) -> int:
        return self._start if self._index is None else self.topic.state.place(self._index)

    async def finish(self) -> None:
        """Wait for the operations in progress, and close everything. Idempotent."""
        await self._rounds.finish()
        if self._trimming is not None:
            await asyncio.wait([self._trimming])
        self.release_ownership()
        self.journal.close()
        for fd in self._unsynced_bodies + self._descriptors:
            os.close(fd)
        self._unsynced_bodies.clear()
        self._descriptors.clear()
        if self._private is not None:
            self._private.cleanup()
            self._private = None

    # -- sections ----------------------------------------------------------------------------------------------------

    def _enter(self) -> bool:
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._mutex.release()
            return False
        try:
            self.follow()
        except BaseException:
            self._leave()
            raise
        return True

    def _leave(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._mutex.release()

    @asynccontextmanager
    async def section(self) -> AsyncGenerator[None]:
        """Hold the channel, on the loop. Nothing may be awaited inside."""
        pause = 0.0002
        while not self._enter():
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def blocking_section(self) -> Generator[None]:
        """Hold the channel, in a thread.

        Raises:
            BackendUnavailable: Another process stopped while it held the channel.
        """
        give_up = time.monotonic() + _PATIENCE
        while not self._enter():
            if time.monotonic() > give_up:
                raise BackendUnavailable(
                    f"channel {self.name} of {self.topic.name} is locked by a process that is not responding"
                )
            time.sleep(0.0005)
        try:
            yield
        finally:
            self._leave()

    def follow(self) -> None:
        """Apply the rows that other processes have written.

        Outside of a section: only on the loop, and only to read.
        """
        self.journal.follow()
        if self.ledger.cursor == 0:
            self.ledger.foreign_progress(self._place())

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows, in a section."""
        self._rewrite_after_failed_sync()
        self.journal.append(rows)

    def _rewrite_after_failed_sync(self) -> None:
        """After a failed sync, write the content of the journal into a new file, before anything is acknowledged."""
        if self.journal.sync_failed:
            self.journal.rewrite([self.ledger.snapshot_row()])

    # -- ownership ----------------------------------------------------------------------------------------------------

    def acquire_ownership(self) -> bool:
        """Try to become the process that leases, in a section.

        Messages that a dead process had leased are ready again, with tries + 1.
        """
        if self._owner is not None:
            return True
        found = holder.acquire(self.folder)
        if found is None:
            return False
        self._owner, new = found
        if new:
            # The cursor is past the end: that part of the log was lost in a power failure, and is written again.
            self.ledger.cursor = min(self.ledger.cursor, self.end())
            self.ledger.foreign_progress(self._place())
            self.append([self.ledger.snapshot_row(), [RowKind.OWNER]])
        return True

    def try_own(self) -> bool:
        """Try to become the process that leases; return whether this instance may lease."""
        if self._owner is None and self._enter():
            try:
                self.acquire_ownership()
            finally:
                self._leave()
        return self._owner is not None

    def release_ownership(self) -> None:
        """Let other processes lease."""
        if self._owner is not None:
            holder.release(self._owner)
            self._owner = None

    # -- bodies ------------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """Return the write position."""
        return self.topic.state.place(0)

    async def count_ahead(self) -> int:
        """Count the records from the cursor to the write position, whatever their state."""
        return await self._ahead.count(self.topic.log, self.ledger.cursor, self.end())

    def read_body(self, place: int) -> bytes | None:
        """Return the payload of a record: the kept body if it failed, otherwise the payload in the log."""
        kept = self._read_kept_body(place)
        return self.topic.log.read_one(place, self.end()) if kept is None else kept

    def _read_kept_body(self, place: int) -> bytes | None:
        try:
            fd = open_regular(position_id(place), self._fail, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)

    def keep_body(self, place: int, body: bytes) -> None:
        """Write the body of a failed message, before the row of its failure. The next round syncs it."""
        self._unsynced_bodies.append(write_own(position_id(place), self._fail, body))

    def drop_bodies(self, places: Iterable[int]) -> None:
        """Delete kept bodies after the rows so far are synced."""
        self._finished.extend(places)

    # -- commits -----------------------------------------------------------------------------------------------------

    async def commit(self, *, wake: bool = False) -> None:
        """Make the rows so far durable if the store is, move the position, and wake other processes if needed."""
        with store_errors(f"use the queue {self.topic.name}"):
            if self._synced:
                if self.journal.sync_failed:
                    async with self.section():
                        self._rewrite_after_failed_sync()
                await self._rounds.commit()
            else:
                for fd in self._unsynced_bodies:
                    os.close(fd)
                self._unsynced_bodies.clear()
                self._dropping = self._finished
                self._finished = []
                self._on_synced()
            if wake:
                self.topic.wake()

    def _prepare(self) -> Callable[[], None]:
        bodies, self._unsynced_bodies = self._unsynced_bodies, []
        self._dropping, self._finished = self._finished, []
        journal = os.dup(self.journal.fd) if self.journal.fd >= 0 else -1
        sync_failed, folder = self.journal.sync_failed, self._fail
        new, self._new_folders = self._new_folders, ()
        self._covers = self.ledger.position()

        def sync() -> None:
            try:
                for fd in bodies:
                    os.fsync(fd)
                if bodies:
                    os.fsync(folder)
                sync_directories(new)
                if sync_failed:
                    raise OSError(errno.EIO, "the journal has to be written again")
                if journal >= 0:
                    os.fdatasync(journal)
            finally:
                for fd in (*bodies, *([journal] if journal >= 0 else [])):
                    os.close(fd)

        return sync

    def _mark_unsynced(self) -> None:
        self.journal.sync_failed = True

    def _on_synced(self) -> None:
        for place in self._dropping:
            try_unlink(position_id(place), self._fail)
        self._dropping = []
        if self._enter():
            try:
                self._move_position()
            finally:
                self._leave()

    def _move_position(self) -> None:
        """Move the position that other programs see, rewrite a long journal, and delete old segments. In a section."""
        place = self.ledger.position() if not self._synced else min(self._covers, self.ledger.position())
        if self._index is not None and place > self._published:
            self.topic.state.move(self._index, place)
            self._published = place
        if self.journal.size > _REWRITE + 4 * self.journal.base:
            self.journal.rewrite([self.ledger.snapshot_row()])
        if split(self._published)[0] > self._trimmed and self._trimming is None:
            self._trimmed = split(self._published)[0]
            self._trimming = asyncio.create_task(self.topic.trim(), name="sq-trim")
            self._trimming.add_done_callback(self._on_trimmed)

    def _on_trimmed(self, task: asyncio.Task[int]) -> None:
        self._trimming = None
        if not task.cancelled() and (error := task.exception()) is not None:
            # Nothing is lost: the deletion is tried again when the next segment is finished.
            _log.warning("sq_segment_delete_failed", topic=self.topic.name, error=str(error))
