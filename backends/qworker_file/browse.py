"""Reading the messages of a queue of `file:`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping

from qworker.backend.offers import COUNTED, QueueGlance
from qworker.clock import Clock
from qworker.kit.directory.browser import MessageFile, QueueBrowser
from qworker.kit.files import has_at_most, name_slices
from qworker.kit.opening import open_directory
from qworker.kit.parts import HashShare
from qworker.message import Message, State
from qworker_file.foreign import read_arguments
from qworker_file.id_place import Place, locate
from qworker_file.layout import QueueDir
from qworker_file.loads import is_load, staged_files
from qworker_file.names import may_lack_link, parse_delay, parse_id, parse_item, parse_lease, reason_name
from qworker_file.open_queue import OpenQueue

__all__ = ["FileBrowser"]


class FileBrowser(QueueBrowser[QueueDir]):
    """Reads one queue.

    Args:
        queue: The queue.
        clock: The store's clock.
        local_time: Whether timestamps are in local time.
    """

    def __init__(self, queue: OpenQueue, clock: Clock, *, local_time: bool) -> None:
        super().__init__(queue.files, clock)
        self.queue = queue
        self._local_time = local_time

    async def slices(self, *states: State) -> AsyncIterator[list[MessageFile]]:
        """List the directories of the states, in slices."""
        files = self.files
        for state in states:
            if state is State.LEASED:
                async for names in name_slices(files.lease):
                    yield [file for name in names if (file := self._leased(name)) is not None]
                continue
            if state in {State.READY, State.DELAYED}:
                now = self._clock.time()
                async for names in name_slices(files.delay):
                    waiting = [file for name in names if (file := self._delayed(name, now)) is not None]
                    yield [file for file in waiting if file.state is state]
            if state is State.READY:
                # Before queue/: a mover renames files from here to there.
                async for staged in staged_files(files.base, local_time=self._local_time):
                    yield [MessageFile(state, files.base, file.path, file.item) for file in staged]
            directory = self._directory(state)
            if directory is not None:
                async for names in name_slices(directory):
                    yield [MessageFile(state, directory, name, name) for name in names if name[0] != "."]

    def _directory(self, state: State) -> int | None:
        """Return the directory in which the names of a state are items."""
        files = self.files
        return {State.READY: files.queue, State.FAILED: files.fail, State.DONE: files.done}.get(state)

    def _leased(self, name: str) -> MessageFile | None:
        """Return a file of lease/ by its name, or None if it is not a lease."""
        parsed = parse_lease(name)
        if parsed is None:
            return None
        return MessageFile(State.LEASED, self.files.lease, name, parsed[0], parsed[1] / 1000, parsed[2])

    def _delayed(self, name: str, now: float) -> MessageFile | None:
        """Return a file of delay/ by its name, ready if it is due, or None if it has no due time."""
        parsed = parse_delay(name)
        if parsed is None:
            return None
        due = parsed[0] / 1000
        return MessageFile(State.READY if due <= now else State.DELAYED, self.files.delay, name, parsed[1], due)

    async def list_share(self, state: State, share: HashShare) -> list[MessageFile]:
        """List only the share's own names."""
        files = self.files
        if state is State.LEASED:
            # The share depends on the item alone, because an extension gives the lease another name.
            names = _list_sorted(files.lease, _by_item(share, parse_lease, 0))
            return [file for name in names if (file := self._leased(name)) is not None]
        found: list[MessageFile] = []
        directory = self._directory(state)
        if directory is not None:
            names = _list_sorted(directory, share.has)
            found = [MessageFile(state, directory, name, name) for name in names if name[0] != "."]
        if state in {State.DELAYED, State.READY}:
            now = self._clock.time()
            names = _list_sorted(files.delay, _by_item(share, parse_delay, 1))
            waiting = [file for name in names if (file := self._delayed(name, now)) is not None]
            found += [file for file in waiting if file.state is state]
        if state is State.READY:
            async for staged in staged_files(files.base, local_time=self._local_time):
                found += [
                    MessageFile(state, files.base, file.path, file.item) for file in staged if share.has(file.item)
                ]
        return found

    async def matching(self, ids: frozenset[str], *states: State) -> AsyncIterator[MessageFile]:
        """Yield the files of some ids. Only an id that may have no link is looked for by listing."""
        unlinked = frozenset(filter(may_lack_link, ids))
        for place in (await locate(self.files, ids - unlinked)).places.values():
            file = self._file_at(place)
            if file is not None and (not states or file.state in states):
                yield file
        if unlinked:
            async for file in super().matching(unlinked, *states):
                yield file

    def _file_at(self, place: Place) -> MessageFile | None:
        """Return the file of a message at its place; None in tmp/, where it is not stored yet."""
        if place.directory == "lease":
            return self._leased(place.name)
        if place.directory == "delay":
            return self._delayed(place.name, self._clock.time())
        state = {"queue": State.READY, "fail": State.FAILED, "done": State.DONE}.get(place.directory)
        return None if state is None else MessageFile(state, place.descriptor(self.files), place.name, place.name)

    def glance(self, retention: Mapping[str, str]) -> QueueGlance:
        """Glance at the queue without listing it. Ready messages are in queue/ and in loads, and due ones in delay/."""
        files = self.files
        has_loads = any(map(is_load, os.listdir(files.base)))
        return QueueGlance(
            is_paused=files.is_down,
            has_leases=not has_at_most(files.lease, 0),
            is_short=not has_loads and all(has_at_most(one, COUNTED) for one in (files.queue, files.delay)),
            retention=retention,
        )

    def message_id(self, file: MessageFile) -> str:
        """Read the id in the name.

        A file of another program, which does not have an item's name yet, gets a digest of it.
        """
        return parse_id(file.item) or "x-" + hashlib.sha256(os.fsencode(file.item)).hexdigest()[:40]

    def finished_at(self, status: os.stat_result) -> float:
        """Return the modification time, which the settlement sets."""
        return status.st_mtime

    def reason_name(self, item: str) -> str:
        """Return the name of a hidden file in fail/."""
        return reason_name(item)

    def _enqueued_at(self, item: str) -> float | None:
        parsed = parse_item(item, local=self._local_time)
        return None if parsed is None else parsed.enqueued_at

    def _make_message(self, file: MessageFile, status: os.stat_result, body: bytes, original_id: str | None) -> Message:
        parsed = parse_item(file.item, local=self._local_time)
        return Message(
            id=self.message_id(file) if parsed is None else parsed.id,
            queue=self.files.name,
            body=body,
            tries=0 if parsed is None else parsed.tries,
            deaths=0 if parsed is None else parsed.deaths,
            enqueued_at=status.st_mtime if parsed is None or parsed.enqueued_at is None else parsed.enqueued_at,
            argv=(file.item,) if parsed is None else read_arguments(self.files, parsed),
        )


def _by_item(
    share: HashShare, parse: Callable[[str], tuple[str | int, ...] | None], item: int
) -> Callable[[str], bool]:
    def has(name: str) -> bool:
        parsed = parse(name)
        return parsed is not None and share.has(str(parsed[item]))

    return has


def _list_sorted(directory: int, is_wanted: Callable[[str], bool]) -> list[str]:
    """List some names of a directory, sorted.

    Files were created in that order, and their inodes have the same order, which halves the cost of opening them. All
    names are read at once, because a program that reads a complete state lists it in every share. In slices it takes
    five times as long.
    """
    fd = open_directory(".", directory)
    try:
        return sorted([name for name in os.listdir(fd) if is_wanted(name)])
    finally:
        os.close(fd)
