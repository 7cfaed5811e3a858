"""One topic as one backend instance sees it: its directory, its locks, and the writer with its group commit.

Beside `state` and the segments stands a directory `.qworker/`, which no other implementation looks at:

    lock, turn        one writer at a time; `turn` is the waiting line, so that nobody waits for ever
    boot              the boot in which the write position was last walked to the end
    notes             what the log has no place for
    wake              closed after writing: its watchers look at the log again
    channels/<name>/  journal, lock, owner, fail/

A commit is: records after the write position, one fdatasync per touched file in a thread, then the write position moves.
Publishes that arrive meanwhile ride with the next commit.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from zlib import crc32

import msgspec
import structlog

from qworker.clock import Clock
from qworker.errors import BackendError, BackendUnavailable, NotSupported, PublishUncertain
from qworker.kit.files import boot_id, store_error
from qworker.kit.segments.disk import make_directory, open_directory, open_regular, write_all, write_new
from qworker.kit.segments.format import split
from qworker.kit.segments.log import Log
from qworker.kit.segments.state import STATE_SIZE, StateFile, encode_state
from qworker.message import Draft
from qworker_sq.record_info import Note, Notes

__all__ = ["Deleted", "Known", "Topic", "place_of_id", "position_id", "sync_directories"]

SIDE = ".qworker"
_log = structlog.get_logger("qworker.sq")
# Bytes of one commit: what a loop turn writes, and what one sync waits for.
_COMMIT_BYTES = 1 << 20


def position_id(place: int) -> str:
    """The id of a message that nobody chose one for."""
    segment, offset = split(place)
    return f"{segment}-{offset}"


def place_of_id(message_id: str) -> int | None:
    """The place that `position_id` names; None when the id has another form."""
    segment, dash, offset = message_id.partition("-")
    if not (dash and segment.isascii() and segment.isdigit() and offset.isascii() and offset.isdigit()):
        return None
    if (
        len(segment) > 20
        or len(offset) > 10
        or int(offset) >> 32
        or position_id(int(segment) << 32 | int(offset)) != message_id
    ):
        return None
    return int(segment) << 32 | int(offset)


class Deleted(BackendUnavailable):
    """The topic's directory is not that of the queue any more."""


class Known:
    """Tells the writer which places are still stored, as the publisher's channel sees it."""

    def alive(self, place: int) -> bool:
        """Whether the record is ready, delayed, leased or failed."""
        raise NotImplementedError


class _Request(msgspec.Struct, eq=False):
    drafts: Sequence[Draft]
    done: asyncio.Future[list[str]]
    ids: list[str] = []
    # What is to be written: where its id belongs, its payload, its note.
    records: list[tuple[int, bytes, Note | None]] = []


class Topic:
    """An open topic.

    Args:
        root: descriptor of the store's directory; stays the caller's.
        name: the topic's name, checked.
        clock: the store's clock.
        segment_size: see `Log`.
        durable: sync before anything is acknowledged.
        pool: where syncs wait.
    """

    def __init__(
        self, root: int, name: str, *, clock: Clock, segment_size: int | None, durable: bool, pool: Executor
    ) -> None:
        self.name = name
        self.durable = durable
        self.pool = pool
        self.clock = clock
        self._root = root
        self._descriptors: list[int] = []
        # Until the first sync of the notes: the entries of new side files may not be durable.
        self._new_files = True
        self._gate = asyncio.Lock()
        self._waiting: list[_Request] = []
        self._writer: asyncio.Task[None] | None = None
        self.known = Known()
        try:
            self.folder = self._held(open_directory(name, root))
            self.side = self._held(make_directory(SIDE, self.folder))
            found = os.fstat(self.folder)
            self._identity = (found.st_dev, found.st_ino)
            self._lock = self._held(open_regular("lock", self.side, os.O_RDWR | os.O_CREAT))
            self._turn = self._held(open_regular("turn", self.side, os.O_RDWR | os.O_CREAT))
        except OSError:
            self.close()
            raise
        self._segment_size = segment_size
        self.notes = Notes(self.side)
        self._room = 0
        self.state: StateFile
        self.log: Log

    def _held(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    async def open(self) -> None:
        """Make what a new topic lacks, and find the write position after a crash."""
        async with self.locked():
            try:
                self._attach(self._held(open_regular("state", self.folder)))
            except FileNotFoundError:
                self._found()
            self._recover()
            self._room = self.log.room(self.state.place(0))
            self.notes.file.follow()

    def _attach(self, fd: int) -> None:
        self.state = StateFile(fd)
        self.log = Log(self.folder, self.state, self.clock, self._segment_size)

    def _found(self) -> None:
        """A new topic, or one that has lost its state: what its segments hold stays."""
        strays = Log.listed(self.folder)
        write = 0 if strays else Log.make_first(self.folder, self.clock, self._segment_size)
        write_new("state", self.folder, encode_state(write, []))
        os.fsync(self._root)
        self._attach(self._held(open_regular("state", self.folder)))
        if strays:
            self.state.move(0, self.log.recover(0, whole=True))
            os.fsync(self.state.fd)
        self._mark_walked()

    def _recover(self) -> None:
        """Walk to the write position: to its end after a boot that is not known, else only where something stands behind it."""
        if os.fstat(self.state.fd).st_size < STATE_SIZE:
            os.ftruncate(self.state.fd, STATE_SIZE)
        recorded = self.state.place(0)
        walked = self._walked_in_this_boot()
        if walked and not self.log.looks_written(recorded):
            return
        found = self.log.recover(recorded, whole=not walked)
        if found != recorded:
            self.state.move(0, found)
            os.fsync(self.state.fd)
        if not walked:
            self._pull_channels_back(found)
            self._mark_walked()

    def _walked_in_this_boot(self) -> bool:
        try:
            fd = open_regular("boot", self.side, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return os.read(fd, 64).decode(errors="replace") == boot_id()
        finally:
            os.close(fd)

    def _mark_walked(self) -> None:
        # Not synced: without it, the next to open walks once more.
        fd = open_regular("boot", self.side, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, 0)
            write_all(fd, boot_id().encode(), 0)
        finally:
            os.close(fd)

    def _pull_channels_back(self, end: int) -> None:
        """A channel behind the end would miss what is written next: that part of the log was lost with the power."""
        for index, entry in self.state.read()[1].items():
            if entry.place > end:
                self.state.move(index, end)

    def close(self) -> None:
        """Let go of every descriptor. Idempotent."""
        if self._descriptors:
            for fd in self._descriptors:
                os.close(fd)
            self._descriptors.clear()
            if hasattr(self, "log"):
                self.log.close()
                self.notes.file.close()

    async def finish(self) -> None:
        """Wait for the writer, then close."""
        while self._writer is not None:
            await asyncio.wait([self._writer])
        self.close()

    def alive(self) -> bool:
        """Whether the directory still is the queue of that name."""
        try:
            found = os.stat(self.name, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def wake(self) -> None:
        """Tell whoever watches the side directory."""
        os.close(open_regular("wake", self.side, os.O_WRONLY | os.O_CREAT))

    # -- one writer at a time ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def locked(self) -> AsyncGenerator[None]:
        """Hold the topic's lock."""
        async with self._gate:
            await _flock(self._turn)
            try:
                await _flock(self._lock)
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    # -- publishing --------------------------------------------------------------------------------------------------

    async def publish(self, drafts: Sequence[Draft]) -> list[str]:
        """Append messages; returns when they are durable.

        Raises:
            Deleted: the topic is gone, and nothing was stored.
            BackendError: see `Backend.publish`.
        """
        longest = max([len(draft.body) for draft in drafts])
        if longest > self._room:
            raise NotSupported(
                f"a message must have at most {self._room} bytes to fit into a segment (got {longest}): "
                "open with a larger ?segment_size="
            )
        request = _Request(drafts, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name=f"sq-writer-{self.name}")
        return await request.done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                requests = self._take()
                try:
                    async with self.locked():
                        await self._commit(requests)
                except BackendError as error:
                    _refuse(requests, error)
                except OSError as error:
                    _refuse(requests, store_error(error, f"publish to {self.name}"))
        finally:
            self._writer = None
            _refuse(self._waiting, BackendUnavailable(f"the writer of {self.name} has stopped"))

    def _take(self) -> list[_Request]:
        size = 0
        count = 0
        for request in self._waiting:
            count += 1
            size += sum(len(draft.body) for draft in request.drafts)
            if size >= _COMMIT_BYTES:
                break
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _commit(self, requests: list[_Request]) -> None:
        if not self.alive():
            raise Deleted(f"the queue {self.name} was deleted: publish again")
        recorded = self.state.place(0)
        if self.log.looks_written(recorded):
            recorded = self.log.recover(recorded, whole=False)
            self.state.move(0, recorded)
        self.notes.file.follow()
        self._resolve(requests, recorded)
        records = [record for request in requests for record in request.records]
        if records:
            end = await self._store(recorded, requests, records)
            self.state.move(0, end)
            self.wake()
        for request in requests:
            if not request.done.done():
                request.done.set_result(request.ids)

    def _resolve(self, requests: list[_Request], end: int) -> None:
        """Leave out what is stored already, and decide what is noted of the rest."""
        chosen: set[str] = set()
        now = self.clock.time()
        for request in requests:
            request.ids, request.records = [], []
            for draft in request.drafts:
                stored = self._stored(draft, chosen, end)
                request.ids.append(stored or draft.id or "")
                if stored is None:
                    if draft.id is not None:
                        chosen.add(draft.id)
                    request.records.append((len(request.ids) - 1, draft.body, _note(draft, now)))

    def _stored(self, draft: Draft, chosen: set[str], end: int) -> str | None:
        if draft.id is None:
            return None
        if draft.id in chosen:
            return draft.id
        place = self.notes.by_id.get(draft.id)
        if place is None:
            place = place_of_id(draft.id)
        elif not self._still_noted(place, draft.id, end):
            return None
        return draft.id if place is not None and place < end and self.known.alive(place) else None

    def _still_noted(self, place: int, message_id: str, end: int) -> bool:
        """Whether a note is of the record that stands there now: another may have, after a publish that failed."""
        note = self.notes.by_place.get(place)
        payload = self.log.read_one(place, end)
        return note is not None and note.id == message_id and (payload is None or note.fits(payload))

    async def _store(self, at: int, requests: list[_Request], records: list[tuple[int, bytes, Note | None]]) -> int:
        try:
            places, end = self.log.plan([len(payload) for _, payload, _ in records], at)
            rows = [self.notes.row(place, note) for place, (_, _, note) in zip(places, records, strict=True) if note]
            mark = self.notes.time_row(places[0], self.clock.time())
            if rows or mark:
                self.notes.file.append([*rows, *([mark] if mark else [])])
            if rows and self.durable:
                # Before the records: a record without its note would run early, or twice.
                await self._sync_notes()
            self.log.write([payload for _, payload, _ in records], places, at)
        except OSError:
            self.log.undo(at)
            raise
        await self._sync_segments(at)
        following = iter(places)
        for request in requests:
            for index, _, note in request.records:
                place = next(following)
                request.ids[index] = note.id if note is not None and note.id is not None else position_id(place)
        return end

    async def _sync_segments(self, at: int) -> None:
        touched = [self.log.descriptor(segment) for segment in sorted(self.log.unsynced)]
        self.log.unsynced.clear()
        if not self.durable:
            return
        try:
            await self._sync(touched)
        except OSError as error:
            self.state.move(0, self.log.abandon(at))
            raise PublishUncertain(
                f"the message may or may not be stored: the disk did not confirm it ({self.name}: {error.strerror}): publish it again with the same id"
            ) from error

    async def _sync_notes(self) -> None:
        if self._new_files:
            await asyncio.get_running_loop().run_in_executor(self.pool, sync_directories, [self.side, self.folder])
            self._new_files = False
        await self._sync([self.notes.file.fd])

    async def _sync(self, descriptors: list[int]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.pool, _sync_data, descriptors)

    # -- deletion ----------------------------------------------------------------------------------------------------

    async def trim(self) -> int:
        """Delete the segments on which, and before which, no channel stands; how many there were."""
        async with self.locked():
            write, channels = self.state.read()
            oldest = min([entry.place for entry in channels.values()] + [write]) >> 32
            if self.log.segments()[0] >= oldest:
                self.log.refresh()
                return 0
            if self.durable:
                await self._sync([self.state.fd])
            gone = self.log.trim(oldest)
            self.log.refresh()
            self.notes.file.follow()
            self.notes.forget(oldest << 32, self._kept())
            return gone

    def _kept(self) -> set[int]:
        """The places whose bodies some channel keeps beside the log."""
        kept: set[int] = set()
        channels = make_directory("channels", self.side)
        try:
            for channel in os.listdir(channels):
                kept.update(
                    place for name in _listed(f"{channel}/fail", channels) if (place := place_of_id(name)) is not None
                )
        finally:
            os.close(channels)
        return kept


def _listed(name: str, parent: int) -> list[str]:
    """What is in a directory; nothing where there is none."""
    try:
        fd = open_directory(name, parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _note(draft: Draft, now: float) -> Note | None:
    due = now + draft.delay if draft.due_at is None else draft.due_at
    due = due if due > now else 0.0
    if draft.id is None and not due and not draft.tries and draft.enqueued_at is None:
        return None
    enqueued_at = now if draft.enqueued_at is None else draft.enqueued_at
    return Note(crc=crc32(draft.body), id=draft.id, due=due, tries=draft.tries, enqueued_at=enqueued_at)


def _refuse(requests: list[_Request], error: BackendError) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_exception(error)
    requests.clear()


def sync_directories(descriptors: Sequence[int]) -> None:
    """Make the entries of directories durable."""
    for fd in descriptors:
        os.fsync(fd)


def _sync_data(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.fdatasync(fd)


async def _flock(fd: int) -> None:
    """Take a lock without blocking the loop; cancellable."""
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.01)
