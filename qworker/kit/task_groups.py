"""Background tasks of a block of code, and races of two, on anyio's task groups and cancel scopes.

anyio cancels by level, asyncio by edge: a cancelled scope cancels its tasks again in each turn of the loop until they
end. So a clean-up that awaits must be shielded (`anyio.CancelScope(shield=True)`), or it is cut short.
"""

from __future__ import annotations

import asyncio
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
    ending: Callable[[], Coroutine[Any, Any, Any]],
    work: Awaitable[T],
    undo: Callable[[T], Awaitable[Any]] | None = None,
) -> T | None:
    """Return the result of `work`, or None if `ending` returns before. Then `work` is cancelled.

    Args:
        ending: Waits for the end.
        work: What to wait for.
        undo: Called with a result that arrived after all when `ending` had returned. It runs to its end, also if this
            call is cancelled in the meantime.
    """
    result: T | None = None
    end = asyncio.create_task(ending())
    try:
        # Not a task group, which costs four times as much: an HTTP client that waits for a message passes here.
        with anyio.CancelScope() as scope:
            end.add_done_callback(lambda _: scope.cancel())
            result = await work
    finally:
        ended = end.done()
        end.cancel()
    if not ended:
        return result
    if result is not None and undo is not None:
        await _finish(undo(result))
    # It raises the error of `ending`, if there is one.
    end.result()
    return None


async def _finish(work: Awaitable[Any]) -> None:
    """Wait until some work has ended. A cancellation of this call is raised after that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    # `Task.cancel` passes through the shield, which stops only scopes.
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
