"""One search at a time for each user: a search reads many messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus

from qworker.ui.page_error import PageError

__all__ = ["Busy", "Scans"]

# Seconds for which a search waits for the one before it: a page that is loaded again does not end the first one.
_PATIENCE_S = 3.0


class Busy(PageError):
    """Another search of the same user runs."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class Scans:
    """The searches that run."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def next(self, user: str) -> AsyncGenerator[None]:
        """Run the block when no other search of the user runs.

        Raises:
            Busy: It runs for long.
        """
        lock = self._locks.setdefault(user, asyncio.Lock())
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await lock.acquire()
        except TimeoutError:
            raise Busy("another search of yours is running: wait until it has ended") from None
        try:
            yield
        finally:
            lock.release()
