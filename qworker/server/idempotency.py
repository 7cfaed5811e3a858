"""`Idempotency-Key`: a request that is sent again stores its message once.

The process remembers a key for a day. On backends that take ids, the message's id is derived from the key. So a request
that is repeated after a restart finds its message while the message is stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import InvalidName, NotSupported, UsageError

__all__ = ["Idempotency", "IdempotencyKeyReused"]

_DAY = 86400.0
_MOST = 100_000


class IdempotencyKeyReused(UsageError):
    """The key was already used with a different body."""


class Idempotency:
    """The keys of the last day.

    Args:
        publish: A function that publishes a body in a queue with an id (None: any id), and returns the id.
        clock: The clock that measures the day.
    """

    def __init__(
        self, publish: Callable[[str, bytes, str | None], Awaitable[str]], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._known: OrderedDict[tuple[str, bytes], tuple[float, bytes, asyncio.Future[str]]] = OrderedDict()

    async def publish(self, queue: str, key: bytes, body: bytes) -> str:
        """Publish a body once per key, and return the id of the stored message.

        Raises:
            InvalidName: The key is empty or too long.
            IdempotencyKeyReused: The key was used with a different body.
        """
        if not 0 < len(key) <= 255:
            raise InvalidName("an Idempotency-Key must have 1 to 255 bytes")
        digest = hashlib.sha256(body).digest()
        known = self._known.get((queue, key))
        if known is not None and self._clock.monotonic() - known[0] < _DAY:
            if known[1] != digest:
                raise IdempotencyKeyReused("this Idempotency-Key was already used with a different body")
            return await asyncio.shield(known[2])
        task = asyncio.ensure_future(self._store(queue, key, body))
        self._known[queue, key] = (self._clock.monotonic(), digest, task)
        task.add_done_callback(lambda done: self._forget_failed(queue, key, done))
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return await asyncio.shield(task)

    async def _store(self, queue: str, key: bytes, body: bytes) -> str:
        name = hashlib.sha256(queue.encode() + b"\0" + key).digest()[:16]
        try:
            return await self._publish(queue, body, str(uuid.UUID(bytes=name, version=5)))
        except (NotSupported, InvalidName):
            return await self._publish(queue, body, None)

    def _forget_failed(self, queue: str, key: bytes, done: asyncio.Future[str]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._known.pop((queue, key), None)
