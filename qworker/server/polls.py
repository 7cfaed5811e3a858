"""The requests that wait, until their client disconnects or the server ends."""

from __future__ import annotations

import asyncio
from typing import Any

from qworker.asgi.interface import Receive, wait_for_disconnect

__all__ = ["Polls"]


class Polls:
    """The requests that wait."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._is_ended = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait_for_end(self, receive: Receive) -> None:
        """Return when the client of a request disconnects, or when the server ends. In a task of its own."""
        if self._is_ended:
            return
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            await wait_for_disconnect(receive)
        except asyncio.CancelledError:
            if not self._is_ended:
                raise
        finally:
            self._waiting.discard(task)

    def end(self) -> None:
        """End the waits of all requests, and of those that come."""
        self._is_ended = True
        for task in self._waiting:
            task.cancel()
