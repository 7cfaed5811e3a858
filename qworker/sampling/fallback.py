"""Samples that stay in memory while they cannot be stored, such as in a directory that this user may only read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from qworker.backend.each_queue import describe_problem
from qworker.clock import Clock
from qworker.kit.samples import MemorySamples, SampleStore
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["FallbackSamples"]

T = TypeVar("T")

# Seconds after which a store that failed is tried again.
_PAUSE = 30.0


class FallbackSamples:
    """The samples of a store, or of this process while the store fails.

    Args:
        store: The store. None: it keeps no samples.
        clock: The clock.

    Attributes:
        problem: Why the samples are in memory. None: they are stored, or there is no store.
    """

    def __init__(self, store: SampleStore | None, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._memory = MemorySamples()
        self.problem: str | None = None
        # Monotonic seconds: the store is not used before.
        self._retry_at = float("-inf")

    async def read(self, queue: str, offset: int, size: int) -> bytes:
        """Return bytes of a block."""
        return await self._use(lambda store: store.read(queue, offset, size))

    async def write(self, queue: str, offset: int, data: bytes) -> None:
        """Write bytes into a block."""
        await self._use(lambda store: store.write(queue, offset, data))

    @contextmanager
    def lock(self, queue: str) -> Generator[bool]:
        """Lock a block. A block in memory has no other user."""
        with ExitStack() as stack:
            is_free = True
            store = self._usable()
            if store is not None:
                # Errors of the `with` block are not those of the lock.
                try:
                    is_free = stack.enter_context(store.lock(queue))
                except BACKEND_ERRORS as error:
                    self._fail(error)
            yield is_free

    async def _use(self, call: Callable[[SampleStore], Awaitable[T]]) -> T:
        store = self._usable()
        if store is not None:
            try:
                result = await call(store)
            except BACKEND_ERRORS as error:
                self._fail(error)
            else:
                self.problem = None
                return result
        return await call(self._memory)

    def _usable(self) -> SampleStore | None:
        return self._store if self._clock.monotonic() >= self._retry_at else None

    def _fail(self, error: Exception) -> None:
        self.problem = describe_problem(error)
        self._retry_at = self._clock.monotonic() + _PAUSE
