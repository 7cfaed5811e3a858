"""Publishing: write, sync, rename, sync.

A message becomes visible with the rename, after its contents are synced. The publisher gets its id after the last sync.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence

import msgspec

from qworker.kit.directory.publish import publish_error, sync_bodies, sync_names
from qworker.kit.files import files_at_once, write_all
from qworker.kit.opening import create_file
from qworker.message import Draft
from qworker_mq.ids import derive_uuid, new_uuids, to_ticks
from qworker_mq.layout import try_unlink
from qworker_mq.lease_state import LeaseState
from qworker_mq.store import OpenQueue, Store
from qworker_mq.window import SLICE

__all__ = ["Publisher"]


class _NewMessage(msgspec.Struct, kw_only=True, eq=False):
    """A message that is written and not yet visible."""

    id: str
    # Its name in tmp/. Empty: it is not in tmp/ any more.
    tmp: str
    fd: int
    tries: int
    # Unix seconds. 0: now.
    due_at: float
    given: bool
    origin: str


class Publisher:
    """Stores messages.

    Args:
        store: The opened root. With `daemons=0` new messages go to `new/`, and a mover brings them to the queue.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._direct = store.options.daemons
        self._batch = files_at_once()
        # The time in the last id that was derived from one of another store.
        self._last_ticks = 0

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages, and return their ids."""
        while True:
            open_queue = self._store.get_or_create(queue)
            ids: list[str] = []
            try:
                for start in range(0, len(drafts), self._batch):
                    ids += await self._publish_batch(open_queue, drafts[start : start + self._batch])
            except FileNotFoundError:
                if open_queue.dirs.is_alive(now=True):
                    raise
                # It was removed in the meantime, and is created again. The messages in the old one are lost with it.
                continue
            self._store.wake(queue)
            return ids

    async def _publish_batch(self, queue: OpenQueue, drafts: Sequence[Draft]) -> list[str]:
        """Store as many messages as can be open at once."""
        ids = new_uuids(len(drafts))
        written: list[_NewMessage] = []
        try:
            given: set[str] = set()
            until = time.monotonic() + SLICE
            for number, draft in enumerate(drafts):
                chosen = self._choose_id(draft)
                if chosen is not None:
                    ids[number] = chosen
                    if chosen in given or self._store.is_stored(queue, chosen):
                        continue
                    given.add(chosen)
                written.append(self._write(ids[number], draft, given=chosen is not None))
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + SLICE
            await self._make_visible(queue, written)
        except FileNotFoundError:
            # A directory was removed, and is created again.
            raise
        except OSError as error:
            raise publish_error(error) from error
        finally:
            self._discard(written)
        return ids

    def _choose_id(self, draft: Draft) -> str | None:
        """Return the id that a message must have: given, or derived from its id in another store. None: any."""
        if draft.id is not None or draft.original_id is None or draft.enqueued_at is None:
            return draft.id
        # No two messages get the same time, because their ids must keep the order in which they are published.
        self._last_ticks = max(to_ticks(draft.enqueued_at), self._last_ticks + 1)
        return derive_uuid(draft.original_id, self._last_ticks)

    def _write(self, message_id: str, draft: Draft, *, given: bool) -> _NewMessage:
        now = self._store.clock.time()
        due_at = now + draft.delay if draft.due_at is None else draft.due_at
        tmp = f"{message_id}.{secrets.token_hex(4)}"
        fd = create_file(tmp, self._store.root.tmp)
        message = _NewMessage(
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
            self._discard([message])
            raise
        return message

    async def _make_visible(self, queue: OpenQueue, written: list[_NewMessage]) -> None:
        store = self._store
        if store.group_commit is not None and written:
            await sync_bodies(store.group_commit, [message.fd for message in written])
        targets: set[int] = set()
        renamed: list[_NewMessage] = []
        for message in written:
            # The loop does not run between the check and the rename, so the second of two publishes with one id sees
            # the first.
            if not (message.given and store.is_stored(queue, message.id)):
                targets.add(self._rename(queue, message))
                renamed.append(message)
                message.tmp = ""
        if store.group_commit is not None and targets:
            await sync_names(store.group_commit, targets)
        for message in renamed:
            if self._direct and not message.due_at:
                queue.window.add(message.id)

    def _rename(self, queue: OpenQueue, message: _NewMessage) -> int:
        root = self._store.root
        if message.tries or message.origin:
            # The length of a state is bounded, and an id of usual length fits.
            state = LeaseState(tries=message.tries, origin=message.origin[:120])
            self._store.lease_states.write(f"{queue.name}:{message.id}", state)
        if message.due_at:
            target, name = queue.dirs.due, f"{int(message.due_at * 1000)}.{message.id}"
        elif self._direct:
            target, name = queue.dirs.ready, message.id
        else:
            target, name = root.new, f"{queue.name}:{message.id}"
        os.rename(message.tmp, name, src_dir_fd=root.tmp, dst_dir_fd=target)
        return target

    def _discard(self, written: list[_NewMessage]) -> None:
        for message in written:
            if message.fd >= 0:
                os.close(message.fd)
                message.fd = -1
            if message.tmp:
                try_unlink(message.tmp, self._store.root.tmp)
                message.tmp = ""
