"""Group commit: items that arrive while one batch for a queue is being sent become the next batch.

One batch at a time keeps the order of a publisher over reconnections. It also lets the server keep the answer of the
last batch only, under the key `mark:...`. If an answer was lost, the batch is sent again with the same sequence number,
and the server returns that answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["BatchSender", "RetryToken"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class RetryToken:
    """The keys and numbers under which the server keeps the answer of the last batch of one sender.

    Args:
        name: A name that no other sender has, in any process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._epoch = 0
        self._sequence = 0
        # The part of the Redis key.
        self.key = f"mark:{name}:0"

    def next(self) -> str:
        """Return the sequence number of a new batch."""
        self._sequence += 1
        return str(self._sequence)

    def keep(self) -> None:
        """Keep the last answer, because it may be requested later. The next answers get another key."""
        self._epoch += 1
        self.key = f"mark:{self._name}:{self._epoch}"


class BatchSender(Generic[Item, Result]):
    """Sends batches of one kind for one queue, one after another.

    Args:
        send: Sends a batch and returns one result for each item.
        size: Returns the size of an item.
        limit: The largest size of a batch.
    """

    def __init__(
        self, send: Callable[[Sequence[Item]], Awaitable[list[Result]]], size: Callable[[Item], int], limit: int
    ) -> None:
        self._send = send
        self._size = size
        self._limit = limit
        self._waiting: list[tuple[Sequence[Item], asyncio.Future[list[Result]]]] = []
        self._busy = False
        self._drainer: asyncio.Task[None] | None = None

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """Send items and return their results, in order."""
        if self._busy:
            future: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
            self._waiting.append((items, future))
            return await future
        self._busy = True
        try:
            return await (self._send(items) if len(items) == 1 else self._send_all(items))
        finally:
            self._send_next()

    def _send_next(self) -> None:
        if self._waiting:
            self._drainer = asyncio.create_task(self._drain())
        else:
            self._busy = False

    async def _drain(self) -> None:
        """Send the items that have arrived in the meantime, until there are none."""
        try:
            while self._waiting:
                gathered, self._waiting = self._waiting, []
                # The items of a call that was cancelled while it waited are not sent.
                gathered = [(items, future) for items, future in gathered if not future.done()]
                await self._send_gathered(gathered)
        finally:
            self._busy = False
            for _, future in self._waiting:
                future.cancel()
            self._waiting = []

    async def _send_gathered(self, gathered: list[tuple[Sequence[Item], asyncio.Future[list[Result]]]]) -> None:
        try:
            results = await self._send_all([item for items, _ in gathered for item in items])
        except asyncio.CancelledError:
            for _, future in gathered:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - every error goes to the callers that wait
            for _, future in gathered:
                if not future.done():
                    future.set_exception(error)
            return
        at = 0
        for items, future in gathered:
            if not future.done():
                future.set_result(results[at : at + len(items)])
            at += len(items)

    async def _send_all(self, items: Sequence[Item]) -> list[Result]:
        results: list[Result] = []
        batch: list[Item] = []
        held = 0
        for item in items:
            size = self._size(item)
            if batch and held + size > self._limit:
                results += await self._send(batch)
                batch, held = [], 0
            batch.append(item)
            held += size
        if batch:
            results += await self._send(batch)
        return results
