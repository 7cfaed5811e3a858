"""Publishing as the protocol says: `.new` first, then a listing that proves the id free, then the contents, then the name."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from qworker.clock import Clock
from qworker.errors import PublishUncertain, QueueFull
from qworker.kit.files import GroupCommit, files_at_once, list_names, store_error, write_all
from qworker.message import Draft
from qworker_vsqs.names import Unit, leased_name, parse
from qworker_vsqs.queue_dir import Folder, Note

__all__ = ["Publisher"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _New(msgspec.Struct, eq=False):
    """One message that is being written."""

    draft: Draft
    number: int
    fd: int
    shown: bool = False


class Publisher:
    """Writes messages into queues.

    Args:
        clock: the store's clock.
        unit: of the ids that are made.
        capacity: messages that a queue may hold, leased ones included; None: any number.
        timeout: seconds that a publish waits for room; None: for ever.
        commit: group commit; None: nothing is synced.
        changed: waits for a change in a queue, for a short time at most.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        unit: Unit,
        capacity: int | None,
        timeout: float | None,
        commit: GroupCommit | None,
        changed: Callable[[float], Awaitable[None]],
    ) -> None:
        self._clock = clock
        self._unit = unit
        self._capacity = capacity
        self._timeout = timeout
        self._commit = commit
        self._changed = changed
        self._batch = files_at_once()
        self._listings: dict[int, asyncio.Future[list[str]]] = {}

    async def publish(self, folder: Folder, drafts: Sequence[Draft]) -> list[str]:
        """Store messages; see `Backend.publish`. One that came from another store, and is here already, is not stored twice.

        Raises:
            QueueFull: no room within the timeout; what had room is stored.
            PublishUncertain: a sync failed.
        """
        if all(draft.original_id is None for draft in drafts):
            return await self._publish(folder, drafts)
        origins = await folder.origins()
        known = [None if draft.original_id is None else origins.get(draft.original_id) for draft in drafts]
        fresh = [draft for draft, there in zip(drafts, known, strict=True) if there is None]
        try:
            made = await self._publish(folder, fresh) if fresh else []
        except BaseException:
            folder.forget_origins()
            raise
        for draft, new in zip(fresh, made, strict=True):
            if draft.original_id is not None:
                origins[draft.original_id] = new
        rest = iter(made)
        return [next(rest) if there is None else there for there in known]

    async def _publish(self, folder: Folder, drafts: Sequence[Draft]) -> list[str]:
        ids: list[str] = []
        if self._capacity is None:
            for start in range(0, len(drafts), self._batch):
                ids += await self._store(folder, drafts[start : start + self._batch])
            return ids
        give_up = None if self._timeout is None else time.monotonic() + self._timeout
        while len(ids) < len(drafts):
            # One publisher at a time counts and stores, or several would find the same room.
            async with folder.locked():
                room = self._capacity - sum(parse(name) is not None for name in await list_names(folder.fd))
                if room > 0:
                    ids += await self._store(folder, drafts[len(ids) : len(ids) + min(room, self._batch)])
            if len(ids) < len(drafts) and room <= 0:
                await self._wait_for_room(folder, give_up, len(drafts) - len(ids))
        return ids

    async def _wait_for_room(self, folder: Folder, give_up: float | None, rest: int) -> None:
        left = 1.0 if give_up is None else give_up - time.monotonic()
        if left <= 0:
            raise QueueFull(
                f"the queue {folder.name} is full ({self._capacity} messages), and {rest} had no room within "
                f"{self._timeout:g} s: consume some, or open with a larger ?max_messages="
            )
        await self._changed(min(left, 1.0))

    async def _store(self, folder: Folder, drafts: Sequence[Draft]) -> list[str]:
        news: list[_New] = []
        try:
            for draft in drafts:
                news.append(self._begin(folder, draft))  # noqa: PERF401 - each counts as soon as it is made
            await self._settle_ids(folder, news)
            for new in news:
                write_all(new.fd, new.draft.body)
            await self._sync_bodies(folder, news)
            noted = self._show(folder, news)
        finally:
            for new in news:
                os.close(new.fd)
                if not new.shown:
                    # Nothing is left behind by a publish that ended in an error.
                    _unlink(folder, f"{new.number}.new")
        if self._commit is not None:
            await self._commit.directories(folder.touched(noted=noted))
        return [str(new.number) for new in news]

    def _begin(self, folder: Folder, draft: Draft) -> _New:
        """Claim the next free number by its `.new` file."""
        number = max(self._unit.ticks(self._clock.time()), folder.last_id + 1)
        while True:
            folder.last_id = number
            try:
                fd = os.open(f"{number}.new", _NEW, 0o600, dir_fd=folder.fd)
            except FileExistsError:
                number += 1
                continue
            return _New(draft, number, fd)

    async def _settle_ids(self, folder: Folder, news: list[_New]) -> None:
        """See that the numbers are free: a consumer may have a message of the same number already."""
        while True:
            names = await self._list(folder)
            taken = {found[0] for name in names if (found := parse(name)) is not None}
            clash = next((index for index, new in enumerate(news) if new.number in taken), None)
            if clash is None:
                return
            # With all that come after it, so that the batch keeps its order.
            again = news[clash:]
            del news[clash:]
            for new in again:
                os.close(new.fd)
                _unlink(folder, f"{new.number}.new")
            for new in again:
                news.append(self._begin(folder, new.draft))  # noqa: PERF401 - as above

    async def _list(self, folder: Folder) -> list[str]:
        """A listing that begins after this call; those who ask in one turn of the loop share it."""
        running = self._listings.get(folder.fd)
        if running is None:
            running = self._listings[folder.fd] = asyncio.ensure_future(self._list_later(folder))
        return await asyncio.shield(running)

    async def _list_later(self, folder: Folder) -> list[str]:
        self._listings.pop(folder.fd, None)
        return await list_names(folder.fd)

    async def _sync_bodies(self, folder: Folder, news: list[_New]) -> None:
        if self._commit is None:
            return
        try:
            await self._commit.data([new.fd for new in news])
        except OSError as error:
            known = store_error(error, f"publish to {folder.name}")
            raise PublishUncertain(f"nothing of this batch was stored: {known}: publish it again") from error

    def _show(self, folder: Folder, news: list[_New]) -> bool:
        """Give the messages their names; whether something had to be noted of one."""
        now = self._clock.time()
        noted = False
        for new in news:
            draft = new.draft
            due = now + draft.delay if draft.due_at is None else draft.due_at
            name, ticks = str(new.number), None
            if due > now:
                ticks = self._unit.ticks(due)
                name = leased_name(new.number, ticks)
            if ticks is not None or draft.tries or draft.enqueued_at is not None or draft.original_id is not None:
                note = Note(tries=draft.tries, due=ticks, enqueued_at=draft.enqueued_at, origin=draft.original_id)
                os.close(folder.write_note(new.number, note))
                noted = True
            os.rename(f"{new.number}.new", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            new.shown = True
            folder.window.came(name)
        return noted


def _unlink(folder: Folder, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder.fd)
    except FileNotFoundError:
        pass
