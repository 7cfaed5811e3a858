"""Background tasks of a block of code, and races of two, on anyio's task groups.

anyio cancels by level, asyncio by edge: a cancelled scope cancels its tasks again in each turn of the loop until they
end. So a clean-up that awaits must be shielded (`anyio.CancelScope(shield=True)`), or it is cut short. A task group
costs about 14 us, so no loop of a worker makes one for a message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

__all__ = ["background_tasks", "run_until"]

T = TypeVar("T")


@asynccontextmanager
async def background_tasks(*functions: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncGenerator[TaskGroup]:
    """Run functions as tasks while the block runs, and cancel them at its end.

    If one fails, the block and the other tasks are cancelled. The first error is raised as it is, not in a group.
    """
    first: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            for function in functions:
                group.start_soon(function)
            yield group
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    # Outside of `except`, so that the error keeps its own cause and context.
    if first is not None:
        raise first


async def run_until(
    ending: Callable[[], Awaitable[Any]],
    work: Awaitable[T],
    undo: Callable[[T], Awaitable[Any]] | None = None,
) -> T | None:
    """Return the result of `work`, or None if `ending` returns before. Then `work` is cancelled.

    Args:
        ending: Waits for the end.
        work: What to wait for.
        undo: Called with a result that is not returned, because `ending` returned or the caller was cancelled in the
            same turn of the loop.
    """
    result: T | None = None
    ended, received = False, False

    async def watch() -> None:
        nonlocal ended
        await ending()
        ended = True
        group.cancel_scope.cancel()

    try:
        async with background_tasks(watch) as group:
            result = await work
        received = not ended
    finally:
        if result is not None and not received and undo is not None:
            with anyio.CancelScope(shield=True):
                await undo(result)
    return result if received else None
