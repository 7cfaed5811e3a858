"""Publishing: batches, one after another. Each is repeated until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, cast

from qworker.errors import BackendUnavailable, PublishUncertain
from qworker.message import Draft
from qworker.names import to_message_id
from qworker_redis.batch_sender import BatchSender, RetryToken
from qworker_redis.codec import GIVEN_ID, PlainDraft, decode_holder, encode, mark_given
from qworker_redis.connection import Argument, Connection
from qworker_redis.error_replies import ConnectionLost, Reply
from qworker_redis.register import QueueRegister
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, run_replicated
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot
from qworker_redis.uncertain import UncertainPublishes

__all__ = ["RedisPublisher", "encode_draft"]

# Seconds that a call can have begun before its last attempt. The server notes publishes for twice this time.
_LONGEST = 30.0


class RedisPublisher:
    """Publishes the messages of one backend.

    Args:
        store: The store of the backend.
        register: Receives the queues that have messages. A plain message for a queue that it knows has its own script.
            None: the protocol does not have a register.
    """

    def __init__(self, store: RedisStore, register: QueueRegister | None) -> None:
        self._options = store.options
        self._pool = store.pool
        self._holder = store.holder
        self._register = register
        self._known = frozenset[str]() if register is None else register.known
        self._uncertain = UncertainPublishes(store)
        # The server's clock (us) in an earlier answer for a queue. It shows a server that a call is not a late one.
        self._before: dict[str, int] = {}
        self._senders: dict[str, BatchSender[PlainDraft, str]] = {}

    def publish(self, queue: str, items: Sequence[PlainDraft]) -> Awaitable[list[str]]:
        """Store messages and return the ids of the stored ones, in order."""
        return self._sender(queue).submit(items)

    def _sender(self, queue: str) -> BatchSender[PlainDraft, str]:
        sender = self._senders.get(queue)
        if sender is None:
            send = partial(self._send, queue, RetryToken(f"{self._holder}:p"))
            sender = self._senders[queue] = BatchSender(send, lambda item: 1 + len(item[2]) // BATCH_BYTES, BATCH)
        return sender

    async def _send(self, queue: str, token: RetryToken, batch: Sequence[PlainDraft]) -> list[str]:
        if self._uncertain.places and (stored := await self._end_earlier(queue, batch)):
            missing = [item for item in batch if item[0] not in stored]
            ids = iter(await self._send(queue, token, missing) if missing else [])
            return [stored[item[0]] if item[0] in stored else next(ids) for item in batch]
        sequence, key = token.next(), token.key
        began = asyncio.get_running_loop().time()
        try:
            sent = False
            if len(batch) == 1 and self._is_plain(queue, batch[0]):
                try:
                    if await self._send_one(queue, sequence, key, batch[0]):
                        return [batch[0][0]]
                except BackendUnavailable as error:
                    sent = isinstance(error, ConnectionLost) and error.sent
            return await self._send_batch(queue, sequence, key, batch, sent, began)
        except ConnectionLost as error:
            token.keep()
            if error.sent:
                self._uncertain.add(queue, key, sequence, [item[0] for item in batch])
                raise _uncertain(error) from error
            raise
        except BaseException as error:
            token.keep()
            if isinstance(error, asyncio.CancelledError):
                self._uncertain.add(queue, key, sequence, [item[0] for item in batch])
            raise

    async def _end_earlier(self, queue: str, batch: Sequence[PlainDraft]) -> dict[str, str]:
        try:
            stored = await self._uncertain.end(queue, [item[0] for item in batch])
        except ConnectionLost as error:
            raise _uncertain(error) from error
        # A message that is stored is only accepted when enough replicas have it, which the next call waits for.
        return {} if self._options.min_replicas else stored

    def _is_plain(self, queue: str, item: PlainDraft) -> bool:
        """Return whether a message only has to be stored, which a small script does."""
        return (not item[1] or item[1] == GIVEN_ID) and queue in self._known and not self._options.min_replicas

    async def _send_one(self, queue: str, sequence: str, key: str, item: PlainDraft) -> bool:
        """Send a plain message. Return whether it is stored. If not, it must be sent as a batch."""
        message_id, special, rest = item
        arguments = (sequence.encode(), message_id.encode(), rest)
        before = (b"%d" % self._before.get(queue, 0),) if special else ()
        reply = cast("int", await self._pool.run_packed("publish_one", queue, key, arguments + before))
        if abs(reply) > 1:
            self._before[queue] = abs(reply)
        return reply == 0 or reply > 1

    async def _send_batch(
        self, queue: str, sequence: str, key: str, batch: Sequence[PlainDraft], sent: bool, began: float
    ) -> list[str]:
        # If several drafts have one id, the first one is stored, as it would be over several calls.
        unique: dict[str, PlainDraft] = {}
        for item in batch:
            unique.setdefault(item[0], item)
        kept = list(unique.values())
        arguments: list[Argument] = [part for item in kept for part in item]
        before: Argument = self._before.get(queue, 0)
        last = began

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            nonlocal last
            last = asyncio.get_running_loop().time()
            # rfq's script, which has no register, asks for an earlier attempt instead.
            second = int(again) if self._register is None else before
            return run_replicated(
                self._options, self._pool, connection, "publish", queue, (sequence, second, *arguments), (key,)
            )

        new, *instead = cast("list[Any]", await self._pool.repeat(queue_slot(queue), attempt, sent=sent))
        while new < 0:
            self._before[queue] = -new
            # The call began this long before its last attempt, or longer: a message that was published after that time
            # is the same one, and a message that was published before it is another one.
            before = f"={-new - int(min(last - began, _LONGEST) * 1e6)}"
            new, *instead = cast("list[Any]", await self._pool.repeat(queue_slot(queue), attempt))
        if self._register is not None:
            await self._register.on_stored(queue, bool(new))
        ids = [item[0] for item in batch]
        if instead:
            others: dict[str, str] = {
                kept[n - 1][0]: decode_holder(name) for n, name in zip(instead[::2], instead[1::2], strict=True)
            }
            ids = [others.get(name, name) for name in ids]
        return ids


def _uncertain(error: ConnectionLost) -> PublishUncertain:
    return PublishUncertain(f"the message may or may not be stored: {error}: publish it again with the same id")


def encode_draft(new_id: str, draft: Draft) -> PlainDraft:
    """Encode a draft, with a new id if it has none."""
    if draft.id is None:
        return encode(new_id, draft)
    message_id, special, rest = encode(to_message_id(draft.id), draft)
    return message_id, mark_given(special), rest
