"""Settling: batches, one after another; one whose answer was lost can be asked for later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar, cast

from qworker.message import Settlement
from qworker_redis.batch_sender import BatchSender, RetryToken
from qworker_redis.connection import Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.lease import LostAnswer, RedisLease, SettleBatch
from qworker_redis.options import Options
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, run_replicated
from qworker_redis.topology import queue_slot

__all__ = ["Settling", "grouped"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Settling:
    """The settling half of a backend.

    Args:
        options: of the store.
        pool: its connections.
        holder: this instance's name, unique in the world.
    """

    def __init__(self, options: Options, pool: ConnectionPool, holder: str) -> None:
        self._options = options
        self._pool = pool
        self._holder = holder
        self._senders: dict[str, BatchSender[Settlement, bool]] = {}

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases; one whose answer was lost may be repeated."""
        refused: list[Settlement] = []
        for queue, batch in grouped(settlements, lambda settlement: settlement.lease.message.queue).items():
            clear = [s for s in batch if _lost_answer(s) is None]
            results = await self._settler(queue).submit(clear) if clear else []
            refused += [s for s, accepted in zip(clear, results, strict=True) if not accepted]
            if len(clear) < len(batch):
                refused += await self._settle_again(queue, [s for s in batch if _lost_answer(s) is not None])
        return refused

    def _settler(self, queue: str) -> BatchSender[Settlement, bool]:
        sender = self._senders.get(queue)
        if sender is None:
            send = partial(self._send_settle, queue, RetryToken(f"{self._holder}:s"))
            sender = self._senders[queue] = BatchSender(send, _settlement_size, BATCH)
        return sender

    async def _settle_again(self, queue: str, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Settle what may have been settled: the server knows, under the batch that each was in."""
        refused: list[Settlement] = []
        for (key, sequence), batch in grouped(settlements, lambda s: (_lost_answer(s) or ("", ""))[:2]).items():
            # Without settlements the script only looks.
            known, *numbers = cast(
                "list[int]", await self._pool.run_script("settle", queue, (0, sequence, "", 0), (key, key))
            )
            if known:
                refused += [s for s in batch if (_lost_answer(s) or ("", "", 0))[2] in numbers]
                continue
            for settlement in batch:
                cast("RedisLease", settlement.lease).lost_answer = None
            refused += await self.settle(batch)
        return refused

    async def _send_settle(self, queue: str, mark: RetryToken, settlements: Sequence[Settlement]) -> list[bool]:
        batch = SettleBatch(settlements, keep_done=self._options.keep_done.keep)
        sequence, key = mark.next(), mark.key

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            arguments = batch.arguments(sequence, sequence if again else "")
            return run_replicated(self._options, self._pool, connection, "settle", queue, arguments, (key, key))

        try:
            reply = await self._pool.repeat(queue_slot(queue), attempt)
        except BaseException:
            mark.keep()
            batch.mark_uncertain(key, sequence)
            raise
        refused = batch.refused(reply)
        return [id(settlement) not in refused for settlement in settlements]


def _settlement_size(settlement: Settlement) -> int:
    return 1 if settlement.error is None else 1 + len(settlement.error) // BATCH_BYTES


def _lost_answer(settlement: Settlement) -> LostAnswer | None:
    return cast("RedisLease", settlement.lease).lost_answer


def grouped(items: Iterable[T], name: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a name that each has, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups
