"""Reading a whole state in shares of its names, and deleting what such a reader has found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from qworker.files import DIRECTORY
from qworker.message import FinishedMessage, State, StoredMessage
from qworker.parts import Share, pages
from qworker_file.admin import delete_entry
from qworker_file.layout import QueueDir
from qworker_file.looks import Entry, delayed_entry, leased_entry, look
from qworker_file.names import parse_delay, parse_lease

__all__ = ["discard", "read_share"]

# Files deleted between two turns of the loop.
_DELETED = 100


async def read_share(
    files: QueueDir, state: State, share: Share, now: float, *, local: bool
) -> AsyncIterator[list[StoredMessage]]:
    """What is in a state and in a share, in pages; only the share's own names are held.

    Raises:
        OSError: the state cannot be listed, or a file cannot be read.
    """
    found = list(_entries(files, state, share, now))
    async for page in pages(look(files, entry, local=local) for entry in found):
        yield page


def _entries(files: QueueDir, state: State, share: Share, now: float) -> Iterator[Entry]:
    if state is State.LEASED:
        # By the item alone: a renewal gives the lease another name.
        leased = (leased_entry(files, name) for name in _listed(files.lease, _by_item(share, parse_lease, 0)))
        yield from (entry for entry in leased if entry is not None)
        return
    plain = {State.DONE: files.done, State.FAILED: files.fail, State.READY: files.queue}.get(state)
    if plain is not None:
        yield from (Entry(state, plain, name, name) for name in _listed(plain, share.has) if name[0] != ".")
    if state in {State.DELAYED, State.READY}:
        waiting = (delayed_entry(files, name, now) for name in _listed(files.delay, _by_item(share, parse_delay, 1)))
        yield from (entry for entry in waiting if entry is not None and entry.state is state)


def _by_item(share: Share, parse: Callable[[str], tuple[str | int, ...] | None], item: int) -> Callable[[str], bool]:
    def has(name: str) -> bool:
        parsed = parse(name)
        return parsed is not None and share.has(str(parsed[item]))

    return has


def _listed(directory: int, wanted: Callable[[str], bool]) -> list[str]:
    """Some names of a directory, sorted: by that order files were made, and their inodes lie, which is half the cost of opening them.

    In one go, for who reads a whole state lists it in every share: in slices it takes five times as long.
    """
    fd = os.open(".", DIRECTORY, dir_fd=directory)
    try:
        return sorted([name for name in os.listdir(fd) if wanted(name)])
    finally:
        os.close(fd)


async def discard(files: QueueDir, found: Sequence[FinishedMessage]) -> list[Entry]:
    """Delete finished messages that are still where and as they were found; what was deleted.

    A requeue renames the file away, and a file of the same name that finished later has another time.

    Raises:
        OSError: one cannot be deleted.
    """
    gone: list[Entry] = []
    for number, one in enumerate(found):
        entry, links = _finished_entry(files, one)
        if entry is not None and delete_entry(files, entry, links):
            gone.append(entry)
        if number % _DELETED == _DELETED - 1:
            await asyncio.sleep(0)
    return gone


def _finished_entry(files: QueueDir, one: FinishedMessage) -> tuple[Entry | None, int]:
    """Its file, and how many links that has; None where it is gone, or another."""
    name = one.location
    directory = {State.DONE: files.done, State.FAILED: files.fail}.get(one.state)
    # It has been in a table that others may write to.
    if directory is None or not name or name[0] == "." or "/" in name or "\0" in name:
        return None, 0
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None, 0
    return (Entry(one.state, directory, name, name) if one.has_finished_at(found.st_mtime) else None), found.st_nlink
