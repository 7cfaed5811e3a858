"""Waiting until an asyncio task waits for something itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

__all__ = ["wait_until_blocked", "waits_for"]

# Turns of the loop for which a task must have waited for the same future. In each of them the loop runs every callback that is ready
# and polls its sockets: a task that could go on has gone on by then.
_TURNS = 10


def waits_for(task: asyncio.Future[Any]) -> asyncio.Future[Any] | None:
    """Return the future that a task waits for, through all tasks that it awaits. None: it can go on, or has ended."""
    waiter: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, asyncio.Task) and not waiter.done():
        return waits_for(waiter)
    return None if waiter is None or waiter.done() else waiter


async def wait_until_blocked(task: asyncio.Future[Any], timeout: float = 20.0) -> bool:
    """Let the event loop run until `task` waits for a future that is not done.

    The call does not sleep: it gives the loop its turns, and returns when the task has waited for the same future in several
    of them. What that future stands for is not known: an event, a timer, a thread or a socket.

    Args:
        task: A task of the running loop.
        timeout: Seconds of real time in which the task must have come to a halt; only a failure reaches them.

    Returns:
        Whether the task waits. False: it has ended.

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
