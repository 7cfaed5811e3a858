"""Unique keys that a message needs which is published, or which has finished and is to run again.

A key that counts in all queues is checked by `AppKey`, because its holder may be in another queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from qworker.backend.unique_keys import held_error
from qworker.message import KeyHolder
from qworker_file.app_keys import OpenOther, give_app_key, holder_of_app_key, lock_app_keys
from qworker_file.id_index import LOCK_PAUSE, is_any_in_progress, lock_index, unlock
from qworker_file.id_place import Located, locate
from qworker_file.layout import QueueDir
from qworker_file.names import given_id, index_name, is_app_mark, mark_in
from qworker_file.replace import finish_replacing
from qworker_file.unique_keys import Holder, give_key, holder_of, key_of, state_of

__all__ = ["AppKey", "taken_key"]


class AppKey:
    """A key that counts in all queues, which a message of one queue wants to have.

    Args:
        files: The queue of the message.
        mark: The mark of the key.
        open_other: Opens the other queues.
    """

    def __init__(self, files: QueueDir, mark: str, open_other: OpenOther) -> None:
        self._files = files
        self._mark = mark
        self._open_other = open_other
        self._located = Located({}, {})
        # The message that has or had the key.
        self.holder: KeyHolder | None = None

    def check(self, keys: int, message_id: str) -> Holder:
        """Return whether another message has the key. The caller has the locks of names/ and of the keys."""
        self.holder = holder = holder_of_app_key(keys, self._mark)
        if holder is None or (holder.queue == self._files.name and holder == message_id):
            return Holder.VOID
        there = self._files if holder.queue == self._files.name else self._open_other(holder.queue)
        return Holder.VOID if there is None else state_of(there, holder, self._mark, self._located)

    def shown_holder(self) -> str:
        """Return the id of the holder, with its queue if that is another one."""
        assert self.holder is not None
        return str(self.holder) if self.holder.queue == self._files.name else self.holder

    async def look(self) -> bool:
        """Locate the holder before another check. Return whether that must wait for another process."""
        holder = self.holder
        there = None if holder is None else self._open_other(holder.queue)
        if holder is None or there is None:
            return True
        try:
            with there:
                self._located = await locate(there, [holder])
                return is_any_in_progress(there, self._located)
        except FileNotFoundError:
            # The other queue is deleted at this moment.
            return True


@asynccontextmanager
async def taken_key(files: QueueDir, item: str, open_other: OpenOther) -> AsyncGenerator[None]:
    """Let an item that has finished have its unique key again, if it has one, and lock the keys in the block.

    Raises:
        AlreadyEnqueued: Another message has it. The block does not run.
    """
    message_id, mark = given_id(item), mark_in(item)
    if message_id is None or mark is None:
        yield
        return
    if is_app_mark(mark):
        async with _taken_app_key(files, item, message_id, AppKey(files, mark, open_other)):
            yield
        return
    located = Located({}, {})
    while True:
        fd = await lock_index(files)
        try:
            holder = holder_of(files, mark)
            state = Holder.VOID
            if holder is not None and holder != message_id:
                finish_replacing(files, index_name(holder))
                state = state_of(files, holder, mark, located)
            if state is Holder.LIVE and holder is not None:
                raise held_error(key_of(files, item)[0] or mark, holder)
            if state is Holder.VOID:
                give_key(files, message_id, mark)
                yield
                return
        finally:
            unlock(fd)
        located = await locate(files, [holder or ""])
        if is_any_in_progress(files, located):
            await asyncio.sleep(LOCK_PAUSE)


@asynccontextmanager
async def _taken_app_key(files: QueueDir, item: str, message_id: str, key: AppKey) -> AsyncGenerator[None]:
    while True:
        fd = await lock_index(files)
        try:
            with lock_app_keys(files) as keys:
                state = Holder.UNSURE if keys is None else key.check(keys, message_id)
                if state is Holder.LIVE:
                    raise held_error(key_of(files, item)[0] or item, key.shown_holder())
                if state is Holder.VOID and keys is not None:
                    give_app_key(files, keys, message_id, mark_in(item) or "")
                    yield
                    return
        finally:
            unlock(fd)
        if await key.look():
            await asyncio.sleep(LOCK_PAUSE)
