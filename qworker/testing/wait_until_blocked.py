"""Wait in tests until an asyncio task is blocked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

__all__ = ["wait_until_blocked", "waits_for"]

# The number of turns of the loop for which a task must wait for the same future. In each turn the loop runs every ready
# callback and polls its sockets, so a task that can continue has continued by then.
_TURNS = 10


def waits_for(task: asyncio.Future[Any]) -> asyncio.Future[Any] | None:
    """Return the future that a task waits for, through all tasks that it awaits. None: it can run, or has ended."""
    waiter: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, asyncio.Task) and not waiter.done():
        return waits_for(waiter)
    return None if waiter is None or waiter.done() else waiter


async def wait_until_blocked(task: asyncio.Future[Any], timeout: float = 20.0) -> bool:
    """Let the event loop run until `task` waits for a future that is not done.

    The call does not sleep. It lets the loop run, and returns when the task has waited for the same future for several
    turns. The future can be of an event, a timer, a thread or a socket.

    Args:
        task: A task of the running loop.
        timeout: Seconds of real time to wait. Only a failing test waits that long.

    Returns:
        True if the task waits, False if it has ended.

    Raises:
        AssertionError: The task still runs after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    before, turns = waits_for(task), 0
    while not task.done():
        await asyncio.sleep(0)
        now = waits_for(task)
        turns = turns + 1 if now is not None and now is before else 0
        if turns >= _TURNS:
            return True
        if time.monotonic() >= deadline:
            raise AssertionError(f"not blocked within {timeout} s: {task!r}")
        before = now
    return False
