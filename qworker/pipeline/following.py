"""What a store that is a log offers to those who follow it: found, like a backend, by an entry point in `qworker.followers`.

Such an entry point is keyed by a URL scheme, and names a class that keeps this contract. Positions are short text without a
meaning to others; each process opens a follower of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from typing import Protocol, cast

from qworker.message import StoredMessage
from qworker.url import BackendURL

__all__ = ["GROUP", "Follower", "follower_class"]

GROUP = "qworker.followers"


class Follower(Protocol):
    """Reads one queue's log by positions, as the channel that the URL names."""

    def __init__(self, url: BackendURL, queue: str) -> None:
        """Make one, without touching the store."""
        ...

    async def open(self) -> None:
        """Open the queue, and make it and the channel where they are absent."""
        ...

    async def aclose(self) -> None:
        """Let go of everything. Idempotent."""
        ...

    async def begin(self, where: str) -> str:
        """The position of the first message that the `channel` has not finished, or that is kept at all (`earliest`), or the end (`latest`)."""
        ...

    async def end(self) -> str:
        """The position behind the last message that is there."""
        ...

    async def ahead(self, start: str, limit: int, end: str) -> str:
        """The position behind the next `limit` messages, or `end` where there are fewer before it."""
        ...

    async def divide(self, start: str, end: str, wanted: int) -> list[str]:
        """About `wanted` parts that together hold every message between two positions once."""
        ...

    def read(self, part: str) -> AsyncIterator[list[StoredMessage]]:
        """The messages of a part, in order and in pages: the same ones whenever it is asked, until `commit` lets them go."""
        ...

    async def commit(self, end: str) -> None:
        """Say that everything before a position is finished for the channel."""
        ...


def follower_class(scheme: str) -> type[Follower] | None:
    """What follows the logs of a scheme; None: its stores are no logs."""
    for point in entry_points(group=GROUP, name=scheme):
        return cast("type[Follower]", point.load())
    return None
