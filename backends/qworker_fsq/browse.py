"""Looking at a queue without claiming anything: counts, pages, and one message by its id."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
from collections.abc import AsyncIterator, Mapping

import msgspec

from qworker.kit.browse import Chosen, Place, browse_rows
from qworker.kit.directory.reasons import read_reason
from qworker.kit.files import READ, list_names, read_all
from qworker.kit.parts import Share, pages
from qworker.message import Message, Query, QueueStats, State, StoredMessage
from qworker_fsq.holder import holders
from qworker_fsq.layout import QueueDir
from qworker_fsq.lease import due_at, read_origin, reason_name
from qworker_fsq.lease_end import FsqLease
from qworker_fsq.names import Malformed, message_id, parse

__all__ = ["Entry", "Look", "directory_of"]

_UNREADABLE = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES, errno.ENODEV, errno.EIO})
# Files looked at between two turns of the loop.
_SLICE = 300


class Entry(msgspec.Struct, gc=False):
    """A file of a queue."""

    state: State
    name: str
    # Unix seconds: due, expiry or finished; 0 for what is ready, and where it is not known.
    at: float = 0.0
    holder: str | None = None


def directory_of(files: QueueDir, state: State) -> int:
    """The descriptor of the directory in which a state's files are."""
    if state is State.DONE:
        return files.done
    return files.fail if state is State.FAILED else files.queue


class Look:
    """One look at one queue.

    Args:
        files: the queue.
        own: this instance's leases, by name.
        now: Unix seconds.
        kind: the file system's name.
    """

    def __init__(self, files: QueueDir, own: Mapping[str, FsqLease], now: float, kind: str) -> None:
        self._files = files
        self._own = own
        self._now = now
        self._kind = kind

    async def entries(self, *states: State) -> list[Entry]:
        """What is in some states; ready ones in the contract's order."""
        found: list[Entry] = []
        if {State.READY, State.LEASED, State.DELAYED} & set(states):
            found += [entry for entry in await self._queued() if entry.state in states]
        for state in (State.FAILED, State.DONE):
            if state in states:
                found += await self._finished(state)
        return found

    async def _queued(self) -> list[Entry]:
        names = sorted(name for name in await list_names(self._files.queue) if name[0] != ".")
        held = holders(self._files.queue, self._kind)
        found: list[Entry] = []
        for number, name in enumerate(names):
            if (entry := self._queued_one(name, held)) is not None:
                found.append(entry)
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return found

    def _queued_one(self, name: str, held: Mapping[int, int]) -> Entry | None:
        lease = self._own.get(name)
        if lease is not None:
            return Entry(State.LEASED, name, lease.expires_at, f"pid {os.getpid()}")
        try:
            status = os.stat(name, dir_fd=self._files.queue, follow_symlinks=False)
        except FileNotFoundError:
            return None
        pid = held.get(status.st_ino)
        if pid is not None:
            return Entry(State.LEASED, name, 0.0, f"pid {pid}")
        due = due_at(status)
        return Entry(State.READY, name) if due is None or due <= self._now else Entry(State.DELAYED, name, due)

    async def _finished(self, state: State) -> list[Entry]:
        directory = directory_of(self._files, state)
        found: list[Entry] = []
        for number, name in enumerate(await list_names(directory)):
            if name[0] == ".":
                continue
            try:
                # A rename changes nothing but this time.
                moment = os.stat(name, dir_fd=directory, follow_symlinks=False).st_ctime
            except FileNotFoundError:
                continue
            found.append(Entry(state, name, moment))
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return found

    async def count(self, retention: Mapping[str, str]) -> QueueStats:
        """Count every state."""
        counts = dict.fromkeys(State, 0)
        oldest: str | None = None
        for entry in await self.entries(State.READY, State.LEASED, State.DELAYED):
            counts[entry.state] += 1
            if oldest is None and entry.state is State.READY:
                oldest = entry.name
        for state in (State.FAILED, State.DONE):
            names = await list_names(directory_of(self._files, state))
            counts[state] = sum(name[0] != "." for name in names)
        return QueueStats(
            queue=self._files.name,
            ready=counts[State.READY],
            leased=counts[State.LEASED],
            delayed=counts[State.DELAYED],
            done=counts[State.DONE],
            failed=counts[State.FAILED],
            oldest_age_s=None if oldest is None else self._age(oldest),
            paused=self._files.is_down,
            retention=retention,
        )

    def _age(self, name: str) -> float:
        try:
            return max(0.0, self._now - parse(name, self._files.constants).enqueued_at)
        except Malformed:
            return 0.0

    async def browse(self, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """What a query wants."""

        async def choose(after: Place | None, limit: int | None) -> list[Entry]:
            chosen = Chosen(_place, after, limit, newest=query.newest)
            chosen.add(await self.entries(query.state))
            return chosen.rows()

        # Extending a lease of this process changes its expiry.
        identity = self._id if query.state is State.LEASED else None
        async for page in browse_rows(query, choose, _place, self.read, identity=identity):
            yield page

    def _id(self, entry: Entry) -> str:
        return message_id(entry.name, self._files.constants)

    async def share(self, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """What is in one share of a state."""
        share, constants = Share.parse(part), self._files.constants
        entries = [entry for entry in await self.entries(state) if share.has(message_id(entry.name, constants))]
        async for page in pages(self.read(entry) for entry in entries):
            yield page

    async def matching(self, wanted: frozenset[str], *states: State) -> list[Entry]:
        """The files of some ids."""
        constants = self._files.constants
        return [entry for entry in await self.entries(*states) if message_id(entry.name, constants) in wanted]

    def read(self, entry: Entry) -> StoredMessage | None:
        """Read one file; None when it is gone."""
        directory = directory_of(self._files, entry.state)
        try:
            status, body, origin = _read(entry.name, directory)
        except FileNotFoundError:
            return None
        constants, state = self._files.constants, entry.state
        try:
            item = parse(entry.name, constants)
            tries, moment, arguments = item.tries, item.enqueued_at, item.arguments
        except Malformed:
            tries, moment, arguments = 0, status.st_mtime, (entry.name,)
        message = Message(
            id=message_id(entry.name, constants),
            queue=self._files.name,
            body=body,
            tries=tries,
            enqueued_at=moment,
            argv=arguments,
            original_id=origin,
        )
        return StoredMessage(
            message=message,
            state=state,
            due_at=entry.at if state is State.DELAYED else None,
            expires_at=entry.at or None if state is State.LEASED else None,
            finished_at=entry.at if state in {State.DONE, State.FAILED} else None,
            holder=entry.holder,
            error=read_reason(self._files.fail, reason_name(entry.name)) if state is State.FAILED else None,
            location=entry.name if state in {State.DONE, State.FAILED} else None,
        )


def _place(entry: Entry) -> Place:
    if entry.state is State.READY:
        return 0, entry.name
    # What another holds has no expiry: last.
    return (entry.at or sys.float_info.max), entry.name


def _read(name: str, directory: int) -> tuple[os.stat_result, bytes, str | None]:
    """A file's status, contents and origin; no contents for what is no readable regular file."""
    try:
        fd = os.open(name, READ, dir_fd=directory)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        return os.stat(name, dir_fd=directory, follow_symlinks=False), b"", None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return status, b"", None
        return status, read_all(fd, status.st_size), read_origin(fd)
    finally:
        os.close(fd)
