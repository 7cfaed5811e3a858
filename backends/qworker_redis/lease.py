"""Leases as this backend holds them, and how a batch of settlements goes to the script and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from qworker.message import Lease, Message, SettleAction, Settlement, State
from qworker.names import check_queue
from qworker_redis.connection import Argument
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply

__all__ = ["DETACHED", "LostAnswer", "RedisLease", "RemoteRedisLeases", "SettleBatch"]

# In front of a claimant whose leases are held by others than its process.
DETACHED = "detached/"

_HOW = {SettleAction.ACK: "a", SettleAction.FAIL_TMP: "t", SettleAction.FAIL_PERM: "p", SettleAction.RELEASE: "r"}

# Key and sequence number under which the server may keep the answer to a settlement, and its number in that batch.
LostAnswer = tuple[str, str, int]


class RedisLease(Lease, kw_only=True, eq=False):
    """A lease and its claim: token and claimant, which the scripts compare."""

    claim: bytes
    # Set when the answer to its settlement was lost.
    lost_answer: LostAnswer | None = None


class RemoteRedisLeases:
    """Leases whose claimant outlives its process; see `qworker.backend.RemoteLeases`.

    Args:
        pool: to the servers.
        decode: makes a message of a queue, an id and what is stored.
    """

    def __init__(self, pool: ConnectionPool, decode: Callable[[str, str, Any], Message]) -> None:
        self._pool = pool
        self._decode = decode

    async def find(self, queue: str, message_id: str, token: int) -> RedisLease | None:
        """Find the lease that has this token.

        Raises:
            BackendError: the message is damaged.
        """
        row = cast("list[Any]", await self._pool.run_script("look", check_queue(queue), ("id", message_id)))[1:]
        if not row:
            return None
        _, value, state, expiry, claim, _ = cast("tuple[bytes, Reply, bytes, bytes, bytes, bytes]", tuple(row))
        if state.decode() != State.LEASED or not claim.startswith(b"%d %b" % (token, DETACHED.encode())):
            return None
        message = self._decode(queue, message_id, value)
        return RedisLease(message=message, token=token, expires_at=float(expiry) / 1e6, claim=claim)


class SettleBatch:
    """Settlements of one queue in the order in which the script numbers them: plain acks first.

    Args:
        settlements: of leases of this backend.
        keep_done: whether acked messages are kept.
    """

    def __init__(self, settlements: Sequence[Settlement], *, keep_done: bool) -> None:
        plain: list[Settlement] = []
        others: list[Settlement] = []
        for settlement in settlements:
            is_plain = (
                settlement.action is SettleAction.ACK and settlement.lease.message.unique_key is None and not keep_done
            )
            (plain if is_plain else others).append(settlement)
        self.ordered = plain + others
        self._plain = len(plain)
        self._keep = "0" if keep_done else ""

    def arguments(self, sequence: str, earlier: str) -> list[Argument]:
        """The script's arguments."""
        arguments: list[Argument] = [sequence, earlier, self._keep, self._plain]
        for settlement in self.ordered[: self._plain]:
            lease = cast("RedisLease", settlement.lease)
            arguments.append(lease.message.id)
            arguments.append(lease.claim)
        for settlement in self.ordered[self._plain :]:
            arguments += _described(settlement)
        return arguments

    def mark_uncertain(self, key: str, sequence: str) -> None:
        """Note that the answer is lost, and where it may be found."""
        for number, settlement in enumerate(self.ordered, start=1):
            cast("RedisLease", settlement.lease).lost_answer = (key, sequence, number)

    def refused(self, reply: Reply) -> set[int]:
        """The identities of the refused settlements."""
        _, *numbers = cast("list[int]", reply)
        return {id(self.ordered[number - 1]) for number in numbers}


def _described(settlement: Settlement) -> list[Argument]:
    lease = cast("RedisLease", settlement.lease)
    key = lease.message.unique_key
    return [
        _HOW[settlement.action],
        lease.message.id,
        lease.claim,
        max(0, int(settlement.delay * 1e6)),
        (settlement.error or "").encode(errors="replace"),
        b"" if key is None else key.encode(errors="surrogateescape"),
    ]
