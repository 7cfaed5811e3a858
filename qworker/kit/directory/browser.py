"""Reading the messages of a queue that is a directory: counts, pages, and messages by their ids."""

from __future__ import annotations

import abc
import os
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from qworker.clock import Clock
from qworker.kit.body_slices import OwnDescriptor, leave_unread, read_body
from qworker.kit.browse import Chosen, Place, at_most, browse_rows, browse_share
from qworker.kit.directory.blocked import BlockedRecords
from qworker.kit.directory.queue_files import QueueFiles
from qworker.kit.directory.reasons import read_reason
from qworker.kit.directory.tally import Tally
from qworker.kit.find import find_each, stamp
from qworker.kit.max_body import describe_too_large
from qworker.kit.opening import open_entry
from qworker.kit.parts import HashShare, in_pages
from qworker.kit.store_errors import UNREADABLE
from qworker.message import FinishedMessage, Message, Query, QueueStats, Selection, State, StoredMessage

__all__ = ["MessageFile", "QueueBrowser"]

Files = TypeVar("Files", bound=QueueFiles)

_FINISHED = frozenset({State.DONE, State.FAILED})
# Seconds in which two changes of a directory may have the same time.
_TICK = 2.0
# The states in the order in which messages pass through them: a message that moves on during a search is found in the
# next state.
_IN_ORDER = (State.READY, State.DELAYED, State.LEASED, State.FAILED, State.DONE)


class MessageFile(msgspec.Struct, gc=False):
    """A file of a queue, as described by its name and perhaps its status.

    Attributes:
        state: The state of its message.
        directory: The descriptor of its directory.
        name: Its name there.
        item: Its name without what the state adds to it.
        at: Unix seconds: when it is due, expires or has finished; 0 if that is not known, or for ready messages.
        holder: The holder of its lease.
    """

    state: State
    directory: int
    name: str
    item: str
    at: float = 0.0
    holder: str | None = None


class QueueBrowser(abc.ABC, Generic[Files]):
    """Reads one queue.

    Args:
        files: The queue.
        clock: The store's clock.
    """

    def __init__(self, files: Files, clock: Clock) -> None:
        self.files = files
        self._clock = clock

    # -- what a protocol says ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def slices(self, *states: State) -> AsyncIterator[list[MessageFile]]:
        """Yield the files of some states, in lists of one state each. Delayed messages that are due are ready."""

    @abc.abstractmethod
    async def list_share(self, state: State, share: HashShare) -> list[MessageFile]:
        """Return the files of a state and a share."""

    @abc.abstractmethod
    def message_id(self, file: MessageFile) -> str:
        """Return the id of a file's message: the same whenever it is read, also for a file of another program."""

    @abc.abstractmethod
    def finished_at(self, status: os.stat_result) -> float:
        """Return the time in Unix seconds at which a file's message finished."""

    @abc.abstractmethod
    def reason_name(self, item: str) -> str:
        """Return the name of the file with the reason of a failed message."""

    @abc.abstractmethod
    def _make_message(self, file: MessageFile, status: os.stat_result, body: bytes, original_id: str | None) -> Message:
        """Make the message of a file."""

    @abc.abstractmethod
    def _enqueued_at(self, item: str) -> float | None:
        """Return when an item was enqueued, in Unix seconds, or None if its name does not say it."""

    def _read_original_id(self, fd: int) -> str | None:
        """Return the id that a message had in the store that it was moved from."""
        return None

    def _place(self, file: MessageFile) -> Place:
        return (0 if file.state is State.READY else file.at), file.item

    # -- listing -----------------------------------------------------------------------------------------------------

    async def list_files(self, state: State) -> list[MessageFile]:
        """Return the files of a state, unsorted.

        Raises:
            OSError: It cannot be listed.
        """
        found: list[MessageFile] = []
        async for files in self.slices(state):
            found += files
        return found

    async def matching(self, ids: frozenset[str], *states: State) -> AsyncIterator[MessageFile]:
        """Yield the files of some ids, state after state; without states, in all of them."""
        async for files in self.slices(*(states or _IN_ORDER)):
            for file in files:
                if self.message_id(file) in ids:
                    yield file

    async def select(self, selection: Selection, *states: State) -> Iterable[MessageFile]:
        """Return the selected files; those that are selected by their ids in some states only."""
        if selection.unchanged is not None:
            return self._unchanged(selection.unchanged)
        if selection.ids is not None:
            return [file async for file in self.matching(frozenset(selection.ids), *states)]
        assert selection.state is not None
        return await self.list_files(selection.state)

    def _unchanged(self, found: Iterable[FinishedMessage]) -> Iterator[MessageFile]:
        """Yield the files that have not changed since they were listed. Each is checked when it is requested.

        A requeue renames the file away, and a file of the same name that finished later has another time.
        """
        directories = {State.DONE: self.files.done, State.FAILED: self.files.fail}
        for one in found:
            name, directory = one.location, directories.get(one.state)
            # The location comes from a table that other programs may write to.
            if directory is None or not name or name[0] == "." or "/" in name or "\0" in name:
                continue
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if one.has_finished_at(self.finished_at(status)):
                yield MessageFile(one.state, directory, name, name)

    # -- answers -----------------------------------------------------------------------------------------------------

    async def count(self, retention: Mapping[str, str]) -> QueueStats:
        """Count every state.

        Raises:
            OSError: It cannot be listed.
        """
        return await self._stats(await self._tally(), retention)

    async def _stats(self, tally: Tally, retention: Mapping[str, str]) -> QueueStats:
        now = self._clock.time()
        ages = [now - (self._enqueued_at(item) or now) for item in tally.first_items]
        return QueueStats(
            queue=self.files.name,
            ready=tally.counts[State.READY],
            leased=tally.counts[State.LEASED],
            delayed=tally.counts[State.DELAYED],
            done=tally.counts[State.DONE],
            failed=tally.counts[State.FAILED],
            oldest_age_s=max(0.0, *ages) if ages else None,
            paused=self.files.is_down,
            blocked=await BlockedRecords(self.files.base).count(self.files.max_body, self.files.directories),
            retention=retention,
        )

    async def _tally(self) -> Tally:
        """Count the names of every state, in the order in which messages pass through the states."""
        tally = Tally()
        async for files in self.slices(*_IN_ORDER):
            if files:
                tally.add(files[0].state, [file.item for file in files])
        return tally

    def browse(self, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Answer a query: names are listed, and only the wanted files are opened.

        Raises:
            OSError: The state cannot be listed, or a file cannot be read.
            UsageError: `after` is not a position, or `part` is not a part.
        """
        # Extending a lease gives it another name or another expiry.
        identity = self.message_id if query.state is State.LEASED else None
        if query.part is None:

            async def choose(after: Place | None, limit: int | None) -> list[MessageFile]:
                chosen = Chosen(self._place, after, limit, newest=query.newest)
                async for files in self.slices(query.state):
                    if query.state in _FINISHED:
                        self._set_times(files)
                    chosen.add(files)
                return chosen.rows()

            return browse_rows(query, choose, self._place, self.read, identity=identity)
        share = HashShare.parse(query.part)

        async def list_share() -> list[MessageFile]:
            return await self.list_share(query.state, share)

        return at_most(query.limit, browse_share(list_share, self.read, identity=identity))

    def _set_times(self, files: Iterable[MessageFile]) -> None:
        for file in files:
            try:
                file.at = self.finished_at(os.stat(file.name, dir_fd=file.directory, follow_symlinks=False))
            except FileNotFoundError:
                # The message was removed in the meantime. Reading it will show that.
                continue

    async def heads(self, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Yield the finished messages of a part without their bodies: no file is opened.

        Raises:
            OSError: The state cannot be listed.
            UsageError: `part` is not a part.
        """
        share = HashShare.parse(part)
        if share.of > 1:
            async for page in in_pages(map(self._head, await self.list_share(state, share))):
                yield page
            return
        # Nothing is opened, so the order of the inodes does not matter, and no list of all names is needed.
        async for files in self.slices(state):
            yield [head for file in files if (head := self._head(file)) is not None]

    def _head(self, file: MessageFile) -> StoredMessage | None:
        try:
            status = os.stat(file.name, dir_fd=file.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        # As `read`: callers copy bodies elsewhere.
        if self._is_too_large(status):
            return None
        return StoredMessage(
            message=Message(id=self.message_id(file), queue=self.files.name, body=b""),
            state=file.state,
            finished_at=self.finished_at(status),
            location=file.name,
        )

    def heads_version(self, state: State) -> str | None:
        """Return a text that changes with the answer of `heads`. None: it may have changed just now."""
        directory = {State.DONE: self.files.done, State.FAILED: self.files.fail}[state]
        status = os.fstat(directory)
        # A change so shortly before this call may have the same time as one after it.
        if abs(self._clock.time() - status.st_mtime) < _TICK:
            return None
        return f"{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}-{self.files.max_body}"

    def read_unchanged(self, found: Iterable[FinishedMessage]) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages that have not changed since they were listed.

        Raises:
            OSError: A file cannot be read.
        """
        return in_pages(map(self.read, self._unchanged(found)))

    async def find(self, ids: Sequence[str]) -> list[StoredMessage]:
        """Find messages in any state by their ids.

        Raises:
            OSError: A directory cannot be listed.
        """

        async def once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
            left = set(wanted)
            async for file in self.matching(wanted):
                if (stored := self.read(file, any_size=True)) is not None:
                    yield stored
                    left.discard(stored.message.id)
                    if not left:
                        return

        return await find_each(ids, once, lambda: stamp(self.files.message_directories))

    def read(self, file: MessageFile, *, any_size: bool = False) -> StoredMessage | None:
        """Read one file; None if it is gone. `finish_reading` reads a large body.

        Args:
            file: The file.
            any_size: Whether to return a message whose body is larger than `max_body`. It has no body then, and an
                error. Callers of `browse` copy bodies elsewhere and remove the messages, so they must not get it.
        """
        try:
            status, body, original_id = self._read_file(file)
        except FileNotFoundError:
            return None
        is_too_large = self._is_too_large(status)
        if is_too_large and not any_size:
            return None
        state, finished = file.state, file.state in _FINISHED
        error = self._read_error(file) if state is State.FAILED else None
        if is_too_large:
            error = describe_too_large(status.st_size, self.files.max_body or 0)
        stored = StoredMessage(
            message=self._make_message(file, status, body if isinstance(body, bytes) else b"", original_id),
            state=state,
            due_at=file.at if state is State.DELAYED else None,
            expires_at=file.at or None if state is State.LEASED else None,
            finished_at=self.finished_at(status) if finished else None,
            holder=file.holder,
            error=error,
            location=file.name if finished else None,
        )
        return leave_unread(stored, body)

    def _read_error(self, file: MessageFile) -> str | None:
        """Return why a message failed, as far as it is kept."""
        return read_reason(self.files.fail, self.reason_name(file.name))

    def _is_too_large(self, status: os.stat_result) -> bool:
        most = self.files.max_body
        return most is not None and status.st_size > most and stat.S_ISREG(status.st_mode)

    def _read_file(self, file: MessageFile) -> tuple[os.stat_result, bytes | OwnDescriptor, str | None]:
        """Read a file's status, contents and original id. If it is not a readable regular file, it has no contents."""
        try:
            fd = open_entry(file.name, os.O_RDONLY, file.directory)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            return os.stat(file.name, dir_fd=file.directory, follow_symlinks=False), b"", None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or self._is_too_large(status):
                return status, b"", None
            return status, read_body(fd, status.st_size), self._read_original_id(fd)
        finally:
            os.close(fd)
