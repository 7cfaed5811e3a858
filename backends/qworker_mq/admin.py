"""The changes that users make: queues, failed messages and pauses.

No code here is called while a worker runs messages.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from qworker.errors import QueueNotFound
from qworker.kit.directory.queue_files import is_directory, list_queue_names
from qworker.kit.files import make_empty, remove_whole_tree
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import FinishedMessage, QueueStats, Selection, State
from qworker.names import check_queue, is_queue_name
from qworker_mq.browse import Browser, Location, parse_id
from qworker_mq.daemons import Trash
from qworker_mq.layout import is_usable_id, split_name, try_rename, try_unlink
from qworker_mq.reap import StoreReaper
from qworker_mq.store import OpenQueue, Store
from qworker_mq.window import iterate_names, read_order

__all__ = ["Admin"]


class Admin:
    """Counts and changes queues.

    Args:
        store: The opened root.
        reaper: Makes due messages ready before they are counted.
        trash: Unlinks what is removed.
        browser: Lists the messages.
    """

    def __init__(self, store: Store, reaper: StoreReaper, trash: Trash, browser: Browser) -> None:
        self._store = store
        self._reaper = reaper
        self._trash = trash
        self._browser = browser

    async def queues(self) -> list[str]:
        """Return the names of the directories in queues/, sorted."""
        root = self._store.root.queues
        return list_queue_names(root, partial(is_directory, root), is_name=is_queue_name)

    async def delete(self, queue: str) -> None:
        """Remove a queue's directories, then its messages elsewhere."""
        store = self._store
        root = store.root
        store.drop(check_queue(queue))
        for parent in (root.queues, root.due, root.fail):
            deleted = f"deleted-{queue}-{secrets.token_hex(6)}"
            # One rename, so that no process sees half a queue.
            if try_rename(queue, parent, deleted, root.tmp):
                await run_in_thread(BlockingCall.DELETE, remove_whole_tree, deleted, root.tmp)
        for directory in (root.new, root.delay, root.lease, root.reason):
            async for name in iterate_names(directory):
                if name.startswith(f"{queue}:"):
                    try_unlink(name, directory)
        try_unlink(queue, root.paused)
        await store.sync_directories(root.queues, root.new, root.delay)

    async def stats(self, queue: str) -> QueueStats:
        """Count the files of each state."""
        open_queue = self._reaper.require_current(queue)
        ready = await self._list(open_queue, State.READY)
        oldest: float | None = None
        if ready:
            name, directory = min(ready, key=lambda location: read_order(parse_id(open_queue, location), location[1]))
            try:
                oldest = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                oldest = None
        return QueueStats(
            queue=queue,
            ready=len(ready),
            leased=len(await self._list(open_queue, State.LEASED)),
            delayed=len(open_queue.due.list_all()),
            failed=len(await self._list(open_queue, State.FAILED)),
            oldest_age_s=None if oldest is None else max(0.0, self._store.clock.time() - oldest),
            paused=self._store.is_paused(queue),
            blocked=await open_queue.records.count(self._store.options.max_body, self._store.waiting(open_queue)),
        )

    async def _list(self, queue: OpenQueue, state: State) -> list[Location]:
        return [location async for location in self._browser.list_state(queue, state)]

    # -- failed messages -----------------------------------------------------------------------------------------------

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Move failed messages back to the queue, and count them."""
        open_queue = self._reaper.require_current(queue)
        failed = [name for name, _ in await self._list(open_queue, State.FAILED)]
        if selection.unchanged is not None:
            stored = frozenset(failed)
            unchanged = self._select_unchanged(open_queue, selection.unchanged)
            chosen = (message_id for message_id in unchanged if message_id in stored)
        else:
            wanted = frozenset(failed if selection.ids is None else selection.ids)
            chosen = (message_id for message_id in failed if message_id in wanted)
        count = sum([self._requeue_one(open_queue, message_id) for message_id in chosen])
        if count:
            await self._store.sync_directories(open_queue.dirs.ready, open_queue.dirs.fail)
            self._store.wake(queue)
        return count

    def _requeue_one(self, queue: OpenQueue, message_id: str) -> bool:
        name = f"{queue.name}:{message_id}"
        self._store.lease_states.delete(name)
        if not try_rename(message_id, queue.dirs.fail, message_id, queue.dirs.ready):
            return False
        try_unlink(name, self._store.root.reason)
        queue.window.add(message_id)
        return True

    def _select_unchanged(self, queue: OpenQueue, messages: Iterable[FinishedMessage]) -> Iterator[str]:
        """Yield the ids of failed messages that are unchanged. Each is checked when the caller requests it."""
        for message in messages:
            if (
                message.state is State.FAILED
                and is_usable_id(message.id)
                and message.has_finished_at(self._browser.failed_at(queue, message.id))
            ):
                yield message.id

    # -- removing ------------------------------------------------------------------------------------------------------

    async def remove(self, queue: str, selection: Selection) -> int:
        """Move messages to remove/, and count them."""
        open_queue = self._store.get(check_queue(queue))
        if open_queue is None:
            return await self._remove_stranded(queue, selection)
        if selection.state is not None:
            open_queue = self._reaper.require_current(queue)
            locations = {parse_id(open_queue, one): one for one in await self._list(open_queue, selection.state)}
            sources = {one: self._remove_from(open_queue, one, location) for one, location in locations.items()}
        elif selection.unchanged is not None:
            # Only in fail/, which a requeued message has left.
            unchanged = self._select_unchanged(open_queue, selection.unchanged)
            sources = {one: self._remove_from(open_queue, one, (one, open_queue.dirs.fail)) for one in unchanged}
        else:
            sources = {one: self._remove_one(open_queue, one) for one in dict.fromkeys(selection.ids or ())}
        removed = {message_id: source for message_id, source in sources.items() if source is not None}
        await self._finish(queue, removed)
        return len(removed)

    async def _remove_stranded(self, queue: str, selection: Selection) -> int:
        """Remove messages of a queue that does not exist: other servers publish to it, and leave them in new/.

        Raises:
            QueueNotFound: There are none.
        """
        root = self._store.root
        # In the direction in which messages move, twice: one that moves on in the meantime is found in the second pass.
        places = [(state, place) for state, place in ((State.READY, root.new), (State.LEASED, root.delay)) * 2]
        removed: dict[str, int] = {}
        for state, place in places:
            if selection.state is state:
                names = [name async for name in iterate_names(place)]
            else:
                names = [f"{queue}:{message_id}" for message_id in selection.ids or ()]
            for name in names:
                parts = split_name(name)
                if parts is not None and parts[0] == queue and try_rename(name, place, name, root.remove):
                    self._store.lease_states.delete(name)
                    removed[parts[1]] = place
        if not removed:
            raise QueueNotFound(queue)
        await self._finish(queue, removed)
        return len(removed)

    def _remove_one(self, queue: OpenQueue, message_id: str) -> int | None:
        """Remove a message, and return the directory that it was in. None: it is not stored."""
        if not is_usable_id(message_id):
            return None
        # One pass can miss a message that a mover moves in the meantime.
        for _ in range(2):
            for _, location in self._browser.locations(queue, message_id):
                if (source := self._remove_from(queue, message_id, location)) is not None:
                    return source
        return None

    def _remove_from(self, queue: OpenQueue, message_id: str, location: Location) -> int | None:
        """Remove a message from a location, and return the directory. None: it is not there."""
        name = f"{queue.name}:{message_id}"
        source = location[1]
        if not try_rename(location[0], source, name, self._store.root.remove):
            return None
        if source == queue.dirs.due:
            queue.due.drop(message_id)
        self._store.lease_states.delete(name)
        if source == queue.dirs.fail:
            try_unlink(name, self._store.root.reason)
        return source

    async def _finish(self, queue: str, removed: Mapping[str, int]) -> None:
        """Sync the directories that messages were removed from, and unlink the messages."""
        if removed:
            await self._store.sync_directories(self._store.root.remove, *set(removed.values()))
            self._trash.unlink([f"{queue}:{message_id}" for message_id in removed])

    # -- pauses --------------------------------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        """Create the pause file."""
        self._store.require(queue)
        make_empty(queue, self._store.root.paused)

    async def resume(self, queue: str) -> None:
        """Unlink the pause file."""
        self._store.require(queue)
        try_unlink(queue, self._store.root.paused)
        self._store.wake(queue)
