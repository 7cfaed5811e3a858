"""Reading a whole state in shares of its names."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator

from qworker.kit.browse import browse_share
from qworker.kit.files import DIRECTORY
from qworker.kit.parts import Share
from qworker.message import State, StoredMessage
from qworker_file.browse import Entry, delayed_entry, entry_id, leased_entry, look
from qworker_file.layout import QueueDir
from qworker_file.names import parse_delay, parse_lease

__all__ = ["read_share"]


async def read_share(
    files: QueueDir, state: State, share: Share, now: float, *, local: bool
) -> AsyncIterator[list[StoredMessage]]:
    """What is in a state and in a share, in pages; only the share's own names are held.

    Raises:
        OSError: the state cannot be listed, or a file cannot be read.
    """

    async def listed() -> list[Entry]:
        return list(_entries(files, state, share, now))

    # A lease that is extended meanwhile is found under its new name.
    identity = entry_id if state is State.LEASED else None
    async for page in browse_share(listed, lambda entry: look(files, entry, local=local), identity=identity):
        yield page


def _entries(files: QueueDir, state: State, share: Share, now: float) -> Iterator[Entry]:
    if state is State.LEASED:
        # By the item alone: an extension gives the lease another name.
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
