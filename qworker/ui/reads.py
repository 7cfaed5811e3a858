"""The search for an id in many queues, with a limit of time for each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from qworker.backend import Backend
from qworker.errors import QueueNotFound, QworkerError
from qworker.message import MessageRef, StoredMessage
from qworker.names import id_forms

__all__ = ["Place", "find_everywhere"]

# Seconds for the search in one queue.
_PATIENCE_S = 2.0
# Queues that are searched at once.
_AT_ONCE = 8


class Place(msgspec.Struct, frozen=True):
    """What a search has found in one queue.

    Attributes:
        queue: The queue.
        stored: The message.
    """

    queue: str
    stored: StoredMessage


async def find_everywhere(
    backend: Backend, queues: Mapping[str, Sequence[str]], message_id: str
) -> tuple[list[Place], list[str]]:
    """Search for an id in many queues.

    Args:
        backend: The open backend.
        queues: The names of the tasks of each queue, as far as they are known.
        message_id: The id.

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
                    refs = [MessageRef(form, perhaps=tuple(queues[queue])) for form in forms]
                    places.extend(Place(queue, stored) for stored in (await backend.find(queue, refs))[:1])
            except QueueNotFound:
                # It was deleted meanwhile.
                return
            except (QworkerError, OSError, TimeoutError):
                unknown.append(queue)

    await asyncio.gather(*map(search, queues))
    return sorted(places, key=lambda place: place.queue), sorted(unknown)
