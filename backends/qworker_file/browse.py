"""Reading the messages of a queue of `file:`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from itertools import chain

from qworker.backend.offers import COUNTED, QueueCount, QueueGlance
from qworker.clock import Clock
from qworker.failure_text import cancelled_text
from qworker.kit.directory.browser import MessageFile, QueueBrowser
from qworker.kit.directory.tally import Tally
from qworker.kit.files import has_at_most, has_entry, name_slices
from qworker.kit.opening import open_directory
from qworker.kit.parts import HashShare
from qworker.message import Message, MessageRef, State
from qworker_file.count import DetailedTally, TooManyMessages, version_of
from qworker_file.foreign import read_arguments
from qworker_file.id_place import Place, locate
from qworker_file.layout import QueueDir
from qworker_file.loads import StagedFile, is_load, staged_files
from qworker_file.names import (
    is_cancelled_name,
    is_generated_id,
    may_lack_link,
    parse_delay,
    parse_id,
    parse_item,
    parse_lease,
    plain_item,
    ready_names,
    reason_name,
)
from qworker_file.open_queue import OpenQueue
from qworker_file.unique_keys import key_of

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
                async for waiting in self._waiting():
                    yield [file for file in waiting if file.state is state]
            if state is State.READY:
                # Before queue/: a mover renames files from here to there.
                async for staged in self._staged():
                    yield [MessageFile(state, files.base, file.path, file.item) for file in staged]
            directory = self._directory(state)
            if directory is not None:
                async for names in name_slices(directory):
                    yield [self._plain(state, directory, name) for name in names if name[0] != "."]

    async def count_details(self, retention: Mapping[str, str], most: int | None) -> QueueCount | None:
        """Count every state and the tasks; None if the queue has more than `most` messages.

        Raises:
            OSError: It cannot be listed.
        """
        version = version_of(".", self.files.base)
        tally = DetailedTally(most)
        try:
            await self._list_into(tally)
        except TooManyMessages:
            return None
        return QueueCount(
            stats=await self._stats(tally, retention),
            exact=version == version_of(".", self.files.base),
            version=version,
            next_due=tally.next_due,
            tasks=dict(tally.tasks.most_common()),
            first=[self._id_of(item) for item in tally.first],
            last=[self._id_of(item) for item in tally.last],
        )

    async def _tally(self) -> Tally:
        """Count the names of every directory without making an object of each."""
        tally = Tally()
        await self._list_into(tally)
        return tally

    async def _list_into(self, tally: Tally) -> None:
        """List the directories in the order in which messages pass through them."""
        async for waiting in self._waiting():
            for state in (State.READY, State.DELAYED):
                tally.add(state, [file.item for file in waiting if file.state is state])
            tally.add_due([file.at for file in waiting if file.state is State.DELAYED])
        async for staged in self._staged():
            tally.add(State.READY, [file.item for file in staged])
        files = self.files
        async for names in name_slices(files.queue):
            tally.add(State.READY, [name for name in names if name[0] != "."])
        async for names in name_slices(files.lease):
            tally.add(State.LEASED, [name for name in names if parse_lease(name) is not None])
        for state, directory in ((State.FAILED, files.fail), (State.DONE, files.done)):
            async for names in name_slices(directory):
                tally.add(state, [name for name in names if name[0] != "."])

    def _staged(self) -> AsyncIterator[list[StagedFile]]:
        """List the staged files of sealed loads. A load that cannot be read is recorded, and hides no other message."""
        return staged_files(self.files.base, local_time=self._local_time, on_trouble=self.queue.loads.report)

    def _directory(self, state: State) -> int | None:
        """Return the directory in which the names of a state are items."""
        files = self.files
        return {State.READY: files.queue, State.FAILED: files.fail, State.DONE: files.done}.get(state)

    @staticmethod
    def _plain(state: State, directory: int, name: str) -> MessageFile:
        """Return a file of queue/, fail/ or done/."""
        return MessageFile(state, directory, name, plain_item(name) if state is State.FAILED else name)

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
            found = [self._plain(state, directory, name) for name in names if name[0] != "."]
        if state in {State.DELAYED, State.READY}:
            now = self._clock.time()
            names = _list_sorted(files.delay, _by_item(share, parse_delay, 1))
            waiting = [file for name in names if (file := self._delayed(name, now)) is not None]
            found += [file for file in waiting if file.state is state]
        if state is State.READY:
            async for staged in self._staged():
                found += [
                    MessageFile(state, files.base, file.path, file.item) for file in staged if share.has(file.item)
                ]
        return found

    async def matching(self, ids: frozenset[str], *states: State) -> AsyncIterator[MessageFile]:
        """Yield the files of some ids. Only an id that may have no link is looked for by listing."""
        refs = {one: one.task for one in ids if isinstance(one, MessageRef) and one.task is not None}
        listed = frozenset(one for one in ids if may_lack_link(one) and not (one in refs and is_generated_id(one)))
        places = (await locate(self.files, ids - listed)).places
        for place in places.values():
            file = self._file_at(place)
            if file is not None and (not states or file.state in states):
                yield file
        # An id of this form can also be one that its publisher chose, and then has a link.
        left: dict[str, str] = {one: task for one, task in refs.items() if one not in places and may_lack_link(one)}
        left = {one: task for one, task in left.items() if one not in listed}
        if left:
            async for file in self._matching_refs(left, states or tuple(State)):
                yield file
        if listed:
            async for file in self._matching_listed(listed, states):
                yield file

    async def _matching_refs(self, refs: Mapping[str, str], states: Collection[State]) -> AsyncIterator[MessageFile]:
        """Yield the files of generated ids whose tasks are known, without listing queue/.

        There a message with such an id can only have the names under which it is published, because retries wait in
        delay/.
        """
        if State.READY in states:
            for message_id, task in refs.items():
                if (file := self._ready_file(message_id, (task,))) is not None:
                    yield file
        for state in (State.LEASED, State.DELAYED, State.FAILED, State.DONE):
            async for found in self._waiting() if state is State.DELAYED else self.slices(state):
                for file in found:
                    if file.state in states and self.message_id(file) in refs:
                        yield file

    async def _matching_listed(self, ids: frozenset[str], states: tuple[State, ...]) -> AsyncIterator[MessageFile]:
        """Yield the files of generated ids whose tasks are not known: those under likely names, and then by listing."""
        perhaps = {one: one.perhaps for one in ids if isinstance(one, MessageRef) and one.perhaps}
        if State.READY in (states or State):
            for message_id, tasks in perhaps.items():
                if (file := self._ready_file(message_id, tasks)) is not None:
                    yield file
        # What has none of the names is hardly ready, and that list is long. A search that misses a message which moves
        # against this order is repeated.
        order = sorted(states or State, key=lambda state: state is State.READY) if perhaps else states
        async for file in super().matching(ids, *order):
            yield file

    def _ready_file(self, message_id: str, tasks: Iterable[str]) -> MessageFile | None:
        """Return the file in queue/ of a message of one of some tasks whose id qworker created, without a listing."""
        for name in chain.from_iterable(ready_names(message_id, task) for task in tasks):
            if has_entry(name, self.files.queue):
                return MessageFile(State.READY, self.files.queue, name, name)
        return None

    async def _waiting(self) -> AsyncIterator[list[MessageFile]]:
        """List delay/, in slices. What is due is ready."""
        now = self._clock.time()
        async for names in name_slices(self.files.delay):
            yield [file for name in names if (file := self._delayed(name, now)) is not None]

    def _file_at(self, place: Place) -> MessageFile | None:
        """Return the file of a message at its place; None in tmp/, where it is not stored yet."""
        if place.directory == "lease":
            return self._leased(place.name)
        if place.directory == "delay":
            return self._delayed(place.name, self._clock.time())
        state = {"queue": State.READY, "fail": State.FAILED, "done": State.DONE}.get(place.directory)
        return None if state is None else self._plain(state, place.descriptor(self.files), place.name)

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
        return self._id_of(plain_item(file.item) if file.state is State.FAILED else file.item)

    @staticmethod
    def _id_of(item: str) -> str:
        return parse_id(item) or "x-" + hashlib.sha256(os.fsencode(item)).hexdigest()[:40]

    def finished_at(self, status: os.stat_result) -> float:
        """Return the modification time, which the settlement sets."""
        return status.st_mtime

    def reason_name(self, item: str) -> str:
        """Return the name of a hidden file in fail/."""
        return reason_name(item)

    def _read_error(self, file: MessageFile) -> str | None:
        error = super()._read_error(file)
        return cancelled_text("") if error is None and is_cancelled_name(file.name) else error

    def _enqueued_at(self, item: str) -> float | None:
        parsed = parse_item(item, local=self._local_time)
        return None if parsed is None else parsed.enqueued_at

    def _make_message(self, file: MessageFile, status: os.stat_result, body: bytes, original_id: str | None) -> Message:
        parsed = parse_item(file.item, local=self._local_time)
        key, unique = key_of(self.files, file.item)
        return Message(
            id=self.message_id(file) if parsed is None else parsed.id,
            queue=self.files.name,
            body=body,
            tries=0 if parsed is None else parsed.tries,
            deaths=0 if parsed is None else parsed.deaths,
            enqueued_at=status.st_mtime if parsed is None or parsed.enqueued_at is None else parsed.enqueued_at,
            unique_key=key,
            unique=unique,
            priority=0 if parsed is None else parsed.priority,
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
