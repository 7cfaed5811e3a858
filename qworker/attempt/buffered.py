"""The hook that buffers the calls of a handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from qworker.attempt.hooks import Attempt, Hook
from qworker.enqueue.buffer import buffered, buffered_sync

__all__ = ["Buffered"]


class Buffered(Hook):
    """Sends the calls that a handler enqueues when it has returned, before its message is acked.

    If the handler raises, they are dropped. If they cannot be sent, the attempt fails.
    """

    async def around(self, attempt: Attempt, go: Callable[[], Awaitable[object]]) -> object:
        """Collect the calls of an `async def` handler."""
        async with buffered(None):
            return await go()

    def around_sync(self, attempt: Attempt) -> Iterator[None]:
        """Collect the calls of a plain function."""
        with buffered_sync(None):
            yield
