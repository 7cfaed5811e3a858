"""Queues as administrators see them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from qworker.kit.browse import Chosen, Place, at_most, browse_rows, browse_share
from qworker.kit.files import hide_directory, store_errors
from qworker.kit.find import find_each, stamp
from qworker.kit.parts import Share, shares
from qworker.message import Query, QueueStats, Selection, State, StoredMessage
from qworker.names import check_queue, is_queue_name
from qworker_vsqs import browse as contents
from qworker_vsqs.browse import Row
from qworker_vsqs.names import Unit, parse
from qworker_vsqs.queue_dir import Folder
from qworker_vsqs.store import VsqsFolders

__all__ = ["VsqsAdministration"]


class VsqsAdministration(VsqsFolders):
    """The part of the backend that makes, deletes, counts and looks."""

    async def queues(self) -> list[str]:
        """The directories that can be queues."""
        if not self._open(make=False):
            return []
        with store_errors(f"list {self._path}"):
            return sorted(name for name in os.listdir(self._root) if is_queue_name(name) and self._is_queue(name))

    async def create(self, queue: str) -> None:
        """Make a directory."""
        await self._found(queue, make=True)

    async def delete(self, queue: str) -> None:
        """Remove a directory with all that is in it."""
        check_queue(queue)
        if not self._open(make=False):
            return
        folder = self._folders.pop(queue, None)
        if folder is not None:
            folder.close()
        if not self._is_queue(queue):
            return
        with store_errors(f"delete the queue {queue}"):
            hidden = hide_directory(queue, self._root)
            if hidden is not None:
                await asyncio.to_thread(shutil.rmtree, f"{self._path}/{hidden}")

    async def _look(self, folder: Folder) -> dict[State, list[Row]]:
        return await contents.look(folder, self._unit.ticks(self._clock.time()))

    async def _unlink(self, folder: Folder, rows: Iterable[tuple[State, Row]]) -> int:
        count = contents.unlink(folder, rows)
        if count:
            await self._sync(folder, [])
        return count

    async def stats(self, queue: str) -> QueueStats:
        """Count by listing."""
        folder = await self._existing(queue)
        with store_errors(f"count {queue}"):
            found = await self._look(folder)
        ready = found[State.READY]
        oldest = min((note.enqueued_at or Unit.enqueued_at(number) for number, _, note in ready), default=None)
        return QueueStats(
            queue=queue,
            ready=len(ready),
            leased=len(found[State.LEASED]),
            delayed=len(found[State.DELAYED]),
            failed=len(found[State.FAILED]),
            oldest_age_s=None if oldest is None else max(0.0, self._clock.time() - oldest),
            paused=self._paused(folder),
            retention=self.history.retention,
        )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages."""
        folder = await self._existing(queue)
        with store_errors(f"browse {queue}"):
            found = (
                self._browse_rows(folder, query)
                if query.part is None
                else at_most(query.limit, self._browse_share(folder, query.state, Share.parse(query.part)))
            )
            async for page in found:
                yield page

    async def _browse_rows(self, folder: Folder, query: Query) -> AsyncIterator[list[StoredMessage]]:
        async def choose(after: Place | None, limit: int | None) -> list[Row]:
            chosen = Chosen(place, after, limit, newest=query.newest)
            chosen.add((await self._look(folder))[query.state])
            return chosen.rows()

        def place(row: Row) -> Place:
            return contents.place(query.state, row)

        # Extending a lease gives it another name.
        identity = contents.id_of if query.state is State.LEASED else None
        async for page in browse_rows(query, choose, place, self._reader(folder, query.state), identity=identity):
            yield page

    async def _browse_share(self, folder: Folder, state: State, share: Share) -> AsyncIterator[list[StoredMessage]]:
        async def listed() -> list[Row]:
            return [row for row in (await self._look(folder))[state] if share.has(contents.id_of(row))]

        # Extending a lease gives it another name.
        identity = contents.id_of if state is State.LEASED else None
        async for page in browse_share(listed, self._reader(folder, state), identity=identity):
            yield page

    def _reader(self, folder: Folder, state: State) -> Callable[[Row], StoredMessage | None]:
        return lambda row: contents.stored(folder, self._unit, state, row)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        folder = await self._existing(queue)
        usable = [one for one in ids if (parsed := parse(one)) is not None and parsed[1] is None]

        async def once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
            now = self._unit.ticks(self._clock.time())
            for state, rows in (await contents.look(folder, now, {int(one) for one in wanted})).items():
                for row in rows:
                    if (stored := contents.stored(folder, self._unit, state, row)) is not None:
                        yield stored

        with store_errors(f"read {queue}"):
            return await find_each(usable, once, lambda: stamp((folder.fd, folder.fail)))

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Shares of the ids."""
        await self._existing(queue)
        return shares(count)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        folder = await self._existing(queue)
        with store_errors(f"requeue in {queue}"):
            failed = await self._selected(folder, selection, State.FAILED)
            async with folder.locked():
                files = contents.requeue(folder, failed)
            count = len(files)
            if count:
                await self._sync(folder, files)
        self._wake()
        return count

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        folder = await self._existing(queue)
        with store_errors(f"remove from {queue}"):
            return await self._unlink(folder, await self._selected(folder, selection, *State))

    async def _selected(self, folder: Folder, selection: Selection, *states: State) -> Iterable[tuple[State, Row]]:
        """What is selected; by ids, in some states only."""
        if selection.unchanged is not None:
            return contents.unchanged(folder, selection.unchanged)
        found = await self._look(folder)
        if selection.state is not None:
            return [(selection.state, row) for row in found[selection.state]]
        wanted = frozenset(selection.ids or ())
        return [(state, row) for state in states for row in found[state] if str(row[0]) in wanted]

    async def pause(self, queue: str) -> None:
        """Pause a queue for qworker's consumers; the protocol has nothing that others would heed."""
        folder = await self._existing(queue)
        with store_errors(f"pause {queue}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open("down", flags, 0o600, dir_fd=folder.side))
            await self._sync(folder, [])

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        folder = await self._existing(queue)
        with store_errors(f"resume {queue}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink("down", dir_fd=folder.side)
            await self._sync(folder, [])
        self._wake()
