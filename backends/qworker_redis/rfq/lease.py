"""Leasing from a topic: first wait for an element of its list, then lease."""

from __future__ import annotations

import asyncio
from typing import cast

from qworker.errors import BackendError, InvalidName
from qworker.message import Lease
from qworker.names import check_id
from qworker_redis.error_replies import Redirected, Reply
from qworker_redis.lease import Damaged, RedisLeaser
from qworker_redis.own_leases import RedisLease
from qworker_redis.rfq.codec import decode
from qworker_redis.topology import queue_slot
from qworker_redis.wait import REDIRECTION_PAUSE, ReadTimeout

__all__ = ["TopicLeaser", "parse_leases"]


def parse_leases(queue: str, reply: Reply) -> tuple[list[Lease], list[Damaged]]:
    """Return the leases of an answer of the script `lease`, and the messages that cannot be decoded."""
    first, expiry, _, ids, values, claimant = cast("tuple[int, int, int, list[bytes], list[Reply], bytes]", reply)
    expires_at = expiry / 1e6
    leases: list[Lease] = []
    damaged: list[Damaged] = []
    for token, (name, value) in enumerate(zip(ids, values, strict=True), start=first):
        claim = b"%d %b" % (token, claimant)
        try:
            message = decode(queue, check_id(name.decode()), value)
        except (BackendError, InvalidName, UnicodeDecodeError) as error:
            damaged.append((name, claim, str(error)))
            continue
        leases.append(RedisLease(message=message, token=token, expires_at=expires_at, claim=claim))
    return leases, damaged


class TopicLeaser(RedisLeaser):
    """Leases the messages of one backend. See `RedisLeaser` for the arguments."""

    async def _wait_and_lease(
        self, queue: str, limit: int, visibility: float, timeout: float, due: float | None
    ) -> list[Lease]:
        """Wait, then lease. The script `lease` does not say when a paused topic has messages."""
        if due is None:
            await self._waiter.wait([queue], timeout)
        else:
            seconds = min(timeout, due - asyncio.get_running_loop().time(), self._store.options.timeout)
            await self._wait_for_one(queue, seconds)
        return await self.lease(queue, limit, visibility)

    async def _wait_for_one(self, queue: str, seconds: float) -> None:
        """Wait for the list only: an empty lease has just said when a message becomes due."""
        if seconds <= 0:
            return
        try:
            await self._waiter.block(queue_slot(queue), [queue], seconds, None)
        except ReadTimeout:
            return
        except Redirected:
            await asyncio.sleep(REDIRECTION_PAUSE)
