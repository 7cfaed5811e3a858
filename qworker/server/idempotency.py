"""`Idempotency-Key`: a request that is sent again stores its message once.

The process remembers a key for a day. On backends that take ids, the message's id is derived from the key. So a request
that is repeated after a restart finds its message while the message is stored, and compares the bodies.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from typing import NamedTuple

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import InvalidName, NotSupported, QueueNotFound, UsageError
from qworker.message import Draft, State, StoredMessage

__all__ = ["Idempotency", "IdempotencyKeyReused"]

_DAY = 86400.0
_MOST = 100_000
_REUSED = "this Idempotency-Key was already used with a different body"


class IdempotencyKeyReused(UsageError):
    """The key was already used with a different body."""


class _Known(NamedTuple):
    """A key that was used."""

    # Monotonic seconds.
    at: float
    digest: bytes
    stored: asyncio.Task[str]


class Idempotency:
    """The keys of the last day.

    Args:
        backend: The backend that stores the messages.
        clock: The clock that measures the day.
    """

    def __init__(self, backend: Backend, clock: Clock = SYSTEM_CLOCK) -> None:
        self._backend = backend
        self._clock = clock
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()

    async def publish(self, queue: str, key: bytes, body: bytes) -> str:
        """Publish a body once per key, and return the id of the stored message.

        Raises:
            InvalidName: The key is empty or too long.
            IdempotencyKeyReused: The key was used with a different body.
        """
        if not 0 < len(key) <= 255:
            raise InvalidName("an Idempotency-Key must have 1 to 255 bytes")
        digest = hashlib.sha256(body).digest()
        while (known := self._known.get((queue, key))) is not None and self._clock.monotonic() - known.at < _DAY:
            message_id = await asyncio.shield(known.stored)
            if await self._exists(queue):
                if known.digest != digest:
                    raise IdempotencyKeyReused(_REUSED)
                return message_id
            if self._known.get((queue, key)) is known:
                del self._known[queue, key]
        return await asyncio.shield(self._begin(queue, key, body, digest))

    def forget(self, queue: str) -> None:
        """Forget the keys of a queue that was deleted."""
        for place in [place for place in self._known if place[0] == queue]:
            del self._known[place]

    async def _exists(self, queue: str) -> bool:
        """Return whether a queue exists. Another program can have deleted it."""
        try:
            await self._backend.parts(queue, State.READY, 1)
        except QueueNotFound:
            return False
        return True

    def _begin(self, queue: str, key: bytes, body: bytes, digest: bytes) -> asyncio.Task[str]:
        task = asyncio.create_task(self._store(queue, key, body))
        self._known[queue, key] = _Known(self._clock.monotonic(), digest, task)
        self._known.move_to_end((queue, key))
        task.add_done_callback(lambda done: self._forget_failed(queue, key, done))
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return task

    async def _store(self, queue: str, key: bytes, body: bytes) -> str:
        name = hashlib.sha256(queue.encode() + b"\0" + key).digest()[:16]
        message_id = str(uuid.UUID(bytes=name, version=5))
        try:
            await self._backend.publish(queue, [Draft(body=body, id=message_id)])
        except (NotSupported, InvalidName):
            return (await self._backend.publish(queue, [Draft(body=body)]))[0]
        # The message of this id may be that of an earlier request, which this process does not remember. It is read
        # after the publish, so that of two servers with one key only one is told that its body is stored.
        if any(stored.message.body != body for stored in await self._find(queue, message_id)):
            raise IdempotencyKeyReused(_REUSED)
        return message_id

    async def _find(self, queue: str, message_id: str) -> list[StoredMessage]:
        try:
            return await self._backend.find(queue, [message_id])
        except QueueNotFound:
            # The queue was deleted after the publish.
            return []

    def _forget_failed(self, queue: str, key: bytes, done: asyncio.Future[str]) -> None:
        known = self._known.get((queue, key))
        if known is not None and known.stored is done and (done.cancelled() or done.exception() is not None):
            del self._known[queue, key]
