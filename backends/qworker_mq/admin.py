"""Looking at an mq root and changing it by hand: nothing here is on a worker's path."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

from qworker.kit.browse import Chosen, Place, at_most, browse_rows
from qworker.kit.files import read_all
from qworker.kit.find import find_each
from qworker.kit.parts import HashShare, in_pages
from qworker.message import FinishedMessage, Message, Query, QueueStats, Selection, State, StoredMessage
from qworker.names import check_queue, is_queue_name
from qworker_mq.layout import split_name, usable_id
from qworker_mq.mover import Mover, Trash
from qworker_mq.store import Held, Store
from qworker_mq.window import listing, order_of

__all__ = ["Admin"]

# Where a file is: its name there, and the directory's descriptor.
_Place = tuple[str, int]
# Where a message stands in the order of its state (its id is the second), and where its file is.
_Row = tuple[Place, _Place]


class Admin:
    """The administrating half of `MqBackend`; see `Backend` for what each method promises.

    Args:
        store: the opened root.
        mover: makes due messages ready before they are counted.
        trash: unlinks what is removed.
    """

    def __init__(self, store: Store, mover: Mover, trash: Trash) -> None:
        self._store = store
        self._mover = mover
        self._trash = trash

    async def queues(self) -> list[str]:
        """The directories in queues/."""
        root = self._store.root.queues
        names = [name async for name in listing(root) if is_queue_name(name)]
        return sorted(name for name in names if stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode))

    async def delete(self, queue: str) -> None:
        """Remove a queue's directories, then its messages elsewhere."""
        store = self._store
        root = store.root
        store.forget(check_queue(queue))
        for parent in (root.queues, root.due, root.fail):
            gone = f"deleted-{queue}-{secrets.token_hex(6)}"
            # One rename, so that nobody sees half a queue.
            try:
                os.rename(queue, gone, src_dir_fd=parent, dst_dir_fd=root.tmp)
            except FileNotFoundError:
                continue
            await asyncio.to_thread(shutil.rmtree, gone, dir_fd=root.tmp)
        for directory in (root.new, root.delay, root.lease, root.reason):
            async for name in listing(directory):
                if name.startswith(f"{queue}:"):
                    _unlinked(name, directory)
        _unlinked(queue, root.down)
        await store.sync_directories(root.queues, root.new, root.delay)

    async def stats(self, queue: str) -> QueueStats:
        """Count the directories."""
        held = self._fresh(queue)
        ready = [place async for place in self._in_state(held, State.READY)]
        oldest: float | None = None
        if ready:
            first = min(ready, key=lambda place: order_of(_id_of(held, place), place[1]))
            try:
                oldest = os.stat(first[0], dir_fd=first[1], follow_symlinks=False).st_mtime
            except FileNotFoundError:
                oldest = None
        return QueueStats(
            queue=queue,
            ready=len(ready),
            leased=len([place async for place in self._in_state(held, State.LEASED)]),
            delayed=len(held.due.all()),
            failed=len([place async for place in self._in_state(held, State.FAILED)]),
            oldest_age_s=None if oldest is None else max(0.0, self._store.clock.time() - oldest),
            paused=self._store.is_down(queue),
        )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """List a state, and read what is wanted of it."""
        held = self._fresh(queue)
        found = (
            self._browse_rows(held, query)
            if query.part is None
            else at_most(query.limit, self._browse_share(held, query.state, HashShare.parse(query.part)))
        )
        async for page in found:
            yield page

    async def _browse_rows(self, held: Held, query: Query) -> AsyncIterator[list[StoredMessage]]:
        state = query.state

        async def choose(after: Place | None, limit: int | None) -> list[_Row]:
            chosen = Chosen(_place_of, after, limit, newest=query.newest)
            rows = await self._rows(held, state)
            chosen.add(((self._order(held, state, place), message_id), place) for message_id, place in rows.items())
            return chosen.rows()

        def read(row: _Row) -> StoredMessage | None:
            return self._look_again(held, state, _id_of_row(row), row[1])

        # Extending a lease changes its expiry.
        identity = _id_of_row if state is State.LEASED else None
        async for page in browse_rows(query, choose, _place_of, read, identity=identity):
            yield page

    async def _browse_share(self, held: Held, state: State, share: HashShare) -> AsyncIterator[list[StoredMessage]]:
        rows = [row for row in (await self._rows(held, state)).items() if share.has(row[0])]
        async for page in in_pages(self._look_again(held, state, *row) for row in rows):
            yield page

    async def _rows(self, held: Held, state: State) -> dict[str, _Place]:
        """The messages in a state by their ids; one that moves from new/ meanwhile is listed twice, and taken once."""
        return {_id_of(held, place): place async for place in self._in_state(held, state)}

    def _look_again(self, held: Held, state: State, message_id: str, place: _Place) -> StoredMessage | None:
        stored = self._look(held, state, message_id, place)
        if stored is None and state is State.READY and place[1] == self._store.root.new:
            return self._look(held, state, message_id, (message_id, held.dirs.ready))
        return stored

    def check(self, queue: str) -> None:
        """See that there is such a queue."""
        self._store.found(queue)

    def _order(self, held: Held, state: State, place: _Place) -> float:
        name = place[0]
        if state is State.READY:
            return order_of(_id_of(held, place), place[1])
        if state is State.DELAYED:
            return float(name.partition(".")[0])
        if state is State.LEASED:
            return self._store.records.read(name).expires_at
        return self._failed_at(f"{held.name}:{name}")

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look in every place that messages can be in."""
        held = self._fresh(queue)

        async def once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
            for number, message_id in enumerate(wanted):
                places = self._places(held, message_id)
                seen = (self._look(held, state, message_id, place) for state, place in places)
                if (stored := next((one for one in seen if one is not None), None)) is not None:
                    yield stored
                if number % 50 == 49:
                    await asyncio.sleep(0)

        return await find_each([one for one in ids if usable_id(one)], once)

    def _places(self, held: Held, message_id: str) -> list[tuple[State, _Place]]:
        root = self._store.root
        name = f"{held.name}:{message_id}"
        places = [
            (State.READY, (message_id, held.dirs.ready)),
            (State.LEASED, (name, root.delay)),
            (State.READY, (name, root.new)),
            (State.FAILED, (message_id, held.dirs.fail)),
        ]
        if held.due.get(message_id) is not None:
            places.append((State.DELAYED, (held.due.file_name(message_id), held.dirs.due)))
        return places

    def _look(self, held: Held, state: State, message_id: str, place: _Place) -> StoredMessage | None:
        try:
            fd = os.open(place[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place[1])
        except FileNotFoundError:
            return None
        except OSError:
            # A link or socket that was set aside: listed, and not read.
            return self._described(held, state, message_id, place, b"", 0.0)
        try:
            found = os.fstat(fd)
            body = read_all(fd, found.st_size) if stat.S_ISREG(found.st_mode) else b""
        finally:
            os.close(fd)
        return self._described(held, state, message_id, place, body, found.st_mtime)

    def _described(
        self, held: Held, state: State, message_id: str, place: _Place, body: bytes, enqueued_at: float
    ) -> StoredMessage:
        name = f"{held.name}:{message_id}"
        record = self._store.records.read(name)
        failed = state is State.FAILED
        return StoredMessage(
            message=Message(
                id=message_id,
                queue=held.name,
                body=body,
                tries=record.tries,
                enqueued_at=enqueued_at,
                original_id=record.origin or None,
            ),
            state=state,
            due_at=int(place[0].partition(".")[0]) / 1000 if state is State.DELAYED else None,
            expires_at=record.expires_at or None if state is State.LEASED else None,
            finished_at=self._failed_at(name) if failed else None,
            holder=record.holder or None if state is State.LEASED else None,
            error=self._reason(name) if failed else record.error or None,
        )

    def _reason(self, name: str) -> str | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._store.root.reason)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read().decode(errors="replace")

    def _failed_at(self, name: str) -> float:
        try:
            return os.stat(name, dir_fd=self._store.root.reason, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Bring failed messages back."""
        held = self._fresh(queue)
        failed = [place[0] async for place in self._in_state(held, State.FAILED)]
        if selection.unchanged is not None:
            there = frozenset(failed)
            chosen = (message_id for message_id in self._unchanged(held, selection.unchanged) if message_id in there)
        else:
            wanted = frozenset(failed if selection.ids is None else selection.ids)
            chosen = (message_id for message_id in failed if message_id in wanted)
        count = sum([self._requeue_one(held, message_id) for message_id in chosen])
        if count:
            await self._store.sync_directories(held.dirs.ready, held.dirs.fail)
            self._store.wake(queue)
        return count

    def _requeue_one(self, held: Held, message_id: str) -> bool:
        name = f"{held.name}:{message_id}"
        self._store.records.forget(name)
        if not _renamed(message_id, held.dirs.fail, message_id, held.dirs.ready):
            return False
        _unlinked(name, self._store.root.reason)
        held.window.add(message_id)
        return True

    def _unchanged(self, held: Held, found: Iterable[FinishedMessage]) -> Iterator[str]:
        """The ids of failed messages that are as they were found; each is checked when it is asked for."""
        for one in found:
            if (
                one.state is State.FAILED
                and usable_id(one.id)
                and one.has_finished_at(self._failed_at(f"{held.name}:{one.id}"))
            ):
                yield one.id

    async def remove(self, queue: str, selection: Selection) -> int:
        """Move messages to remove/."""
        held = self._store.found(queue)
        if selection.state is not None:
            held = self._fresh(queue)
            places = [place async for place in self._in_state(held, selection.state)]
            sources = {_id_of(held, place): self._remove_from(held, _id_of(held, place), place) for place in places}
        elif selection.unchanged is not None:
            # From fail/ alone, where no requeued one is.
            chosen = self._unchanged(held, selection.unchanged)
            sources = {one: self._remove_from(held, one, (one, held.dirs.fail)) for one in chosen}
        else:
            sources = {one: self._remove_one(held, one) for one in dict.fromkeys(selection.ids or ())}
        removed = {message_id: source for message_id, source in sources.items() if source is not None}
        await self._finish(held, removed)
        return len(removed)

    def _remove_one(self, held: Held, message_id: str) -> int | None:
        """The directory that a message was removed from; None when it is nowhere."""
        if not usable_id(message_id):
            return None
        # A mover can slip past one pass.
        for _ in range(2):
            for _, place in self._places(held, message_id):
                if (source := self._remove_from(held, message_id, place)) is not None:
                    return source
        return None

    def _remove_from(self, held: Held, message_id: str, place: _Place) -> int | None:
        """The directory of `place`; None when the message is not there."""
        name = f"{held.name}:{message_id}"
        if not _renamed(place[0], place[1], name, self._store.root.remove):
            return None
        if place[1] == held.dirs.due:
            held.due.forget(message_id)
        self._store.records.forget(name)
        if place[1] == held.dirs.fail:
            _unlinked(name, self._store.root.reason)
        return place[1]

    async def _finish(self, held: Held, removed: Mapping[str, int]) -> None:
        """Sync and unlink what was moved to remove/ from the directories given."""
        if removed:
            await self._store.sync_directories(self._store.root.remove, *set(removed.values()))
            self._trash.unlink([f"{held.name}:{message_id}" for message_id in removed])

    async def pause(self, queue: str) -> None:
        """Put the mark down."""
        self._store.found(queue)
        fd = os.open(
            queue, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._store.root.down
        )
        os.close(fd)

    async def resume(self, queue: str) -> None:
        """Take the mark away."""
        self._store.found(queue)
        _unlinked(queue, self._store.root.down)
        self._store.wake(queue)

    def _fresh(self, queue: str) -> Held:
        held = self._store.found(queue)
        self._mover.sweep_new()
        self._mover.promote(held)
        return held

    async def _in_state(self, held: Held, state: State) -> AsyncIterator[_Place]:
        if state is State.DELAYED:
            for _, message_id in held.due.all():
                yield held.due.file_name(message_id), held.dirs.due
        for directory, wanted in self._directories(held, state):
            async for name in listing(directory):
                if wanted(name):
                    yield name, directory

    def _directories(self, held: Held, state: State) -> list[tuple[int, Callable[[str], bool]]]:
        """The directories whose files are in a state, and which of their names are this queue's."""
        root = self._store.root

        def belongs(name: str) -> bool:
            parts = split_name(name)
            return parts is not None and parts[0] == held.name

        if state is State.READY:
            # In the order in which they go from one to the other.
            return [(root.new, belongs), (held.dirs.ready, usable_id)]
        if state is State.LEASED:
            return [(root.delay, belongs)]
        if state is State.FAILED:
            return [(held.dirs.fail, usable_id)]
        return []


def _id_of(held: Held, place: _Place) -> str:
    """The id in a file's name, which each kind of directory writes otherwise."""
    name, directory = place
    if directory == held.dirs.due:
        return name.partition(".")[2]
    if directory in {held.dirs.ready, held.dirs.fail}:
        return name
    return name.partition(":")[2]


def _place_of(row: _Row) -> Place:
    return row[0]


def _id_of_row(row: _Row) -> str:
    return row[0][1]


def _renamed(name: str, source: int, target: str, destination: int) -> bool:
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except FileNotFoundError:
        return False
    return True


def _unlinked(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True
