"""Publishing: batches, one after another, each repeated until it is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

from qworker.errors import BackendUnavailable, PublishUncertain
from qworker_redis.batch_sender import BatchSender, RetryToken
from qworker_redis.codec import PlainDraft
from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost, Reply
from qworker_redis.options import Options
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, run_replicated
from qworker_redis.topology import queue_slot

__all__ = ["Publishing"]


class Publishing:
    """The publishing half of a backend.

    Args:
        options: of the store.
        pool: its connections.
        holder: this instance's name, unique in the world.
        stored_in: told after each batch: the queue, and whether the batch made it.
        listed: the queues that need not be told of; one plain message for them has a script of its own.
    """

    def __init__(
        self,
        options: Options,
        pool: ConnectionPool,
        holder: str,
        stored_in: Callable[[str, bool], Awaitable[None]],
        *,
        listed: Collection[str],
    ) -> None:
        self._options = options
        self._pool = pool
        self._holder = holder
        self._stored_in = stored_in
        self._listed = listed
        self._senders: dict[str, BatchSender[PlainDraft, str]] = {}

    def publish(self, queue: str, items: Sequence[PlainDraft]) -> Awaitable[list[str]]:
        """Store messages; the ids of the stored ones, in order."""
        return self._publisher(queue).submit(items)

    def _publisher(self, queue: str) -> BatchSender[PlainDraft, str]:
        sender = self._senders.get(queue)
        if sender is None:
            send = partial(self._send, queue, RetryToken(f"{self._holder}:p"))
            sender = self._senders[queue] = BatchSender(send, lambda item: 1 + len(item[2]) // BATCH_BYTES, BATCH)
        return sender

    async def _send(self, queue: str, mark: RetryToken, batch: Sequence[PlainDraft]) -> list[str]:
        sequence, key = mark.next(), mark.key
        sent = False
        try:
            if len(batch) == 1 and (connection := self._fast_path(queue, batch[0])) is not None:
                message_id, _, rest = batch[0]
                try:
                    arguments = sequence.encode(), message_id.encode(), rest
                    if not await self._pool.evaluate_packed(connection, "publish_one", queue, key, arguments):
                        return [message_id]
                except BackendUnavailable as error:
                    sent = isinstance(error, ConnectionLost) and error.sent
            return await self._send_batch(queue, sequence, key, batch, sent)
        except ConnectionLost as error:
            mark.keep()
            if error.sent:
                raise PublishUncertain(
                    f"the message may or may not be stored: {error}: publish it again with the same id"
                ) from error
            raise
        except BaseException:
            mark.keep()
            raise

    def _fast_path(self, queue: str, item: PlainDraft) -> Connection | None:
        """The connection for a message that needs nothing but to be stored, in a first attempt."""
        plain = not item[1] and queue in self._listed and not self._options.min_replicas
        return self._pool.healthy_connection(queue_slot(queue)) if plain else None

    async def _send_batch(
        self, queue: str, sequence: str, key: str, batch: Sequence[PlainDraft], sent: bool
    ) -> list[str]:
        # The first of several with one id is stored, as it would be over several calls.
        unique: dict[str, PlainDraft] = {}
        for item in batch:
            unique.setdefault(item[0], item)
        kept = list(unique.values())
        arguments: list[Argument] = [part for item in kept for part in item]

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            return run_replicated(
                self._options, self._pool, connection, "publish", queue, (sequence, int(again), *arguments), (key,)
            )

        reply = await self._pool.repeat(queue_slot(queue), attempt, sent=sent)
        new, *instead = cast("list[Any]", reply)
        await self._stored_in(queue, bool(new))
        ids = [item[0] for item in batch]
        if instead:
            others: dict[str, str] = {
                kept[n - 1][0]: name.decode() for n, name in zip(instead[::2], instead[1::2], strict=True)
            }
            ids = [others.get(name, name) for name in ids]
        return ids
