"""Moving live queues from one backend to another, message by message, without losing one.

Each message is stored at the target under its own id before it leaves the source, so that at every moment at least one of the two
has it. Killed in between, both have it: another run of the move stores nothing twice (the target knows the id) and takes it away
from the source. Only a message that the target has already finished and forgotten can run a second time.

Ready messages are leased at the source, so that its workers and the move never take the same one. Delayed ones cannot be leased:
they are copied while they are still far from due, and those that come due meanwhile are leased like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.envelope import Envelope, open_envelope
from qworker.errors import BackendError
from qworker.message import Draft, Lease, Message, Settle, Settlement, State, StoredMessage

__all__ = ["Moved", "move"]

_BATCH = 200
# Seconds that a batch is leased for: longer than any sane publish of so many.
_VISIBILITY = 120.0
# A delayed message nearer to its time than this is waited for and leased: copying it would race with a worker at the source.
_NEAR_S = 10.0
_WAIT_S = 1.0


class Moved(msgspec.Struct):
    """What a move has done to one queue."""

    queue: str
    ready: int = 0
    delayed: int = 0
    failed: int = 0
    # Messages that the source had taken back before they were acked: both have them.
    twice: int = 0
    # Messages that workers of the source hold.
    left_leased: int = 0

    @property
    def total(self) -> int:
        """Messages that the target has now."""
        return self.ready + self.delayed + self.failed


async def move(
    source: Backend,
    target: Backend,
    queue: str,
    *,
    failed: bool = False,
    progress: Callable[[int], None] = lambda _count: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Moved:
    """Move a queue's messages, with their ids, tries, times, priorities and keys.

    Ends when the source has none that is ready or delayed. What its workers hold is theirs to finish.

    Args:
        source: where the messages are.
        target: where they go; the queue is made there if need be.
        queue: the name at both.
        failed: also failed messages, which become ready at the target with tries 0, as by `requeue`.
        progress: is called with the size of each batch.
        clock: tells now.

    Raises:
        QueueNotFound: the source has no such queue.
        NotSupported: the target has no place for something that a message carries.
    """
    moved = Moved(queue)
    await source.stats(queue)
    await target.create(queue)
    if failed:
        moved.failed = await _copy_away(source, target, queue, State.FAIL, progress, clock)
    while True:
        moved.ready += await _lease_away(source, target, moved, progress)
        moved.delayed += await _copy_away(source, target, queue, State.DELAYED, progress, clock)
        stats = await source.stats(queue)
        # A queue that is down gives no leases: what is ready in it is moved by nobody until it is up.
        if (not stats.ready or stats.down) and not stats.delayed:
            moved.left_leased = stats.leased
            break
        if not stats.ready:
            await asyncio.sleep(_WAIT_S)
    if stats.down and stats.ready:
        raise BackendError(f"{queue} is down at the source, so that nothing can be leased there: `qworker up` it first")
    return moved


async def _lease_away(source: Backend, target: Backend, moved: Moved, progress: Callable[[int], None]) -> int:
    """Move what can be leased; count it."""
    count = 0
    while leases := await source.lease(moved.queue, _BATCH, _VISIBILITY):
        await _hand_over(source, target, leases, moved)
        count += len(leases)
        progress(len(leases))
    return count


async def _hand_over(source: Backend, target: Backend, leases: Sequence[Lease], moved: Moved) -> None:
    try:
        await target.publish(moved.queue, [_draft(lease.message) for lease in leases])
    except BaseException:
        # The target has some of them perhaps; the source keeps all, unharmed and at once.
        await asyncio.shield(source.settle([Settlement(lease=lease, how=Settle.RELEASE) for lease in leases]))
        raise
    refused = await source.settle([Settlement(lease=lease, how=Settle.ACK) for lease in leases])
    moved.twice += len(refused)


async def _copy_away(
    source: Backend,
    target: Backend,
    queue: str,
    state: State,
    progress: Callable[[int], None],
    clock: Clock,
) -> int:
    """Move what is delayed or failed; count it. Delayed ones that are nearly due stay for `_lease_away`."""
    count = 0
    skipped = 0
    while page := await source.browse(queue, state, _BATCH, skipped):
        chosen = [stored for stored in page if state is State.FAIL or (stored.due_at or 0.0) > clock.time() + _NEAR_S]
        skipped += len(page) - len(chosen)
        if not chosen:
            continue
        await target.publish(queue, [_copy(stored) for stored in chosen])
        removed = await source.remove(queue, [stored.message.id for stored in chosen])
        # Somebody requeued or removed the others meanwhile: they are not where this loop looks.
        count += len(chosen)
        progress(removed)
    return count


def _copy(stored: StoredMessage) -> Draft:
    draft = _draft(stored.message)
    if stored.state is State.FAIL:
        return msgspec.structs.replace(draft, tries=0)
    return msgspec.structs.replace(draft, due_at=stored.due_at)


def _draft(message: Message) -> Draft:
    opened = open_envelope(message.body)
    return Draft(
        body=message.body,
        id=message.id,
        priority=message.priority,
        key=message.key,
        task=opened.task if isinstance(opened, Envelope) else None,
        arguments=message.arguments,
        fields=message.fields,
        tries=message.tries,
        enqueued_at=message.enqueued_at,
    )
