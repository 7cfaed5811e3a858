"""Publishing: write, sync, rename, sync; the message is visible only between the last two, and acknowledged after them."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence

import msgspec

from qworker.errors import BackendError, PermissionDenied, PublishUncertain, StorageFull
from qworker.kit.files import CREATE, files_at_once, write_all
from qworker.kit.store_errors import store_error
from qworker.message import Draft
from qworker_mq.ids import at_unix, new_uuids, uuid_of
from qworker_mq.record import Record
from qworker_mq.store import Held, Store

__all__ = ["Publisher"]

_SLICE = 0.002


class _Written(msgspec.Struct, kw_only=True, eq=False):
    """A message on its way."""

    id: str
    tmp: str
    fd: int
    tries: int
    # Unix seconds; 0: now.
    due_at: float
    given: bool
    origin: str


class Publisher:
    """Stores messages.

    Args:
        store: the opened root.
        direct: True: straight into the queue; False: into `new/`, for a mover to bring there.
    """

    def __init__(self, store: Store, *, direct: bool) -> None:
        self._store = store
        self._direct = direct
        self._batch = files_at_once()
        # The time in the last id that was made from one of another store.
        self._last = 0

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """See `Backend.publish`."""
        held = self._store.made(queue)
        ids: list[str] = []
        for start in range(0, len(drafts), self._batch):
            ids += await self._publish(held, drafts[start : start + self._batch])
        self._store.wake(queue)
        return ids

    async def _publish(self, held: Held, drafts: Sequence[Draft]) -> list[str]:
        """Store so many messages as may be open at once."""
        ids = new_uuids(len(drafts))
        written: list[_Written] = []
        try:
            given: set[str] = set()
            until = time.monotonic() + _SLICE
            for number, draft in enumerate(drafts):
                chosen = self._chosen(draft)
                if chosen is not None:
                    ids[number] = chosen
                    if chosen in given or self._stored(held, chosen):
                        continue
                    given.add(chosen)
                written.append(self._write(ids[number], draft, given=chosen is not None))
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + _SLICE
            await self._make_visible(held, written)
        except OSError as error:
            raise _translated(error) from error
        finally:
            self._clean(written)
        return ids

    def _chosen(self, draft: Draft) -> str | None:
        """The id that a message must have: its publisher's, or one that goes with its id in another store."""
        if draft.id is not None or draft.original_id is None or draft.enqueued_at is None:
            return draft.id
        # Not the same time for two: the order in which they come is that of their ids.
        self._last = max(at_unix(draft.enqueued_at), self._last + 1)
        return uuid_of(draft.original_id, self._last)

    def _write(self, message_id: str, draft: Draft, *, given: bool) -> _Written:
        now = self._store.clock.time()
        due_at = now + draft.delay if draft.due_at is None else draft.due_at
        tmp = f"{message_id}.{secrets.token_hex(4)}"
        fd = os.open(tmp, CREATE, 0o600, dir_fd=self._store.root.tmp)
        message = _Written(
            id=message_id,
            tmp=tmp,
            fd=fd,
            tries=draft.tries,
            due_at=due_at if due_at > now else 0.0,
            given=given,
            origin=draft.original_id or "",
        )
        try:
            write_all(fd, draft.body)
            enqueued_ns = int((now if draft.enqueued_at is None else draft.enqueued_at) * 1e9)
            os.utime(fd, ns=(enqueued_ns, enqueued_ns))
        except BaseException:
            self._clean([message])
            raise
        return message

    async def _make_visible(self, held: Held, written: list[_Written]) -> None:
        store = self._store
        await store.sync_data([message.fd for message in written])
        targets: set[int] = set()
        renamed: list[_Written] = []
        for message in written:
            # No turn of the loop between the look and the rename: of two publishes with one id the second sees the first.
            if not (message.given and self._stored(held, message.id)):
                targets.add(self._rename(held, message))
                renamed.append(message)
            message.tmp = ""
        await store.sync_directories(*targets)
        for message in renamed:
            if self._direct and not message.due_at:
                held.window.add(message.id)

    def _rename(self, held: Held, message: _Written) -> int:
        root = self._store.root
        if message.tries or message.origin:
            # A record's length is bounded, and an id of usual length fits.
            record = Record(tries=message.tries, origin=message.origin[:120])
            self._store.records.write(f"{held.name}:{message.id}", record)
        if message.due_at:
            target, name = held.dirs.due, f"{int(message.due_at * 1000)}.{message.id}"
        elif self._direct:
            target, name = held.dirs.ready, message.id
        else:
            target, name = root.new, f"{held.name}:{message.id}"
        os.rename(message.tmp, name, src_dir_fd=root.tmp, dst_dir_fd=target)
        return target

    def _stored(self, held: Held, message_id: str) -> bool:
        root = self._store.root
        name = f"{held.name}:{message_id}"
        # In the direction in which messages move, twice: one that moves on meanwhile is met again.
        places = [(message_id, held.dirs.ready), (name, root.delay), (name, root.new), (message_id, held.dirs.fail)] * 2
        return any(_exists(*place) for place in places) or held.due.get(message_id) is not None

    def _clean(self, written: list[_Written]) -> None:
        for message in written:
            if message.fd >= 0:
                os.close(message.fd)
                message.fd = -1
            if message.tmp:
                try:
                    os.unlink(message.tmp, dir_fd=self._store.root.tmp)
                except FileNotFoundError:
                    pass
                message.tmp = ""


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _translated(error: OSError) -> BackendError:
    told = store_error(error, "store a message")
    if isinstance(told, StorageFull | PermissionDenied):
        return told
    return PublishUncertain(f"the message may or may not be stored: {told}: publish it again with the same id")
