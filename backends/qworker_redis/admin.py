"""The administration of queues: create, delete, count, pause, requeue and remove."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from qworker.backend.unique_keys import held_error
from qworker.cell import Cell
from qworker.errors import InvalidName, QueueNotFound
from qworker.message import (
    Cancelled,
    FinishedMessage,
    QueueStats,
    Selection,
    State,
    to_microseconds,
)
from qworker.names import check_existing_queue, failure_id
from qworker_redis.bulk import delete_staged
from qworker_redis.cells import member_of
from qworker_redis.codec import decode_holder, decode_key, encode_text, read_enqueued_at
from qworker_redis.connection import Argument
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.keys import PARTS, queue_key
from qworker_redis.register import QueueRegister
from qworker_redis.topology import queue_slot

__all__ = [
    "BATCH",
    "Call",
    "cancel",
    "count_too_large",
    "delete_queue",
    "discard_call",
    "free_report_holds",
    "ids_and_times",
    "in_batches",
    "make_due",
    "make_stats",
    "read_rows",
    "read_stats",
    "read_too_large",
    "remove",
    "requeue",
    "set_paused",
]

T = TypeVar("T")
# A script's name and its arguments.
Call = tuple[str, list[Argument]]

# Messages in one script call, which blocks all other clients of the server.
BATCH = 500
# Each message that is removed by its id takes longer.
_REMOVED = 200
# Answers of scripts in place of a count.
_NO_QUEUE, _ONLY_REMAINS = -1, -2


async def delete_queue(pool: ConnectionPool, register: QueueRegister, queue: str) -> None:
    """Delete a queue with all of its messages."""
    register.known.discard(queue)
    await delete_staged(pool, queue)
    await pool.command(queue_slot(queue), "UNLINK", *[queue_key(queue, part) for part in PARTS])
    # Last: a queue that is deleted in part is still in the register, and can be deleted again.
    await register.remove(queue)


async def read_rows(pool: ConnectionPool, name: str, queue: str, arguments: Sequence[Argument]) -> list[Reply]:
    """Run a script and return its list.

    Raises:
        QueueNotFound: The list is empty, which says that the queue does not exist.
    """
    reply = cast("list[Reply]", await pool.run_script(name, check_existing_queue(queue), arguments))
    if not reply:
        raise QueueNotFound(queue)
    return reply


async def _count(
    pool: ConnectionPool,
    name: str,
    queue: str,
    arguments: Sequence[Argument],
    held: dict[bytes, bytes] | None = None,
) -> int:
    """Run a script and return its count, or `_ONLY_REMAINS`: there was something to delete, but no message.

    Args:
        pool: The connections of the backend.
        name: The name of the script.
        queue: Name of the queue.
        arguments: Its arguments.
        held: Receives the unique keys for which the script changed nothing, and the ids of the messages that have them.

    Raises:
        QueueNotFound: The count is -1, which says that the queue does not exist.
    """
    reply: Any = await pool.run_script(name, check_existing_queue(queue), arguments)
    replies: list[Any] = [*reply] if isinstance(reply, list) else [reply]
    count, *keys = replies
    if held is not None:
        held.update(zip(keys[::2], keys[1::2], strict=True))
    if count == _NO_QUEUE:
        raise QueueNotFound(queue)
    return cast("int", count)


async def read_stats(pool: ConnectionPool, queue: str, retention: Mapping[str, str]) -> QueueStats:
    """Count the messages of a queue."""
    *counts, oldest = await read_rows(pool, "stats", queue, ())
    since = min((read_enqueued_at(value) for value in cast("list[bytes]", oldest)), default=None)
    return make_stats(queue, cast("list[int]", counts), since, retention)


async def count_too_large(pool: ConnectionPool, queue: str, max_body: int | None) -> int:
    """Return how many messages are delayed because they are larger than `max_body`, up to 1000."""
    return 0 if max_body is None else len(await read_too_large(pool, queue, max_body))


async def read_too_large(pool: ConnectionPool, queue: str, max_body: int) -> list[tuple[bytes, int]]:
    """Return the ids of delayed messages that are larger than `max_body`, and their bytes."""
    found = cast("list[Any]", await pool.run_script("oversized", queue, (max_body,)))
    return list(zip(found[::2], found[1::2], strict=True))


def make_stats(queue: str, counts: Sequence[int], since: float | None, retention: Mapping[str, str]) -> QueueStats:
    """Make the counts of the script `stats`.

    Args:
        queue: Name of the queue.
        counts: The numbers of the script's answer.
        since: When the oldest ready message was enqueued.
        retention: How long the queue keeps finished messages.
    """
    ready, leased, delayed, done, failed, paused, now = counts
    return QueueStats(
        queue=queue,
        ready=ready,
        leased=leased,
        delayed=delayed,
        done=done,
        failed=failed,
        oldest_age_s=None if since is None else max(0.0, now / 1e6 - since),
        paused=bool(paused),
        retention=dict(retention),
    )


async def set_paused(pool: ConnectionPool, queue: str, paused: bool) -> None:
    """Pause or resume a queue."""
    if not await pool.run_script("create", check_existing_queue(queue), ("down" if paused else "up",)):
        raise QueueNotFound(queue)


async def make_due(pool: ConnectionPool, queue: str, message_id: str) -> bool:
    """Make a delayed message due now, by the time of the server. A client that waits sees it within a second."""
    slot = queue_slot(queue)
    seconds, microseconds = cast("list[bytes]", await pool.command(slot, "TIME"))
    now = b"%d" % (int(seconds) * 1_000_000 + int(microseconds))
    # The time is never that of before, so CH counts the message exactly if it was delayed.
    return bool(await pool.command(slot, "ZADD", queue_key(queue, "delayed"), "XX", "CH", now, message_id))


async def requeue(
    pool: ConnectionPool, queue: str, selection: Selection, stats: Callable[[str], Awaitable[QueueStats]]
) -> int:
    """Make failed messages ready again, with tries 0.

    Raises:
        AlreadyEnqueued: Another message has the unique key of one of them. The others are ready.
    """
    selection.require_failed()
    held: dict[bytes, bytes] = {}
    count = await _requeue(pool, queue, selection, stats, held)
    for key, holder in held.items():
        raise held_error(decode_key(key), decode_holder(holder))
    return count


async def _requeue(
    pool: ConnectionPool,
    queue: str,
    selection: Selection,
    stats: Callable[[str], Awaitable[QueueStats]],
    held: dict[bytes, bytes],
) -> int:
    if selection.state is not None:
        return await _count_all(pool, "requeue", queue, (), (await stats(queue)).failed, held)
    if selection.ids is not None:
        # Without an id the script would requeue the oldest messages.
        calls: list[tuple[Argument, ...]] = [
            (0, *batch) for batch in in_batches(map(encode_text, selection.ids)) if batch
        ]
    else:
        calls = [("unchanged", *ids_and_times(batch)) for batch in in_batches(selection.unchanged or ())]
    if not calls:
        await read_rows(pool, "stats", queue, ())
    return sum([await _count(pool, "requeue", queue, call, held) for call in calls])


async def free_report_holds(pool: ConnectionPool, queues: Sequence[str], queue: str, selection: Selection) -> None:
    """Free the holds of the reports of failures, so that the next failure is reported again.

    Args:
        pool: The connections of the backend.
        queues: All queues: a report is a message of any of them.
        queue: The queue of the messages that are to be requeued.
        selection: These messages.
    """
    held = [name for name in queues if await pool.command(queue_slot(name), "EXISTS", queue_key(name, "holds"))]
    if not held:
        return
    if selection.state is None:
        ids = selection.ids if selection.ids is not None else [one.id for one in selection.unchanged or ()]
    else:
        found = await pool.command(queue_slot(queue), "ZRANGE", queue_key(queue, "fail"), 0, -1)
        ids = [one.decode() for one in cast("list[bytes]", found)]
    for batch in in_batches(map(encode_text, _report_ids(ids))):
        for name in held if batch else ():
            await pool.command(queue_slot(name), "ZREM", queue_key(name, "holds"), *batch)


def _report_ids(ids: Iterable[str]) -> Iterator[str]:
    for message_id in ids:
        try:
            yield failure_id(message_id)
        except InvalidName:
            # No message has it.
            continue


async def remove(
    pool: ConnectionPool,
    queue: str,
    selection: Selection,
    stats: Callable[[str], Awaitable[QueueStats]],
    unchanged_call: Callable[[Sequence[FinishedMessage]], Call],
) -> int:
    """Delete messages.

    Args:
        pool: The connections of the backend.
        queue: Name of the queue.
        selection: The messages.
        stats: Counts the queue.
        unchanged_call: Returns the call that deletes messages which are still unchanged.
    """
    if selection.ids is not None:
        batches = in_batches(map(encode_text, selection.ids), _REMOVED)
        return sum([await _count(pool, "remove", queue, ("ids", *batch)) for batch in batches])
    if selection.unchanged is not None:
        calls = [unchanged_call(batch) for batch in in_batches(selection.unchanged)]
        return sum([await _count(pool, name, queue, arguments) for name, arguments in calls])
    state = selection.state
    assert state is not None
    found = await stats(queue)
    count = {
        State.READY: found.ready,
        State.DELAYED: found.delayed,
        State.FAILED: found.failed,
        State.LEASED: found.leased,
        State.DONE: found.done,
    }[state]
    return await _count_all(pool, "remove", queue, (state.value,), count)


async def _count_all(
    pool: ConnectionPool,
    name: str,
    queue: str,
    arguments: tuple[Argument, ...],
    there: int,
    held: dict[bytes, bytes] | None = None,
) -> int:
    """Let a script take the present messages, in batches. Later messages may stay, or this might never end."""
    total = 0
    while total < there:
        count = await _count(pool, name, queue, (*arguments, min(there - total, BATCH)), held)
        if not count:
            break
        if count != _ONLY_REMAINS:
            total += count
    return total


async def cancel(
    pool: ConnectionPool,
    queue: str,
    ids: Iterable[str],
    reason: str,
    state: State | None,
    only: Mapping[str, Cell],
) -> list[Cancelled]:
    """Move messages to failed by their ids, and return what was found.

    Args:
        pool: The connections of the backend.
        queue: Name of the queue.
        ids: The messages.
        reason: What is kept as their error.
        state: The state in which a message must be at its step. None: any.
        only: The cells, by message id, that must be unchanged at the step.
    """
    head = (reason.encode(), "" if state is None else state.value)
    conditions = {encode_text(one): (member_of(cell.group, cell.name), cell.version) for one, cell in only.items()}
    found: list[Cancelled] = []
    for batch in in_batches(map(encode_text, ids), _REMOVED):
        # Without an id the script says whether the queue exists.
        arguments = [argument for one in batch for argument in (one, *conditions.get(one, ("", "")))]
        _, *rows = await read_rows(pool, "cancel", queue, (*head, *arguments))
        for at in range(0, len(rows), 4):
            name, before, token, already = cast("tuple[bytes, bytes, bytes, int]", tuple(rows[at : at + 4]))
            found.append(Cancelled(name.decode(), State(before.decode()), int(token), bool(already)))
    return found


def discard_call(found: Sequence[FinishedMessage]) -> Call:
    """Return the call that deletes messages which are still unchanged."""
    return "discard", [argument for one in found for argument in (one.state.value, *ids_and_times([one]))]


def in_batches(chosen: Iterable[T], size: int = BATCH) -> list[list[T]]:
    """Divide the items, each once, into batches for one script call.

    There is at least one batch, because its call checks whether the queue exists.
    """
    unique = list(dict.fromkeys(chosen))
    return [unique[first : first + size] for first in range(0, max(1, len(unique)), size)]


def ids_and_times(found: Iterable[FinishedMessage]) -> list[Argument]:
    """Return the id and the time of each message, in microseconds."""
    return [argument for one in found for argument in (one.id, to_microseconds(one.finished_at) or 0)]
