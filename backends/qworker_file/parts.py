"""Reading a whole state in shares of its names, and deleting what such a reader has found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from qworker.files import DIRECTORY
from qworker.message import Finished, State, StoredMessage
from qworker.parts import Share, pages
from qworker_file.admin import delete_entry
from qworker_file.layout import QueueDir
from qworker_file.looks import Entry, delayed_entry, leased_entry, look
from qworker_file.names import parse_delay, parse_lease

__all__ = ["discard", "read_share"]

# Directory entries read, and files deleted, between two turns of the loop.
_LISTED = 1000
_DELETED = 100


async def read_share(
    files: QueueDir, state: State, share: Share, now: float, *, local: bool
) -> AsyncIterator[list[StoredMessage]]:
    """What is in a state and in a share, in pages; only the share's own names are held.

    Raises:
        OSError: the state cannot be listed, or a file cannot be read.
    """
    found = [entry async for entry in _entries(files, state, share, now)]
    async for page in pages(look(files, entry, local=local) for entry in found):
        yield page


async def _entries(files: QueueDir, state: State, share: Share, now: float) -> AsyncIterator[Entry]:
    match state:
        case State.DONE | State.FAIL | State.READY:
            directory = {State.DONE: files.done, State.FAIL: files.fail, State.READY: files.queue}[state]
            for name in await _listed(directory, lambda name: name[0] != "." and share.has(name)):
                yield Entry(state, directory, name, name)
        case State.LEASED:
            # By the item alone: a renewal gives the lease another name.
            for name in await _listed(files.lease, lambda name: _has(share, parse_lease(name), 0)):
                if (entry := leased_entry(files, name)) is not None:
                    yield entry
        case State.DELAYED:
            pass
    if state is State.DELAYED or state is State.READY:
        for name in await _listed(files.delay, lambda name: _has(share, parse_delay(name), 1)):
            entry = delayed_entry(files, name, now)
            if entry is not None and entry.state is state:
                yield entry


def _has(share: Share, parsed: tuple[str | int, ...] | None, item: int) -> bool:
    return parsed is not None and share.has(str(parsed[item]))


async def _listed(directory: int, wanted: Callable[[str], bool]) -> list[str]:
    """Some names of a directory, read in slices; the others are not kept."""
    names: list[str] = []
    fd = os.open(".", DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(fd) as listing:
            for part in _slices(listing):
                names += [name for name in part if wanted(name)]
                await asyncio.sleep(0)
    finally:
        os.close(fd)
    return names


def _slices(listing: Iterator[os.DirEntry[str]]) -> Iterator[list[str]]:
    part: list[str] = []
    for entry in listing:
        part.append(entry.name)
        if len(part) == _LISTED:
            yield part
            part = []
    yield part


async def discard(files: QueueDir, found: Sequence[Finished]) -> list[Entry]:
    """Delete finished messages that are still where and as they were found; what was deleted.

    A requeue renames the file away, and a file of the same name that finished later has another time.

    Raises:
        OSError: one cannot be deleted.
    """
    gone: list[Entry] = []
    for number, one in enumerate(found):
        entry = _finished_entry(files, one)
        if entry is not None and delete_entry(files, entry):
            gone.append(entry)
        if number % _DELETED == _DELETED - 1:
            await asyncio.sleep(0)
    return gone


def _finished_entry(files: QueueDir, one: Finished) -> Entry | None:
    name = one.place
    # It has been in a table that others may write to.
    if not name or name[0] == "." or "/" in name or "\0" in name:
        return None
    directory = {State.DONE: files.done, State.FAIL: files.fail}.get(one.state)
    if directory is None:
        return None
    try:
        moment = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return None
    return Entry(one.state, directory, name, name) if one.is_from(moment) else None
