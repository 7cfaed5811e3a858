"""The contract over rfq's keys; docs/protocols/rfq.md describes them."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, cast

from qworker.backend import RemoteLeases
from qworker.backend.deviations import refuse_unsupported
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendError, InvalidName
from qworker.message import Draft, Lease
from qworker.names import check_id, check_queue, printable
from qworker.url import BackendURL
from qworker_redis.backend import RedisBackend
from qworker_redis.connection import Argument
from qworker_redis.error_replies import Redirected, Reply
from qworker_redis.lease import RedisLease, RemoteRedisLeases
from qworker_redis.options import Options
from qworker_redis.rfq.admin import RfqAdministration
from qworker_redis.rfq.codec import decode, encode
from qworker_redis.rfq.ids import derive_id, is_id, new_ids, to_ticks
from qworker_redis.rfq.keys import RFQ
from qworker_redis.rfq.wait import PAUSED, RfqWaiting
from qworker_redis.scripts import ScriptSet
from qworker_redis.topology import queue_slot
from qworker_redis.wait import ReadTimeout, Waiting

__all__ = ["RfqBackend"]

_REDIRECTION_PAUSE = 0.05


class RfqBackend(RfqAdministration, RedisBackend):
    """Topics of the rfq protocol, shared with any other implementation of it."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "a list has one order; rfq's own publish --front puts a message first",
        "unique_key": "rfq has no keys",
        "given_ids": "an rfq id is a UUID of 32 hex digits; only such ids can be given",
        "keep_done": "an ack is rfq's commit, which deletes the message",
        "argv": "a message is a map",
        "after_removed": "a message that is removed leaves no trace in the list: it is taken for leased, and the whole line follows",
    }
    # Found by name: the ids that can be given although they deviate.
    takes_id = staticmethod(is_id)
    # The time in the last id that was made from one of another store.
    _last_origin: int = 0

    scripts: ClassVar[ScriptSet] = RFQ
    waiting: ClassVar[type[Waiting]] = RfqWaiting

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`rfq://[user:password@][host[:port]][/db]`; without a host `RFQ_REDIS_HOST` and `RFQ_REDIS_PORT` say which.

        Options: `timeout`, `retry_timeout`, `min_replicas`, `keep_failed`; see docs/redis.md.
        """
        return cls(Options.parse(url), clock=clock, remote_leases=remote_leases)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages; an unknown outcome is resolved by repeating, for `?retry_timeout=` seconds."""
        check_queue(queue)
        refuse_unsupported("rfq", self.deviations, drafts, takes_id=is_id)
        if not drafts:
            return []
        fresh = new_ids(len(drafts), self._clock.time())
        items = [encode(self._id(made, draft), draft) for made, draft in zip(fresh, drafts, strict=True)]
        return await self._publishing.publish(queue, items)

    def _id(self, fresh: str, draft: Draft) -> str:
        if draft.id is not None:
            return draft.id
        if draft.original_id is None or draft.enqueued_at is None:
            return fresh
        # Rising, as new ones do: some stores know no other order than that of ids.
        self._last_origin = max(to_ticks(draft.enqueued_at), self._last_origin + 1)
        return derive_id(draft.original_id, self._last_origin)

    async def _stored_in(self, queue: str, new: bool) -> None:
        """Nothing: topics are found by their keys."""

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def _leases(self, queue: str, reply: Reply) -> list[Lease]:
        """The leases of an answer."""
        first, expiry, due, ids, values, *claimants = cast(
            "tuple[int, int, int, list[bytes], list[Reply], bytes]", reply
        )
        if not ids:
            if due != PAUSED:
                # Kept until the next wait, which then needs no look of its own.
                self._empty[queue] = math.inf if due < 0 else asyncio.get_running_loop().time() + due / 1e6
            return []
        self._empty.pop(queue, None)
        leases: list[Lease] = []
        for number, (name, value) in enumerate(zip(ids, values, strict=True)):
            token = first + number
            claim = b"%d %b" % (token, claimants[0])
            try:
                message = decode(queue, check_id(name.decode()), value)
            except (BackendError, InvalidName, UnicodeDecodeError) as error:
                await self._set_aside_raw(queue, name, claim, str(error))
                continue
            leases.append(RedisLease(message=message, token=token, expires_at=expiry / 1e6, claim=claim))
        return leases

    async def _set_aside_raw(self, queue: str, name: bytes, claim: bytes, why: str) -> None:
        """Fail a message that cannot be read; all others still flow."""
        self._log.error("message_damaged", queue=queue, message_id=printable(name[:120].decode(errors="replace")))
        arguments: list[Argument] = [secrets.token_hex(8), "", "", 0, "p", name, claim, 0, why.encode(), ""]
        key = f"mark:{self._holder}:damaged"
        await self._pool.run_script("settle", queue, arguments, (key, key))

    async def _lease_within(self, queue: str, limit: int, visibility: float, timeout: float) -> list[Lease]:
        """Lease, or wait and lease then."""
        due = self._empty.pop(queue, None)
        if due is None:
            leases = await self.lease(queue, limit, visibility)
            due = self._empty.pop(queue, None)
            if leases:
                return leases
        if due is None:
            # It is paused, as far as is known.
            await self.wait([queue], timeout)
        else:
            seconds = min(timeout, due - asyncio.get_running_loop().time(), self._options.timeout)
            await self._wait_for_one(queue, seconds)
        return await self.lease(queue, limit, visibility)

    async def _wait_for_one(self, queue: str, seconds: float) -> None:
        """Wait on the list alone: an empty lease has just told when something becomes due."""
        if seconds <= 0:
            return
        try:
            await self._waiting.blocked(queue_slot(queue), [queue], seconds, None)
        except ReadTimeout:
            return
        except Redirected:
            await asyncio.sleep(_REDIRECTION_PAUSE)

    def _remote_leases(self) -> RemoteLeases:
        return RemoteRedisLeases(self._pool, decode)
