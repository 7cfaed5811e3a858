"""Moving live queues from one backend to another, message by message, without losing one.

Each message is stored at the target under its own id before it leaves the source, so at every moment at least one of
the two has it. If the move is killed in between, both have it. Another run of the move stores nothing twice (the target
knows the id) and removes the message from the source. Only a message that the target has already finished and deleted
can run a second time.

If the target's protocol cannot store a part of a message, the part travels in the body (`qworker.parcel`). If a
protocol has its own form of ids, it gives the message a new one, and keeps the old id with it if it can. A message that
it has under the old id is stored already.

Ready messages are leased at the source, so that its workers and the move never take the same one. Delayed messages
cannot be leased: they are copied while they are still far from due. Those that become due in the meantime are leased
like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.envelope import Envelope, open_envelope
from qworker.errors import BackendError, InvalidName, NotSupported
from qworker.message import Draft, Lease, Message, Query, Selection, SettleAction, Settlement, State, StoredMessage
from qworker.names import check_id, to_message_id
from qworker.parcel import pack, unpack
from qworker.tools.move_cells import count_cells, move_cells

__all__ = ["MoveResult", "move"]

_BATCH = 200
# The length of the lease of a batch in seconds: longer than any normal publish of so many messages.
_VISIBILITY = 120.0
# A delayed message that is due in fewer seconds than this is not copied, but leased when it is due: a copy would race
# with a worker at the source.
_NEAR_S = 10.0
_WAIT_S = 1.0


class MoveResult(msgspec.Struct):
    """The result of moving one queue.

    Attributes:
        queue: The name of the queue.
        ready: Ready messages that were moved.
        delayed: Delayed messages that were moved.
        failed: Failed messages that were moved.
        twice: Messages whose leases were lost before they were acked at the source: both stores have them.
        left_leased: Messages that workers of the source have leased.
        cells: Cells that were moved.
        left_cells: Cells that stay, because the target has none.
    """

    queue: str
    ready: int = 0
    delayed: int = 0
    failed: int = 0
    twice: int = 0
    left_leased: int = 0
    cells: int = 0
    left_cells: int = 0

    @property
    def total(self) -> int:
        """The number of messages that were moved to the target."""
        return self.ready + self.delayed + self.failed


async def move(
    source: Backend,
    target: Backend,
    queue: str,
    *,
    failed: bool = False,
    progress: Callable[[int], None] = lambda _count: None,
    renamed: Callable[[str, str], None] = lambda _old, _new: None,
    clock: Clock = SYSTEM_CLOCK,
) -> MoveResult:
    """Move a queue's messages, with their ids, tries, times, priorities, keys, fields and arguments, and its cells.

    It returns when the source has no ready and no delayed messages. Workers of the source finish the messages that they
    have leased.

    Args:
        source: The store of the messages.
        target: The store that receives them. The queue is created there if it does not exist.
        queue: The name of the queue in both stores.
        failed: Whether to move failed messages too. They become ready at the target with tries 0, as with `requeue`.
        progress: Called with the size of each batch.
        renamed: Called with the old id and the new id of each message that gets a new one.
        clock: The clock.

    Raises:
        QueueNotFound: The source does not have the queue.
        NotSupported: The target cannot store a message's priority or key.
    """
    moved = MoveResult(queue)
    receiver = _Target(target, queue, renamed)
    await source.stats(queue)
    await target.create(queue)
    if failed:
        moved.failed = await _move_failed(source, receiver, queue, progress)
    while True:
        moved.ready += await _move_leased(source, receiver, moved, progress)
        moved.delayed += await _move_delayed(source, receiver, queue, progress, clock)
        stats = await source.stats(queue)
        # No message of a paused queue can be leased: its ready messages stay until the queue is resumed.
        if (not stats.ready or stats.paused) and not stats.delayed:
            moved.left_leased = stats.leased
            break
        if not stats.ready:
            await asyncio.sleep(_WAIT_S)
    if "cells" not in source.deviations:
        # Last: what is moved may put cells.
        if "cells" in target.deviations:
            moved.left_cells = await count_cells(source, queue)
        else:
            moved.cells = await move_cells(source, target, queue)
    if stats.paused and stats.ready:
        raise BackendError(f"queue {queue} is paused at the source: run `qworker resume` for it first")
    return moved


async def _move_leased(source: Backend, target: _Target, moved: MoveResult, progress: Callable[[int], None]) -> int:
    """Move the messages that can be leased, and return their number."""
    count = 0
    while leases := await source.lease(moved.queue, _BATCH, _VISIBILITY):
        await _publish_to_target(source, target, leases, moved)
        count += len(leases)
        progress(len(leases))
    return count


async def _publish_to_target(source: Backend, target: _Target, leases: Sequence[Lease], moved: MoveResult) -> None:
    try:
        await target.store([_draft(lease.message) for lease in leases])
    except BaseException:
        # The target may have some of them. The source keeps all of them, unchanged and available at once.
        await asyncio.shield(source.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases]))
        raise
    refused = await source.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    moved.twice += len(refused)


async def _move_delayed(
    source: Backend, target: _Target, queue: str, progress: Callable[[int], None], clock: Clock
) -> int:
    """Move the delayed messages, and return their number. Those that are nearly due are left for `_move_leased`."""
    count = 0
    async for page in source.browse(queue, Query(State.DELAYED)):
        for start in range(0, len(page), _BATCH):
            # Computed for each batch, because a slow target may need longer for a page than its messages are delayed.
            far = clock.time() + _NEAR_S
            count += await _copy_away(
                source,
                target,
                queue,
                [one for one in page[start : start + _BATCH] if (one.due_at or 0.0) > far],
                progress,
            )
    return count


async def _move_failed(source: Backend, target: _Target, queue: str, progress: Callable[[int], None]) -> int:
    """Move the failed messages, and return their number.

    The state is listed again for each batch: the copy of a message that was requeued since it was listed would run a
    second time.
    """
    count, after, full = 0, None, True
    while full:
        batch = await list_messages(source, queue, Query(State.FAILED, limit=_BATCH, after=after))
        count += await _copy_away(source, target, queue, batch, progress)
        full = len(batch) == _BATCH
        after = batch[-1].position if batch else None
    return count


async def _copy_away(
    source: Backend, target: _Target, queue: str, batch: Sequence[StoredMessage], progress: Callable[[int], None]
) -> int:
    if batch:
        await target.store([_copy(stored) for stored in batch])
        # A message that was removed in the meantime is not removed here.
        progress(await source.remove(queue, Selection(ids=[stored.message.id for stored in batch])))
    return len(batch)


def _copy(stored: StoredMessage) -> Draft:
    draft = _draft(stored.message)
    if stored.state is State.FAILED:
        return msgspec.structs.replace(draft, tries=0)
    return msgspec.structs.replace(draft, due_at=stored.due_at)


def _draft(message: Message) -> Draft:
    message = unpack(message)
    opened = open_envelope(message.body)
    task = opened.task if isinstance(opened, Envelope) else None
    arguments = message.argv
    if task is not None and arguments[:1] == (task,):
        # The first argument is the label that a directory puts into the names of files.
        arguments = arguments[1:]
    return Draft(
        body=message.body,
        id=message.id,
        priority=message.priority,
        unique_key=message.unique_key,
        unique=message.unique,
        task=task,
        argv=arguments,
        fields=message.fields,
        tries=message.tries,
        enqueued_at=message.enqueued_at,
    )


def _is_plain(message_id: str | None) -> bool:
    """Return whether any store that keeps ids can keep this one."""
    try:
        return message_id is None or bool(check_id(message_id))
    except InvalidName:
        return False


class _Target:
    """The target. It adapts messages to its protocol.

    Args:
        target: The backend.
        queue: The queue of the messages.
        renamed: Called with the old id and the new id of each message that gets a new one.
    """

    def __init__(self, target: Backend, queue: str, renamed: Callable[[str, str], None]) -> None:
        self._target = target
        self._queue = queue
        self._renamed = renamed

    async def store(self, drafts: Sequence[Draft]) -> None:
        """Publish messages that have ids."""
        fitted = [self._adapt_draft(draft) for draft in drafts]
        try:
            ids = await self._target.publish(self._queue, fitted)
        except NotSupported:
            # The target refuses one of them because of its content. They are published in order, because nothing of the
            # batch is stored.
            ids = [await self._store_one(draft) for draft in fitted]
        for number, draft in enumerate(fitted):
            if draft.unique_key is not None and draft.id is not None and ids[number] != to_message_id(draft.id):
                # Several messages of the source can have had this key, one after the other, and each must be moved.
                keyless = msgspec.structs.replace(draft, unique_key=None, unique=None)
                ids[number] = await self._store_one(keyless)
        for draft, new in zip(drafts, ids, strict=True):
            if draft.id is not None and draft.id != new:
                self._renamed(draft.id, new)

    async def _store_one(self, draft: Draft) -> str:
        try:
            (message_id,) = await self._target.publish(self._queue, [draft])
        except NotSupported:
            packed = pack(draft, even_empty=not draft.body)
            if packed is draft:
                raise
            (message_id,) = await self._target.publish(self._queue, [packed])
        return message_id

    def _adapt_draft(self, draft: Draft) -> Draft:
        lacks = self._target.deviations
        if ("fields" in lacks and draft.fields) or ("argv" in lacks and draft.argv):
            draft = pack(draft)
        if "given_ids" in lacks or not _is_plain(draft.id):
            draft = msgspec.structs.replace(draft, id=None, original_id=draft.id)
        return draft
