"""Read, requeue and remove all failed messages that match a filter, in bounded memory.

Each message is read, compared with the filter, and then changed only if it is still as it was read: the store compares
and changes it in one step. Messages that fail after the start are not changed. So a message that is requeued here and
fails again is not requeued a second time. If the process is killed, the same call does the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.errors import AlreadyEnqueued
from qworker.failure_text import code_of
from qworker.failures.groups import GroupCounts, GroupedFailures, finished_message, group_of
from qworker.failures.message_filter import MessageFilter
from qworker.jobs.cancel import finish_all_cancels
from qworker.jobs.source import JobSource
from qworker.message import FinishedMessage, Query, Selection, State, StoredMessage

__all__ = [
    "Batch",
    "Requeued",
    "browse_matching",
    "count_groups",
    "count_matching",
    "list_matching",
    "remove_in_batches",
    "remove_matching",
    "requeue_in_batches",
    "requeue_matching",
    "until_now",
]

# About this many messages are listed at a time: a store lists the names of a part before it reads the messages.
_PART = 50_000
# Messages that are compared before other tasks of the loop run, and that are changed in one call.
_BATCH = 500
# Groups that are counted.
_MOST_GROUPS = 10_000
# Failures that a requeue leaves out unless they are named: the message may kill workers, or was stopped on purpose.
_LEFT_OUT = frozenset({"poison", "cancelled"})


class Requeued(msgspec.Struct, frozen=True):
    """The result of `requeue_matching`.

    Attributes:
        count: Number of messages that are ready again.
        left_out: Number of messages that match and were left out, by their code: `poison` and `cancelled`, unless the
            filter names codes or groups.
    """

    count: int
    left_out: Mapping[str, int] = {}


class Batch(msgspec.Struct, frozen=True):
    """What was done with some of the messages that match.

    Attributes:
        changed: Number of messages that were requeued or deleted.
        unchanged: Number of messages that were found, but had changed before they could be, or were refused.
        left_out: See `Requeued`.
        refused: Another message has the unique key of one of them.
    """

    changed: int
    unchanged: int = 0
    left_out: Mapping[str, int] = {}
    refused: AlreadyEnqueued | None = None


async def browse_matching(
    backend: Backend, queue: str, state: State, matching: MessageFilter
) -> AsyncGenerator[list[StoredMessage]]:
    """Yield the messages in a state that match, in any order, in lists of bounded size.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    stats = await backend.stats(queue)
    for part in await backend.parts(queue, state, 1 + stats.count(state) // _PART):
        async for page in backend.browse(queue, Query(state, part)):
            for begin in range(0, len(page), _BATCH):
                found = [stored for stored in page[begin : begin + _BATCH] if matching.matches(stored)]
                if found:
                    yield found
                await asyncio.sleep(0)


async def list_matching(backend: Backend, queue: str, query: Query, matching: MessageFilter) -> list[StoredMessage]:
    """Return the messages of a query that match, in its order. The limit of the query is that of the list.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    if matching.is_empty:
        return await list_messages(backend, queue, query)
    found: list[StoredMessage] = []
    # Each look lists the state and reads a part of it. The parts grow, so that few looks read far. Leased messages
    # are few, and their places change meanwhile.
    looked = None if query.state is State.LEASED else _BATCH
    while True:
        page = await list_messages(backend, queue, msgspec.structs.replace(query, limit=looked))
        found += filter(matching.matches, page)
        if looked is None or len(page) < looked or (query.limit is not None and len(found) >= query.limit):
            return found[: query.limit]
        query = msgspec.structs.replace(query, after=page[-1].position)
        looked = min(2 * looked, _PART)


async def until_now(backend: Backend, queue: str, matching: MessageFilter) -> MessageFilter:
    """Return the filter without the messages that will fail after this call, by the times of the store.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    newest = await list_messages(backend, queue, Query(State.FAILED, limit=1, newest=True))
    last = newest[0].finished_at if newest else 0.0
    if last is None or (matching.until is not None and matching.until <= last):
        return matching
    return msgspec.structs.replace(matching, until=last)


async def count_matching(backend: Backend, queue: str, matching: MessageFilter) -> int:
    """Return the number of failed messages that match.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    return sum([len(found) async for found in browse_matching(backend, queue, State.FAILED, matching)])


async def count_groups(backend: Backend, queue: str, matching: MessageFilter) -> list[GroupCounts]:
    """Return the groups of the failed messages that match, the largest first.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    groups = GroupedFailures(GroupCounts, _MOST_GROUPS)
    async for found in browse_matching(backend, queue, State.FAILED, matching):
        for stored in found:
            groups.add(group_of(stored), stored)
    return groups.largest()


async def requeue_matching(
    backend: Backend, source: JobSource, queue: str, matching: MessageFilter, *, dry_run: bool = False
) -> Requeued:
    """Make the failed messages that match ready again.

    Args:
        backend: The store.
        source: The app, for cancels that were begun.
        queue: The queue.
        matching: The filter.
        dry_run: Whether to count only.

    Raises:
        QueueNotFound: The queue does not exist.
        NotSupported: The store cannot requeue messages.
        AlreadyEnqueued: Another message has the unique key of one of them. All others are ready.
    """
    count = 0
    refused: AlreadyEnqueued | None = None
    left_out: Counter[str] = Counter()
    async for batch in requeue_in_batches(backend, source, queue, matching, dry_run=dry_run):
        count += batch.changed
        refused = refused or batch.refused
        left_out.update(batch.left_out)
    if refused is not None:
        raise refused
    return Requeued(count, left_out)


async def requeue_in_batches(
    backend: Backend, source: JobSource, queue: str, matching: MessageFilter, *, dry_run: bool = False
) -> AsyncGenerator[Batch]:
    """Do the same, and yield after each batch. A caller that stops there has requeued the batches so far.

    Raises:
        QueueNotFound: The queue does not exist.
        NotSupported: The store cannot requeue messages.
    """
    if not dry_run:
        await finish_all_cancels(backend, source, queue)
    left_codes = frozenset[str]() if matching.codes or matching.groups else _LEFT_OUT
    async for found in browse_matching(backend, queue, State.FAILED, await until_now(backend, queue, matching)):
        codes = [code_of(stored.error) for stored in found]
        left_out = Counter(code for code in codes if code in left_codes)
        chosen = [finished_message(stored) for stored, code in zip(found, codes, strict=True) if code not in left_codes]
        if dry_run:
            yield Batch(len(chosen), 0, left_out)
            continue
        try:
            changed, refused = await backend.requeue(queue, Selection(unchanged=chosen)), None
        except AlreadyEnqueued as error:
            changed, refused = len(chosen) - await _count_unchanged(backend, queue, chosen), error
        yield Batch(changed, len(chosen) - changed, left_out, refused)


async def _count_unchanged(backend: Backend, queue: str, chosen: Sequence[FinishedMessage]) -> int:
    stored = {one.message.id: one for one in await backend.find(queue, [one.id for one in chosen])}
    return sum(one.matches(stored.get(one.id)) for one in chosen)


async def remove_matching(backend: Backend, queue: str, matching: MessageFilter) -> int:
    """Delete the failed messages that match, and return their number.

    Raises:
        QueueNotFound: The queue does not exist.
        NotSupported: The store cannot remove messages.
    """
    return sum([batch.changed async for batch in remove_in_batches(backend, queue, matching)])


async def remove_in_batches(backend: Backend, queue: str, matching: MessageFilter) -> AsyncGenerator[Batch]:
    """Do the same, and yield after each batch. A caller that stops there has deleted the batches so far.

    Raises:
        QueueNotFound: The queue does not exist.
        NotSupported: The store cannot remove messages.
    """
    async for found in browse_matching(backend, queue, State.FAILED, await until_now(backend, queue, matching)):
        changed = await backend.remove(queue, Selection(unchanged=[finished_message(stored) for stored in found]))
        yield Batch(changed, len(found) - changed)
