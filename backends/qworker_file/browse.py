"""Looking at a queue without claiming anything: counts, pages, and one message by its id."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from qworker.kit.browse import Chosen, Place, browse_rows
from qworker.kit.directory.reasons import read_reason
from qworker.kit.files import READ, name_slices, read_all
from qworker.kit.find import find_each, stamp
from qworker.message import Message, Query, QueueStats, State, StoredMessage
from qworker_file.foreign import arguments
from qworker_file.layout import QueueDir
from qworker_file.names import id_of, parse_delay, parse_item, parse_lease, reason_name

__all__ = [
    "Entry",
    "browse",
    "count",
    "delayed_entry",
    "entries",
    "entry_id",
    "find",
    "leased_entry",
    "look",
    "message_id",
]

_UNREADABLE = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES, errno.ENODEV, errno.EIO})


class Entry(msgspec.Struct, gc=False):
    """A file of a queue, by its name alone."""

    state: State
    # The descriptor of its directory.
    directory: int
    name: str
    # Its name without the state's own part.
    item: str
    # Unix seconds: due or expiry; 0 for the other states.
    at: float = 0.0
    holder: str | None = None


def message_id(item: str) -> str:
    """The id of any file: a stranger's, which has no item's name yet, gets one that is the same at every look."""
    return id_of(item) or "x-" + hashlib.sha256(os.fsencode(item)).hexdigest()[:40]


async def entries(files: QueueDir, state: State, now: float) -> list[Entry]:
    """What is in a state, unsorted; delayed messages that are due are ready.

    Raises:
        OSError: it cannot be listed.
    """
    found: list[Entry] = []
    async for some in _slices(files, state, now):
        found += some
    return found


async def _slices(files: QueueDir, state: State, now: float) -> AsyncIterator[list[Entry]]:
    """The same, in lists of bounded size."""
    if state is State.LEASED:
        async for names in name_slices(files.lease):
            yield [entry for name in names if (entry := leased_entry(files, name)) is not None]
        return
    if state is State.DONE or state is State.FAILED:
        directory = files.done if state is State.DONE else files.fail
        async for names in name_slices(directory):
            yield [Entry(state, directory, name, name) for name in names if name[0] != "."]
        return
    async for names in name_slices(files.delay):
        found = [entry for name in names if (entry := delayed_entry(files, name, now)) is not None]
        yield [entry for entry in found if entry.state is state]
    if state is State.READY:
        async for names in name_slices(files.queue):
            yield [Entry(state, files.queue, name, name) for name in names if name[0] != "."]


def leased_entry(files: QueueDir, name: str) -> Entry | None:
    """A file of lease/ by its name; None for what is no lease."""
    parsed = parse_lease(name)
    if parsed is None:
        return None
    return Entry(State.LEASED, files.lease, name, parsed[0], parsed[1] / 1000, parsed[2])


def delayed_entry(files: QueueDir, name: str, now: float) -> Entry | None:
    """A file of delay/ by its name, ready where it is due; None for what has no due time."""
    parsed = parse_delay(name)
    if parsed is None:
        return None
    due = parsed[0] / 1000
    return Entry(State.READY if due <= now else State.DELAYED, files.delay, name, parsed[1], due)


async def count(files: QueueDir, now: float, *, local: bool, retention: Mapping[str, str]) -> QueueStats:
    """Count every state.

    Raises:
        OSError: it cannot be listed.
    """
    ready = await entries(files, State.READY, now)
    oldest = min((entry.item for entry in ready), default=None)
    age: float | None = None
    if oldest is not None:
        parsed = parse_item(oldest, local=local)
        age = 0.0 if parsed is None or parsed.enqueued_at is None else max(0.0, now - parsed.enqueued_at)
    return QueueStats(
        queue=files.name,
        ready=len(ready),
        leased=len(await entries(files, State.LEASED, now)),
        delayed=len(await entries(files, State.DELAYED, now)),
        done=len(await entries(files, State.DONE, now)),
        failed=len(await entries(files, State.FAILED, now)),
        oldest_age_s=age,
        paused=files.is_down,
        retention=retention,
    )


async def browse(files: QueueDir, query: Query, now: float, *, local: bool) -> AsyncIterator[list[StoredMessage]]:
    """What a query wants, in the contract's order: names are listed, and only the wanted files opened.

    Raises:
        OSError: the state cannot be listed, or a file cannot be read.
        UsageError: `after` is no position.
    """

    async def choose(after: Place | None, limit: int | None) -> list[Entry]:
        chosen = Chosen(_place, after, limit, newest=query.newest)
        async for some in _slices(files, query.state, now):
            if query.state in {State.DONE, State.FAILED}:
                _set_times(some)
            chosen.add(some)
        return chosen.rows()

    # Extending a lease gives it another name.
    identity = entry_id if query.state is State.LEASED else None
    async for page in browse_rows(
        query, choose, _place, lambda entry: look(files, entry, local=local), identity=identity
    ):
        yield page


def entry_id(entry: Entry) -> str:
    """The id of a file's message, which stays the same when an extension gives a lease another name."""
    return message_id(entry.item)


def _place(entry: Entry) -> Place:
    return (0 if entry.state is State.READY else entry.at), entry.item


def _set_times(found: list[Entry]) -> None:
    for entry in found:
        try:
            entry.at = os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            # Removed meanwhile; the look at it will find out.
            continue


async def find(files: QueueDir, ids: Sequence[str], now: Callable[[], float], *, local: bool) -> list[StoredMessage]:
    """Messages in any state, by their ids.

    Raises:
        OSError: a directory cannot be listed.
    """

    async def once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
        left = set(wanted)
        async for entry in matching(files, wanted, now):
            if (stored := look(files, entry, local=local)) is not None:
                yield stored
                left.discard(stored.message.id)
                if not left:
                    return

    directories = (files.queue, files.delay, files.lease, files.fail, files.done)
    return await find_each(ids, once, lambda: stamp(directories))


async def matching(files: QueueDir, wanted: frozenset[str], now: Callable[[], float]) -> AsyncIterator[Entry]:
    """The files of some ids, state after state in the order in which messages go through them."""
    for state in (State.READY, State.DELAYED, State.LEASED, State.FAILED, State.DONE):
        for number, entry in enumerate(await entries(files, state, now())):
            if message_id(entry.item) in wanted:
                yield entry
            if number % 1000 == 999:
                await asyncio.sleep(0)


def look(files: QueueDir, entry: Entry, *, local: bool) -> StoredMessage | None:
    """Read one file; None when it is gone."""
    try:
        status, body = _read(entry)
    except FileNotFoundError:
        return None
    parsed = parse_item(entry.item, local=local)
    moment = status.st_mtime if parsed is None or parsed.enqueued_at is None else parsed.enqueued_at
    message = Message(
        id=message_id(entry.item) if parsed is None else parsed.id,
        queue=files.name,
        body=body,
        tries=0 if parsed is None else parsed.tries,
        enqueued_at=moment,
        argv=(entry.item,) if parsed is None else arguments(files, parsed),
    )
    state = entry.state
    return StoredMessage(
        message=message,
        state=state,
        due_at=entry.at if state is State.DELAYED else None,
        expires_at=entry.at if state is State.LEASED else None,
        finished_at=status.st_mtime if state in {State.DONE, State.FAILED} else None,
        holder=entry.holder,
        error=read_reason(files.fail, reason_name(entry.item)) if state is State.FAILED else None,
        location=entry.name if state in {State.DONE, State.FAILED} else None,
    )


def _read(entry: Entry) -> tuple[os.stat_result, bytes]:
    """A file's state and contents; no contents for what is no readable regular file."""
    try:
        fd = os.open(entry.name, READ, dir_fd=entry.directory)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        return os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False), b""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return status, b""
        return status, read_all(fd, status.st_size)
    finally:
        os.close(fd)
