"""Waiting for a condition, with a deadline that only a failure reaches."""

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
    """Poll `condition` until its result (awaited, if it is awaitable) is true, and return that result.

    Args:
        condition: Called about every 10 ms.
        timeout: Seconds of real time after which the condition is taken to have failed; generous, for it costs nothing.
        what: What was waited for, told when it fails.

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
