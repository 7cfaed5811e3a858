"""Where the samples of a queue are stored: a block of bytes for each queue, next to the messages or in memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

__all__ = ["MemorySamples", "SampleStore"]


class SampleStore(Protocol):
    """Blocks of bytes, by queue. No message depends on them. Nothing is synced."""

    async def read(self, queue: str, offset: int, size: int) -> bytes:
        """Return bytes of a block, fewer if it ends before, and none if there is no block.

        Raises:
            BackendError: It cannot be read.
        """
        ...

    async def write(self, queue: str, offset: int, data: bytes) -> None:
        """Write bytes into a block. A block that does not exist is created, and filled with zeros up to `offset`.

        Raises:
            BackendError: It cannot be written.
        """
        ...

    def lock(self, queue: str) -> AbstractContextManager[bool]:
        """Lock a block until the end of the `with` block. It ends with the process.

        Yields:
            False if another process has the lock.

        Raises:
            BackendError: It cannot be locked.
        """
        ...


class MemorySamples:
    """Blocks in the memory of this process."""

    def __init__(self) -> None:
        self._blocks: dict[str, bytearray] = {}

    async def read(self, queue: str, offset: int, size: int) -> bytes:
        """Return bytes of a block."""
        return bytes(self._blocks.get(queue, b"")[offset : offset + size])

    async def write(self, queue: str, offset: int, data: bytes) -> None:
        """Write bytes into a block."""
        block = self._blocks.setdefault(queue, bytearray())
        block.extend(bytes(max(0, offset - len(block))))
        block[offset : offset + len(data)] = data

    @contextmanager
    def lock(self, queue: str) -> Generator[bool]:
        """Yield True: no other process has this block."""
        del queue
        yield True
