"""Wait for a condition in tests."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

__all__ = ["wait_until"]

T = TypeVar("T")


@overload
async def wait_until(condition: Callable[[], Awaitable[T]], timeout: float = 20.0, *, what: str = "") -> T: ...


@overload
async def wait_until(condition: Callable[[], T], timeout: float = 20.0, *, what: str = "") -> T: ...


async def wait_until(condition: Callable[[], Any], timeout: float = 20.0, *, what: str = "") -> Any:
    """Poll a condition until its result is true, and return the result.

    Args:
        condition: A function, which is called about every 10 ms. If its result is awaitable, it is awaited.
        timeout: Seconds of real time to wait. Use a long one: only a failing test waits that long.
        what: A description of the condition, for the error.

    Raises:
        AssertionError: The condition was still false after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        result = await found if inspect.isawaitable(found) else found
        if result:
            return result
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}; last result: {result!r}")
        await asyncio.sleep(0.01)
