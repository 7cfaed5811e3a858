"""Publishing in the steps of the protocol: `.new`, a listing that shows that the id is free, the contents, the name."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import msgspec

from qworker.errors import QueueFull
from qworker.kit.directory.publish import sync_bodies, sync_names
from qworker.kit.files import list_names, try_unlink, write_all
from qworker.kit.opening import create_file
from qworker.message import Draft
from qworker_vsqs.names import leased_name, parse
from qworker_vsqs.queue_dir import MessageInfo, QueueDirectory
from qworker_vsqs.store import VsqsStore

__all__ = ["VsqsPublisher"]


class _NewMessage(msgspec.Struct, eq=False):
    """One message that is being written."""

    draft: Draft
    number: int
    fd: int
    is_visible: bool = False


class VsqsPublisher:
    """Writes messages into the queues of a store."""

    def __init__(self, store: VsqsStore) -> None:
        self._store = store
        self._clock = store.clock
        self._unit = store.options.unit
        self._capacity = store.options.capacity
        self._timeout = store.options.publish_timeout
        self._listings: dict[int, asyncio.Future[list[str]]] = {}

    async def publish(self, name: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages in a queue, which is created if it does not exist.

        A message from another store that is stored here already is not stored twice.

        Raises:
            QueueFull: There was no room within the timeout. The messages that had room are stored.
            PublishUncertain: A sync failed.
        """
        while True:
            queue = self._store.get_or_create(name)
            try:
                ids = await self._publish_new(queue, drafts)
            except FileNotFoundError:
                if queue.is_alive(now=True):
                    raise
                # It was removed in the meantime, and is created again. The messages in the old one are lost with it.
                continue
            self._store.wake_all()
            return ids

    async def _publish_new(self, queue: QueueDirectory, drafts: Sequence[Draft]) -> list[str]:
        if all(draft.original_id is None for draft in drafts):
            return await self._publish(queue, drafts)
        origins = await queue.original_ids()
        known = [None if draft.original_id is None else origins.get(draft.original_id) for draft in drafts]
        fresh = [draft for draft, there in zip(drafts, known, strict=True) if there is None]
        try:
            made = await self._publish(queue, fresh) if fresh else []
        except BaseException:
            queue.discard_original_ids()
            raise
        for draft, new in zip(fresh, made, strict=True):
            if draft.original_id is not None:
                origins[draft.original_id] = new
        rest = iter(made)
        return [next(rest) if there is None else there for there in known]

    async def _publish(self, queue: QueueDirectory, drafts: Sequence[Draft]) -> list[str]:
        ids: list[str] = []
        if self._capacity is None:
            for start in range(0, len(drafts), self._store.batch):
                ids += await self._store_batch(queue, drafts[start : start + self._store.batch])
            return ids
        give_up = None if self._timeout is None else time.monotonic() + self._timeout
        while len(ids) < len(drafts):
            # One publisher at a time counts and stores, or several would find the same room.
            async with queue.locked():
                room = self._capacity - sum(parse(name) is not None for name in await list_names(queue.fd))
                if room > 0:
                    ids += await self._store_batch(queue, drafts[len(ids) : len(ids) + min(room, self._store.batch)])
            if len(ids) < len(drafts) and room <= 0:
                await self._wait_for_room(queue, give_up, len(drafts) - len(ids))
        return ids

    async def _wait_for_room(self, queue: QueueDirectory, give_up: float | None, rest: int) -> None:
        left = 1.0 if give_up is None else give_up - time.monotonic()
        if left <= 0:
            raise QueueFull(
                f"the queue {queue.name} is full ({self._capacity} messages), and {rest} had no room within "
                f"{self._timeout:g} s: consume some, or open with a larger ?max_messages="
            )
        await self._store.wait_for_change(min(left, 1.0))

    async def _store_batch(self, queue: QueueDirectory, drafts: Sequence[Draft]) -> list[str]:
        commit = self._store.group_commit
        news: list[_NewMessage] = []
        try:
            for draft in drafts:
                news.append(self._begin(queue, draft))  # noqa: PERF401 - each counts as soon as it exists
            await self._make_ids_free(queue, news)
            for new in news:
                write_all(new.fd, new.draft.body)
            if commit is not None:
                await sync_bodies(commit, [new.fd for new in news])
            has_info = self._make_visible(queue, news)
        finally:
            for new in news:
                os.close(new.fd)
                if not new.is_visible:
                    # A publish that failed leaves nothing behind.
                    try_unlink(f"{new.number}.new", queue.fd)
        if commit is not None:
            await sync_names(commit, queue.touched(has_info=has_info))
        return [str(new.number) for new in news]

    def _begin(self, queue: QueueDirectory, draft: Draft) -> _NewMessage:
        """Take the next free number by creating its `.new` file."""
        number = max(self._unit.ticks(self._clock.time()), queue.last_id + 1)
        while True:
            queue.last_id = number
            try:
                fd = create_file(f"{number}.new", queue.fd)
            except FileExistsError:
                number += 1
                continue
            return _NewMessage(draft, number, fd)

    async def _make_ids_free(self, queue: QueueDirectory, news: list[_NewMessage]) -> None:
        """Take other numbers until no stored message has one of them: a consumer may have leased one already."""
        while True:
            names = await self._list(queue)
            taken = {found[0] for name in names if (found := parse(name)) is not None}
            clash = next((index for index, new in enumerate(news) if new.number in taken), None)
            if clash is None:
                return
            # All messages after it change too, so that the batch keeps its order.
            again = news[clash:]
            del news[clash:]
            for new in again:
                os.close(new.fd)
                try_unlink(f"{new.number}.new", queue.fd)
            for new in again:
                news.append(self._begin(queue, new.draft))  # noqa: PERF401 - as above

    async def _list(self, queue: QueueDirectory) -> list[str]:
        """Return a listing that begins after this call. All calls in one turn of the loop share it."""
        running = self._listings.get(queue.fd)
        if running is None:
            running = self._listings[queue.fd] = asyncio.ensure_future(self._list_later(queue))
        return await asyncio.shield(running)

    async def _list_later(self, queue: QueueDirectory) -> list[str]:
        self._listings.pop(queue.fd, None)
        return await list_names(queue.fd)

    def _make_visible(self, queue: QueueDirectory, news: list[_NewMessage]) -> bool:
        """Rename the messages to their visible names. Return whether one of them has an info."""
        now = self._clock.time()
        has_info = False
        for new in news:
            draft = new.draft
            due = now + draft.delay if draft.due_at is None else draft.due_at
            name, ticks = str(new.number), None
            if due > now:
                ticks = self._unit.ticks(due)
                name = leased_name(new.number, ticks)
            if ticks is not None or draft.tries or draft.enqueued_at is not None or draft.original_id is not None:
                info = MessageInfo(
                    tries=draft.tries, due=ticks, enqueued_at=draft.enqueued_at, origin=draft.original_id
                )
                os.close(queue.write_info(new.number, info))
                has_info = True
            os.rename(f"{new.number}.new", name, src_dir_fd=queue.fd, dst_dir_fd=queue.fd)
            new.is_visible = True
            queue.window.add(name)
        return has_info
