"""Looks at one message, by its id and its task: on a store that lists its messages this costs the least."""

from __future__ import annotations

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.message import StoredMessage

__all__ = ["find_message"]


async def find_message(backend: Backend, queue: str, message_id: str, task: str | None) -> StoredMessage | None:
    """Return a message by its id, or None if it is not stored.

    Args:
        backend: The store.
        queue: The queue.
        message_id: The message's id.
        task: The name of its task, if it is known.
    """
    try:
        found = await backend.find(queue, [message_id])
    except QueueNotFound:
        return None
    return found[0] if found else None
