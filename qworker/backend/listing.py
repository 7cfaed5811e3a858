"""List all messages of a query at once."""

from __future__ import annotations

from qworker.backend.contract import Backend
from qworker.message import Query, StoredMessage

__all__ = ["list_messages"]


async def list_messages(backend: Backend, queue: str, query: Query) -> list[StoredMessage]:
    """Return all messages of a query in one list. Use it for a small state, or for a query with a limit.

    Args:
        backend: The backend.
        queue: The name of the queue.
        query: The messages to return.

    Raises:
        QueueNotFound: The queue does not exist.
    """
    return [stored async for page in backend.browse(queue, query) for stored in page]
