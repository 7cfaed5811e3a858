"""All messages of a queue that wait or are leased, also while one becomes due."""

from __future__ import annotations

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.message import Query, State, StoredMessage

# A delayed message is ready when it is due: listed in this order, it is found once or twice, and never missed.
_STATES = (State.DELAYED, State.READY, State.LEASED)


async def pending(backend: Backend, queue: str) -> dict[str, StoredMessage]:
    """The messages that wait or are leased, by their ids. No worker may run."""
    found = [stored for state in _STATES for stored in await list_messages(backend, queue, Query(state))]
    return {stored.message.id: stored for stored in found}
