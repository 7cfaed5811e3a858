"""The memory of bodies: those that requests bring, and those that responses carry.

A body that arrives in parts is in a temporary file until it is complete. Only a complete body takes memory, from a
budget. Requests that find no room wait, and are refused if that takes long.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from types import TracebackType
from typing import BinaryIO, cast

from qworker.asgi.interface import BodyTooLarge, Disconnected, Headers, Receive, Scope, Send, get_header, respond
from qworker.errors import BackendError
from qworker.kit.body_slices import ON_LOOP
from qworker.kit.store_errors import store_errors
from qworker.kit.threads import BlockingCall, run_in_thread

__all__ = ["DEFAULT_BODY_LIMIT", "DEFAULT_MEMORY", "IncomingBody", "MemoryBudget", "ServerBusy", "respond_in_parts"]

# Bytes.
DEFAULT_MEMORY = 128 << 20
DEFAULT_BODY_LIMIT = 1 << 20
# A body of at most this size stays in memory while it arrives.
_SMALL = 1 << 16
# The share of the budget in which larger bodies can stay in memory while they arrive.
_SHARE = 0.25
_LARGE = 1.5
# Seconds that a request waits for memory, and how many requests can wait.
_PATIENCE = 10.0
_MOST_WAITING = 200
# Bytes of a response that are sent at once.
_PART = 1 << 18


class ServerBusy(BackendError):
    """The server has no memory for a request now."""

    def __init__(self) -> None:
        super().__init__("the server has no memory for this request now: try again, or raise --memory of the server")


class MemoryBudget:
    """A number of bytes that bodies share.

    Args:
        total: The number of bytes. A larger body gets all of them.
        body_limit: Maximum bytes of a message's body.
        patience: Seconds that a request waits.
    """

    def __init__(
        self, total: int = DEFAULT_MEMORY, body_limit: int = DEFAULT_BODY_LIMIT, *, patience: float = _PATIENCE
    ) -> None:
        self.total = total
        self.body_limit = body_limit
        self._patience = patience
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def batch(self, most: int) -> int:
        """Return how many bodies of the largest size at most one call may have, at least one."""
        return max(1, min(most, self.total // 4 // max(1, self.body_limit)))

    def try_reserve(self, size: int, *, share: float = 1.0) -> bool:
        """Reserve bytes if this share of the budget has room. `release` returns them."""
        if self._waiting or self._free - size < self.total * (1 - share):
            return False
        self._free -= size
        return True

    async def reserve(self, size: int) -> int:
        """Reserve bytes, and return how many `release` must return.

        Raises:
            ServerBusy: There is still no room after some seconds.
        """
        size = min(size, self.total)
        if self.try_reserve(size):
            return size
        if len(self._waiting) >= _MOST_WAITING:
            raise ServerBusy
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            async with asyncio.timeout(self._patience):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self.release(size)
            self._grant()
            if isinstance(error, TimeoutError):
                raise ServerBusy from None
            raise
        return size

    def charge(self, size: int) -> None:
        """Count bytes that are in memory already. Later requests wait for them."""
        self._free -= size

    def release(self, size: int) -> None:
        """Give bytes back."""
        self._free += size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.done():
                if size > self._free:
                    return
                self._free -= size
                future.set_result(None)
            self._waiting.popleft()


class IncomingBody:
    """The body of a request, as the value of an `async with` block. Its memory is reserved until the end of the block.

    Args:
        budget: The memory.
        scope: The request.
        receive: Its messages.
        limit: Maximum size of the body in bytes.
        copies: How many times the caller has the body in memory.

    Raises:
        BodyTooLarge: The body or its Content-Length is more than `limit` bytes.
        Disconnected: The client disconnected before the end of the body.
        ServerBusy: There is no memory.
        BackendError: A temporary file cannot be written.
    """

    __slots__ = ("_budget", "_copies", "_limit", "_receive", "_reserved", "_scope")

    def __init__(self, budget: MemoryBudget, scope: Scope, receive: Receive, limit: int, copies: int = 1) -> None:
        self._budget = budget
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self._copies = copies
        self._reserved = 0

    async def __aenter__(self) -> bytes:
        """Read the body."""
        try:
            return await self._read()
        except BaseException:
            self._release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the memory back."""
        self._release()

    def _release(self) -> None:
        if self._reserved:
            self._budget.release(self._reserved)
            self._reserved = 0

    async def _read(self) -> bytes:
        declared = get_header(self._scope, b"content-length")
        length = int(declared) if declared is not None and declared.isdigit() else None
        if length is not None and length > self._limit:
            raise BodyTooLarge
        first, is_last = await self._next(self._limit)
        if is_last:
            self._reserved = await self._budget.reserve(len(first) * self._copies)
            return first
        if length is not None and self._can_stay(length):
            return await self._read_to_memory(first)
        return await self._read_to_file(first)

    def _can_stay(self, length: int) -> bool:
        size = length * self._copies
        if self._budget.try_reserve(size, share=1.0 if length <= _SMALL else _SHARE):
            self._reserved = size
            return True
        return False

    async def _next(self, left: int) -> tuple[bytes, bool]:
        """Return the next part, and whether it is the last one."""
        message = await self._receive()
        if message["type"] != "http.request":
            raise Disconnected
        part: bytes = message.get("body", b"")
        if len(part) > left:
            raise BodyTooLarge
        return part, not message.get("more_body")

    async def _read_to_memory(self, first: bytes) -> bytes:
        parts, size, is_last = [first], len(first), False
        while not is_last:
            part, is_last = await self._next(self._limit - size)
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    async def _read_to_file(self, part: bytes) -> bytes:
        size, is_last = 0, False
        with store_errors(f"keep a body in {tempfile.gettempdir()}"), tempfile.TemporaryFile(buffering=0) as opened:
            file = cast("BinaryIO", opened)
            while True:
                size += len(part)
                while part:
                    part = part[file.write(part) :]
                if is_last:
                    break
                part, is_last = await self._next(self._limit - size)
            # The allocator keeps a part of the memory of large bodies, so they count for more.
            share = 1.0 if size <= ON_LOOP else _LARGE
            self._reserved = await self._budget.reserve(int(size * self._copies * share))
            if size <= ON_LOOP:
                return os.pread(file.fileno(), size, 0)
            # In one piece, because the parts and the whole would be in memory at once.
            return await run_in_thread(BlockingCall.READ, os.pread, file.fileno(), size, 0)


async def respond_in_parts(send: Send, headers: Headers, body: bytes) -> None:
    """Send a body with status 200. A large one is sent in parts, so that a slow client has few of them in a buffer."""
    if len(body) <= _PART:
        await respond(send, 200, headers, body)
        return
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    for start in range(0, len(body), _PART):
        part = body[start : start + _PART]
        await send({"type": "http.response.body", "body": part, "more_body": start + _PART < len(body)})
