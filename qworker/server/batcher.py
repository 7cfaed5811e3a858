"""Combine requests of many connections into few calls of the backend.

The requests that arrive while one call runs are the next call. With a backend that syncs, this is the server's half of
the group commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Batcher"]

A = TypeVar("A")
R = TypeVar("R")


class Batcher(Generic[A, R]):
    """A collector of calls by queue.

    Args:
        call: A function that takes a queue and the arguments of several calls, and returns a result for each.
        most: Maximum number of arguments in one call.
    """

    def __init__(self, call: Callable[[str, Sequence[A]], Awaitable[Sequence[R]]], most: int = 256) -> None:
        self._call = call
        self._most = most
        self._waiting: dict[str, deque[tuple[A, asyncio.Future[R]]]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def add(self, queue: str, argument: A) -> R:
        """Return the result for one argument."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(queue)
        if waiting is None:
            self._waiting[queue] = deque([(argument, future)])
            task = asyncio.create_task(self._run(queue))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            waiting.append((argument, future))
        return await future

    async def _run(self, queue: str) -> None:
        waiting = self._waiting[queue]
        try:
            while waiting:
                batch = [waiting.popleft() for _ in range(min(len(waiting), self._most))]
                await self._one(queue, batch)
        finally:
            del self._waiting[queue]
            # The task was cancelled, and no other task will complete these futures.
            for _, future in waiting:
                future.cancel()

    async def _one(self, queue: str, batch: list[tuple[A, asyncio.Future[R]]]) -> None:
        try:
            results = await self._call(queue, [argument for argument, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 each caller gets it
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def aclose(self) -> None:
        """Wait for the running calls."""
        while self._running:
            await asyncio.wait(self._running)
