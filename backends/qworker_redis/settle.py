"""Settling: batches, one after another. If the answer to one was lost, it can be requested later."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import cast

from qworker.errors import QueueDamaged
from qworker.kit.settle import SettledInPart, settle_by_queue
from qworker.message import SettleAction, Settlement
from qworker_redis.batch_sender import BatchSender, RetryToken
from qworker_redis.connection import Argument, Connection
from qworker_redis.error_replies import Reply
from qworker_redis.lease import group_by
from qworker_redis.own_leases import LostAnswer, RedisLease
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, run_replicated
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["RedisSettler"]

# The answer to a settlement is known, but the call that had others too has failed.
_ACCEPTED, _REFUSED = ("", "", 0), ("", "", 1)

_ACTIONS = {SettleAction.ACK: "a", SettleAction.FAIL_TMP: "t", SettleAction.FAIL_PERM: "p", SettleAction.RELEASE: "r"}
# A temporary failure with `Settlement.died`, and a release with `Settlement.survived`.
_DEATH, _SURVIVED = "d", "s"


class RedisSettler:
    """Settles the leases of one backend.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        self._options = store.options
        self._pool = store.pool
        self._holder = store.holder
        self._senders: dict[str, BatchSender[Settlement, bool]] = {}

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases and return the refused settlements."""
        try:
            return await settle_by_queue(settlements, self._settle_queue)
        except QueueDamaged as error:
            if isinstance(error.__cause__, SettledInPart):
                unstored = {id(settlement) for settlement in error.__cause__.unstored}
                _keep_answers([one for one in settlements if id(one) not in unstored], error.__cause__.refused)
            raise

    async def _settle_queue(self, queue: str, batch: Sequence[Settlement]) -> list[Settlement]:
        clear = [s for s in batch if _lost_answer(s) is None]
        results = await self._sender(queue).submit(clear) if clear else []
        refused = [s for s, accepted in zip(clear, results, strict=True) if not accepted]
        if len(clear) < len(batch):
            refused += await self._settle_again(queue, [s for s in batch if _lost_answer(s) is not None])
        return refused

    def _sender(self, queue: str) -> BatchSender[Settlement, bool]:
        sender = self._senders.get(queue)
        if sender is None:
            send = partial(self._send, queue, RetryToken(f"{self._holder}:s"))
            sender = self._senders[queue] = BatchSender(send, _settlement_size, BATCH)
        return sender

    async def _settle_again(self, queue: str, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Settle what may have been settled. The server may have kept the answer to the batch of each."""
        refused: list[Settlement] = []
        for (key, sequence), batch in group_by(settlements, lambda s: (_lost_answer(s) or ("", ""))[:2]).items():
            if not key:
                refused += [s for s in batch if _lost_answer(s) == _REFUSED]
                continue
            # Without settlements the script only reads the earlier answer.
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

    async def _send(self, queue: str, token: RetryToken, settlements: Sequence[Settlement]) -> list[bool]:
        batch = SettleBatch(settlements, keep_done=self._options.keep_done.keep)
        sequence, key = token.next(), token.key

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            arguments = batch.arguments(sequence, sequence if again else "")
            return run_replicated(self._options, self._pool, connection, "settle", queue, arguments, (key, key))

        try:
            reply = await self._pool.repeat(queue_slot(queue), attempt)
        except BaseException:
            token.keep()
            batch.mark_uncertain(key, sequence)
            raise
        refused = batch.refused(reply)
        return [id(settlement) not in refused for settlement in settlements]


class SettleBatch:
    """Settlements of one queue in the order in which the script numbers them: plain acks first.

    Args:
        settlements: Settlements of leases of this backend.
        keep_done: Whether acked messages are kept.
    """

    def __init__(self, settlements: Sequence[Settlement], *, keep_done: bool) -> None:
        plain: list[Settlement] = []
        others: list[Settlement] = []
        for settlement in settlements:
            is_plain = (
                settlement.action is SettleAction.ACK and settlement.lease.message.unique_key is None and not keep_done
            )
            (plain if is_plain else others).append(settlement)
            cast("RedisLease", settlement.lease).ended = True
        self.ordered = plain + others
        self._plain = len(plain)
        self._keep = "0" if keep_done else ""

    def arguments(self, sequence: str, earlier: str) -> list[Argument]:
        """Return the arguments of the script."""
        arguments: list[Argument] = [sequence, earlier, self._keep, self._plain]
        for settlement in self.ordered[: self._plain]:
            lease = cast("RedisLease", settlement.lease)
            arguments.append(lease.message.id)
            arguments.append(lease.claim)
        for settlement in self.ordered[self._plain :]:
            arguments += _settle_arguments(settlement)
        return arguments

    def mark_uncertain(self, key: str, sequence: str) -> None:
        """Record in the leases that the answer is lost, and where the server may keep it."""
        for number, settlement in enumerate(self.ordered, start=1):
            cast("RedisLease", settlement.lease).lost_answer = (key, sequence, number)

    def refused(self, reply: Reply) -> set[int]:
        """Return the identities of the refused settlements."""
        _, *numbers = cast("list[int]", reply)
        return {id(self.ordered[number - 1]) for number in numbers}


def _settle_arguments(settlement: Settlement) -> list[Argument]:
    lease = cast("RedisLease", settlement.lease)
    key = lease.message.unique_key
    return [
        _how(settlement),
        lease.message.id,
        lease.claim,
        max(0, int(settlement.delay * 1e6)),
        (settlement.error or "").encode(errors="replace"),
        b"" if key is None else key.encode(errors="surrogateescape"),
    ]


def _how(settlement: Settlement) -> str:
    if settlement.died and settlement.action is SettleAction.FAIL_TMP:
        return _DEATH
    if settlement.survived and settlement.action is SettleAction.RELEASE:
        return _SURVIVED
    return _ACTIONS[settlement.action]


def _settlement_size(settlement: Settlement) -> int:
    return 1 if settlement.error is None else 1 + len(settlement.error) // BATCH_BYTES


def _keep_answers(ended: Sequence[Settlement], refused: Sequence[Settlement]) -> None:
    """Keep the answers in the leases until the call is repeated."""
    lost = {id(settlement) for settlement in refused}
    for settlement in ended:
        cast("RedisLease", settlement.lease).lost_answer = _REFUSED if id(settlement) in lost else _ACCEPTED


def _lost_answer(settlement: Settlement) -> LostAnswer | None:
    return cast("RedisLease", settlement.lease).lost_answer
