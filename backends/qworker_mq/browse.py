"""Reading the messages of a queue. No code here is called while a worker runs messages."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from qworker.kit.body_slices import OwnDescriptor, leave_unread, read_body
from qworker.kit.browse import Chosen, Place, at_most, browse_rows
from qworker.kit.files import read_file
from qworker.kit.find import find_each
from qworker.kit.max_body import describe_too_large
from qworker.kit.opening import open_entry
from qworker.kit.parts import HashShare, in_pages
from qworker.message import Message, Query, State, StoredMessage
from qworker_mq.layout import is_usable_id, split_name
from qworker_mq.reap import StoreReaper
from qworker_mq.store import OpenQueue, Store
from qworker_mq.window import iterate_names, read_order

__all__ = ["Browser", "Location", "parse_id"]

# Where a file is: its name there, and the directory's descriptor.
Location = tuple[str, int]
# The place of a message in the order of its state (its id is the second part), and its file.
_Row = tuple[Place, Location]


class Browser:
    """Reads the messages of a root.

    Args:
        store: The opened root.
        reaper: Makes due messages ready before they are read.
    """

    def __init__(self, store: Store, reaper: StoreReaper) -> None:
        self._store = store
        self._reaper = reaper

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """List a state, and read the messages of the query."""
        open_queue = self._reaper.require_current(queue)
        found = (
            self._browse_rows(open_queue, query)
            if query.part is None
            else at_most(query.limit, self._browse_share(open_queue, query.state, HashShare.parse(query.part)))
        )
        async for page in found:
            yield page

    async def _browse_rows(self, queue: OpenQueue, query: Query) -> AsyncIterator[list[StoredMessage]]:
        state = query.state

        async def choose(after: Place | None, limit: int | None) -> list[_Row]:
            chosen = Chosen(_place_of_row, after, limit, newest=query.newest)
            locations = await self._locations_by_id(queue, state)
            chosen.add(
                ((self._order(queue, state, where), message_id), where) for message_id, where in locations.items()
            )
            return chosen.rows()

        def read(row: _Row) -> StoredMessage | None:
            return self._read_again(queue, state, _id_of_row(row), row[1])

        # Extending a lease changes its expiry.
        identity = _id_of_row if state is State.LEASED else None
        async for page in browse_rows(query, choose, _place_of_row, read, identity=identity):
            yield page

    async def _browse_share(
        self, queue: OpenQueue, state: State, share: HashShare
    ) -> AsyncIterator[list[StoredMessage]]:
        rows = [row for row in (await self._locations_by_id(queue, state)).items() if share.has(row[0])]
        async for page in in_pages(self._read_again(queue, state, *row) for row in rows):
            yield page

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Read messages from every location that they can have."""
        open_queue = self._reaper.require_current(queue)

        async def find_once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
            for number, message_id in enumerate(wanted):
                locations = self.locations(open_queue, message_id)
                seen = (
                    self._read(open_queue, state, message_id, location, any_size=True) for state, location in locations
                )
                if (stored := next((one for one in seen if one is not None), None)) is not None:
                    yield stored
                if number % 50 == 49:
                    await asyncio.sleep(0)

        return await find_each([str(one) for one in ids if is_usable_id(one)], find_once)

    # -- locations -----------------------------------------------------------------------------------------------------

    def locations(self, queue: OpenQueue, message_id: str) -> list[tuple[State, Location]]:
        """Return the locations that a message can have, each with its state, in the direction of its moves."""
        root = self._store.root
        name = f"{queue.name}:{message_id}"
        locations = [
            (State.READY, (message_id, queue.dirs.ready)),
            (State.LEASED, (name, root.delay)),
            (State.READY, (name, root.new)),
            (State.FAILED, (message_id, queue.dirs.fail)),
        ]
        if queue.due.get(message_id) is not None:
            locations.append((State.DELAYED, (queue.due.file_name(message_id), queue.dirs.due)))
        return locations

    async def list_state(self, queue: OpenQueue, state: State) -> AsyncIterator[Location]:
        """Yield the locations of the messages in a state."""
        if state is State.DELAYED:
            for _, message_id in queue.due.list_all():
                yield queue.due.file_name(message_id), queue.dirs.due
        for directory, is_wanted in self._directories(queue, state):
            async for name in iterate_names(directory):
                if is_wanted(name):
                    yield name, directory

    def _directories(self, queue: OpenQueue, state: State) -> list[tuple[int, Callable[[str], bool]]]:
        """Return the directories whose files are in a state, and which of their names belong to this queue."""
        root = self._store.root

        def belongs(name: str) -> bool:
            parts = split_name(name)
            return parts is not None and parts[0] == queue.name

        if state is State.READY:
            # In the order in which messages move from one to the other.
            return [(root.new, belongs), (queue.dirs.ready, is_usable_id)]
        if state is State.LEASED:
            return [(root.delay, belongs)]
        if state is State.FAILED:
            return [(queue.dirs.fail, is_usable_id)]
        return []

    async def _locations_by_id(self, queue: OpenQueue, state: State) -> dict[str, Location]:
        """List the messages in a state. One that moves from new/ in the meantime is listed twice, and counts once."""
        return {parse_id(queue, location): location async for location in self.list_state(queue, state)}

    def _order(self, queue: OpenQueue, state: State, location: Location) -> float:
        name, directory = location
        if state is State.READY:
            return read_order(parse_id(queue, location), directory)
        if state is State.DELAYED:
            return float(name.partition(".")[0])
        if state is State.LEASED:
            return self._store.lease_states.read(name).expires_at
        return self.failed_at(queue, name)

    # -- reading -------------------------------------------------------------------------------------------------------

    def failed_at(self, queue: OpenQueue, message_id: str) -> float:
        """Return when a message failed, in Unix seconds. 0: it is not known."""
        try:
            name = f"{queue.name}:{message_id}"
            return os.stat(name, dir_fd=self._store.root.reason, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def _read_again(self, queue: OpenQueue, state: State, message_id: str, location: Location) -> StoredMessage | None:
        """Read a message. One that was listed in new/ can be in its queue by now."""
        stored = self._read(queue, state, message_id, location)
        if stored is None and state is State.READY and location[1] == self._store.root.new:
            return self._read(queue, state, message_id, (message_id, queue.dirs.ready))
        return stored

    def _read(
        self, queue: OpenQueue, state: State, message_id: str, location: Location, *, any_size: bool = False
    ) -> StoredMessage | None:
        """Read a message; return None if it is gone.

        Args:
            queue: The queue.
            state: Its state.
            message_id: Its id.
            location: Where it is.
            any_size: Whether to return a message whose body is larger than `max_body`. It has no body then, and an
                error. Callers of `browse` copy bodies elsewhere and remove the messages, so they must not get it.
        """
        most = self._store.options.max_body
        try:
            fd = open_entry(location[0], os.O_RDONLY, location[1])
        except FileNotFoundError:
            return None
        except OSError:
            # A link or a socket that was moved to the failed messages: it is listed, but not read.
            return self._make_stored(queue, state, message_id, location, b"", 0.0)
        try:
            found = os.fstat(fd)
            is_file = stat.S_ISREG(found.st_mode)
            is_too_large = is_file and most is not None and found.st_size > most
            if is_too_large and not any_size:
                return None
            body = read_body(fd, found.st_size) if is_file and not is_too_large else b""
        finally:
            os.close(fd)
        stored = self._make_stored(queue, state, message_id, location, body, found.st_mtime)
        if is_too_large:
            return msgspec.structs.replace(stored, error=describe_too_large(found.st_size, most or 0))
        return stored

    def _make_stored(
        self,
        queue: OpenQueue,
        state: State,
        message_id: str,
        location: Location,
        body: bytes | OwnDescriptor,
        enqueued_at: float,
    ) -> StoredMessage:
        lease_state = self._store.lease_states.read(f"{queue.name}:{message_id}")
        failed = state is State.FAILED
        stored = StoredMessage(
            message=Message(
                id=message_id,
                queue=queue.name,
                body=body if isinstance(body, bytes) else b"",
                tries=lease_state.tries,
                enqueued_at=enqueued_at,
                original_id=lease_state.origin or None,
            ),
            state=state,
            due_at=int(location[0].partition(".")[0]) / 1000 if state is State.DELAYED else None,
            expires_at=lease_state.expires_at or None if state is State.LEASED else None,
            finished_at=self.failed_at(queue, message_id) if failed else None,
            holder=lease_state.holder or None if state is State.LEASED else None,
            error=self._read_reason(queue, message_id) if failed else lease_state.error or None,
        )
        return leave_unread(stored, body)

    def _read_reason(self, queue: OpenQueue, message_id: str) -> str | None:
        reason = read_file(f"{queue.name}:{message_id}", self._store.root.reason)
        return None if reason is None else reason.decode(errors="replace")


def parse_id(queue: OpenQueue, location: Location) -> str:
    """Return the id in a file's name. Each kind of directory writes it in a different way."""
    name, directory = location
    if directory == queue.dirs.due:
        return name.partition(".")[2]
    if directory in {queue.dirs.ready, queue.dirs.fail}:
        return name
    return name.partition(":")[2]


def _place_of_row(row: _Row) -> Place:
    return row[0]


def _id_of_row(row: _Row) -> str:
    return row[0][1]
