"""Looks at messages by their ids and their task: so a store that lists its messages does not list what is ready."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.backend import Backend
from qworker.errors import QueueNotFound
from qworker.message import MessageRef, StoredMessage

__all__ = ["find_message", "find_messages"]


async def find_message(backend: Backend, queue: str, message_id: str, task: str | None) -> StoredMessage | None:
    """Return a message by its id, or None if it is not stored.

    Args:
        backend: The store.
        queue: The queue.
        message_id: The message's id.
        task: The name of its task, if it is known.
    """
    return (await find_messages(backend, queue, [message_id], task)).get(message_id)


async def find_messages(backend: Backend, queue: str, ids: Sequence[str], task: str | None) -> dict[str, StoredMessage]:
    """Return those messages that are stored, by their ids. See `find_message`."""
    try:
        found = await backend.find(queue, [MessageRef(one, task) for one in ids])
    except QueueNotFound:
        return {}
    return {one.message.id: one for one in found}
