"""Settling: batches, one after another; one whose answer was lost can be asked for later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar, cast

from qworker.message import Settlement
from qworker_redis.batch_sender import Lane, Mark
from qworker_redis.connection import Wire
from qworker_redis.connections import Links
from qworker_redis.error_replies import Reply
from qworker_redis.lease import Doubt, RedisLease, SettleBatch
from qworker_redis.options import Options
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, durable
from qworker_redis.topology import slot_of

__all__ = ["Settling", "grouped"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Settling:
    """The settling half of a backend.

    Args:
        options: of the store.
        links: its connections.
        holder: this instance's name, unique in the world.
    """

    def __init__(self, options: Options, links: Links, holder: str) -> None:
        self._options = options
        self._links = links
        self._holder = holder
        self._lanes: dict[str, Lane[Settlement, bool]] = {}

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases; one whose answer was lost may be repeated."""
        refused: list[Settlement] = []
        for queue, batch in grouped(settlements, lambda settlement: settlement.lease.message.queue).items():
            clear = [s for s in batch if _doubt(s) is None]
            results = await self._settler(queue).submit(clear) if clear else []
            refused += [s for s, accepted in zip(clear, results, strict=True) if not accepted]
            if len(clear) < len(batch):
                refused += await self._settle_again(queue, [s for s in batch if _doubt(s) is not None])
        return refused

    def _settler(self, queue: str) -> Lane[Settlement, bool]:
        lane = self._lanes.get(queue)
        if lane is None:
            send = partial(self._send_settle, queue, Mark(f"{self._holder}:s"))
            lane = self._lanes[queue] = Lane(send, _settlement_size, BATCH)
        return lane

    async def _settle_again(self, queue: str, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Settle what may have been settled: the server knows, under the batch that each was in."""
        refused: list[Settlement] = []
        for (key, sequence), batch in grouped(settlements, lambda s: (_doubt(s) or ("", ""))[:2]).items():
            # Without settlements the script only looks.
            known, *numbers = cast(
                "list[int]", await self._links.script("settle", queue, (0, sequence, "", 0), (key, key))
            )
            if known:
                refused += [s for s in batch if (_doubt(s) or ("", "", 0))[2] in numbers]
                continue
            for settlement in batch:
                cast("RedisLease", settlement.lease).doubt = None
            refused += await self.settle(batch)
        return refused

    async def _send_settle(self, queue: str, mark: Mark, settlements: Sequence[Settlement]) -> list[bool]:
        batch = SettleBatch(settlements, keep_done=self._options.keep_done.keep)
        sequence, key = mark.next(), mark.key

        def attempt(wire: Wire, again: bool) -> Awaitable[Reply]:
            arguments = batch.arguments(sequence, sequence if again else "")
            return durable(self._options, self._links, wire, "settle", queue, arguments, (key, key))

        try:
            reply = await self._links.repeat(slot_of(queue), attempt)
        except BaseException:
            mark.keep()
            batch.doubt(key, sequence)
            raise
        refused = batch.refused(reply)
        return [id(settlement) not in refused for settlement in settlements]


def _settlement_size(settlement: Settlement) -> int:
    return 1 if settlement.error is None else 1 + len(settlement.error) // BATCH_BYTES


def _doubt(settlement: Settlement) -> Doubt | None:
    return cast("RedisLease", settlement.lease).doubt


def grouped(items: Iterable[T], name: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a name that each has, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups
