"""Reads of many messages, each bounded: groups of failures, the messages of a group, and a search by id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from qworker.backend import Backend
from qworker.errors import QueueNotFound, QworkerError
from qworker.failures.groups import FailureGroup, GroupCounts, GroupedFailures, group_of
from qworker.message import Query, State, StoredMessage
from qworker.names import id_forms

__all__ = ["MOST_FAILURES", "FoundGroup", "Place", "find_everywhere", "read_group", "read_groups"]

# Failed messages of a queue that are read, the newest first.
MOST_FAILURES = 20_000
# Messages of a group that are shown.
_MOST_SHOWN = 50
# Seconds for the search in one queue.
_PATIENCE_S = 2.0
# Queues that are searched at once.
_AT_ONCE = 8


class FoundGroup(msgspec.Struct, frozen=True):
    """The messages of one group in one queue.

    Attributes:
        group: The group. None: no message of it was found.
        count: Number of messages that were found.
        newest: The newest of them.
    """

    group: FailureGroup | None
    count: int
    newest: list[StoredMessage]


class Place(msgspec.Struct, frozen=True):
    """What a search has found in one queue.

    Attributes:
        queue: The queue.
        stored: The message.
    """

    queue: str
    stored: StoredMessage


async def read_groups(backend: Backend, queue: str) -> list[GroupCounts]:
    """Return the groups of the newest failed messages of a queue, the largest first."""
    grouped = GroupedFailures()
    async for page in backend.browse(queue, Query(State.FAILED, limit=MOST_FAILURES, newest=True)):
        for stored in page:
            grouped.add(stored)
        # A page may be read without a wait. Others use this event loop too.
        await asyncio.sleep(0)
    return grouped.largest()


async def read_group(backend: Backend, queue: str, key: str) -> FoundGroup:
    """Return the newest messages of one group of a queue, and how many the newest failures have."""
    group: FailureGroup | None = None
    newest: list[StoredMessage] = []
    count = 0
    async for page in backend.browse(queue, Query(State.FAILED, limit=MOST_FAILURES, newest=True)):
        for stored in page:
            found = group_of(stored)
            if found.key == key:
                group, count = found, count + 1
                if len(newest) < _MOST_SHOWN:
                    newest.append(stored)
        await asyncio.sleep(0)
    return FoundGroup(group, count, newest)


async def find_everywhere(backend: Backend, queues: Sequence[str], message_id: str) -> tuple[list[Place], list[str]]:
    """Search for an id in many queues.

    Returns:
        The queues that have it, and those that did not answer in time or cannot be used.

    Raises:
        InvalidName: The id is empty, or is not valid Unicode.
    """
    forms = id_forms(message_id)
    places: list[Place] = []
    unknown: list[str] = []
    room = asyncio.Semaphore(_AT_ONCE)

    async def search(queue: str) -> None:
        async with room:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    places.extend(Place(queue, stored) for stored in (await backend.find(queue, forms))[:1])
            except QueueNotFound:
                # It was deleted meanwhile.
                return
            except (QworkerError, OSError, TimeoutError):
                unknown.append(queue)

    await asyncio.gather(*map(search, queues))
    return sorted(places, key=lambda place: place.queue), sorted(unknown)
