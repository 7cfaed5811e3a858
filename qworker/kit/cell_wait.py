"""Waiting for cells: subscribe, look, sleep. The wake-ups are hints, so a wait also looks from time to time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

__all__ = ["first_of", "wait_for_change"]

# Seconds between two looks.
_LOOK_EVERY = 1.0


async def wait_for_change(look: Callable[[], Awaitable[bool]], woken: asyncio.Event, timeout: float) -> None:
    """Wait until a look finds a change, for up to `timeout` seconds.

    Args:
        look: Subscribes to the cells as far as they exist, then returns whether one has changed.
        woken: Set when one of them may have changed.
        timeout: Seconds to wait.
    """
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout
    while True:
        woken.clear()
        if await look():
            return
        left = ends - loop.time()
        if left <= 0:
            return
        try:
            async with asyncio.timeout(min(left, _LOOK_EVERY)):
                await woken.wait()
        except TimeoutError:
            continue


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of some waits ends. The others are cancelled.

    Raises:
        BaseException: The error of a wait that has ended.
    """
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        # Not `gather`: if this call is cancelled too, the tasks are waited for all the same.
        await asyncio.wait(tasks)
    for task in ended:
        task.result()
