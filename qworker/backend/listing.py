"""All messages of a query in one list."""

from __future__ import annotations

from qworker.backend.contract import Backend
from qworker.message import Query, StoredMessage

__all__ = ["list_messages"]


async def list_messages(backend: Backend, queue: str, query: Query) -> list[StoredMessage]:
    """Everything that a query gives, in one list: for a state that is known to be small, or a query with a limit.

    Args:
        backend: Where the queue is.
        queue: Its name.
        query: What is wanted.

    Raises:
        QueueNotFound: There is no such queue.
    """
    return [stored async for page in backend.browse(queue, query) for stored in page]
