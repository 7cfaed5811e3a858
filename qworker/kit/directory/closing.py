"""What happens with a directory that was removed or replaced: it is reported, and its descriptors are closed later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from qworker import log_events as events

__all__ = ["CLOSE_AFTER", "LateCloser", "log_replaced"]

# Seconds after which the descriptors of a directory that was replaced are closed: the number of a descriptor that a
# running call still uses must not become that of another directory.
CLOSE_AFTER = 10.0


class LateCloser:
    """Closes what was replaced, after the calls that still use it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, close: Callable[[], Awaitable[None]], is_used: Callable[[], bool] = lambda: False) -> None:
        """Close something later.

        Args:
            close: Closes it.
            is_used: Returns whether it must stay open longer.
        """
        task = asyncio.get_running_loop().create_task(_close_unused(close, is_used))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close everything now."""
        # A task that has not begun would be cancelled before it can close anything.
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _close_unused(close: Callable[[], Awaitable[None]], is_used: Callable[[], bool]) -> None:
    try:
        await asyncio.sleep(CLOSE_AFTER)
        while is_used():
            await asyncio.sleep(CLOSE_AFTER)
    finally:
        await close()


def log_replaced(directory: str) -> None:
    """Log that a directory was removed or replaced, and that the one with its path is used from now on."""
    structlog.get_logger("qworker.directory").warning(events.DIRECTORY_REPLACED, directory=directory)
