"""`sq:` queues: a queue is a topic, and this backend is one of its channels."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from qworker.backend.deviations import refuse_unsupported
from qworker.backend.offers import Follower
from qworker.kit.doctor_check import Check
from qworker.kit.files import store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.names import check_id, check_queue
from qworker.url import BackendURL
from qworker_sq import lease as consume
from qworker_sq.admin import SqAdministration
from qworker_sq.channel import Channel
from qworker_sq.store import OpenTopic
from qworker_sq.topic import Deleted

__all__ = ["SqBackend"]

# Seconds between looks at the log while nothing wakes us: writers that know nothing of qworker leave no wake.
_LOOK = 0.05


class SqBackend(SqAdministration):
    """Segment logs in a directory; see the module."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "a log has one order",
        "unique_key": "a log keeps no index of keys",
        "empty_bodies": "a record of length 0 is the end of the log",
        "fields": "a record is its bytes alone",
        "keep_done": "a segment is deleted when every channel has read it",
        "argv": "a record is its bytes alone",
    }

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Append messages to the topic, for every channel."""
        check_queue(queue)
        refuse_unsupported("sq", self.deviations, drafts)
        for draft in drafts:
            if draft.id is not None:
                check_id(draft.id)
        if not drafts:
            return []
        held = self._queues.get(queue)
        if held is not None and held.channel is not None:
            try:
                return await held.topic.publish(drafts)
            except Deleted:
                # It is made again below.
                pass
        return await (await self._made(queue)).topic.publish(drafts)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Claim messages, if this process owns the channel or can."""
        await wait_for_ready(self, queue, limit, timeout)
        held = await self._leasable(queue)
        if held is None:
            return []
        channel = held.channel
        assert channel is not None
        with store_errors(f"lease from {queue}"):
            async with channel.section():
                if channel.ledger.down or not channel.own():
                    return []
                return consume.claim(channel, limit, visibility)

    async def _leasable(self, queue: str) -> OpenTopic | None:
        with store_errors(f"open the queue {queue}"):
            held = await self._found(queue)
        return held if held is not None and held.channel is not None else None

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a publish, a release, the death of the owner, or the moment at which a message becomes due."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        rest = float("inf")
        while True:
            self._changed.clear()
            due = min([await self._until_work(queue) for queue in queues], default=float("inf"))
            rest = min(rest, loop.time() + due)
            left = min(give_up, rest) - loop.time()
            if due <= 0 or left <= 0:
                return
            try:
                async with asyncio.timeout(min(left, _LOOK)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _until_work(self, queue: str) -> float:
        """Seconds until a queue has something for us, as far as is known now."""
        held = await self._leasable(queue)
        if held is None or held.channel is None:
            return float("inf")
        channel = held.channel
        with store_errors(f"use the queue {queue}"):
            channel.follow()
            ledger = channel.ledger
            now = self._clock.time()
            ledger.make_due(now)
            if ledger.down or not channel.owned():
                return float("inf")
            if ledger.cursor < channel.end() or ledger.next_ready(1):
                return 0.0
            due = ledger.next_due()
            return float("inf") if due is None else max(0.001, due - now)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases; from any thread."""
        lost: list[Lease] = []
        by_queue: dict[str, list[Lease]] = {}
        for lease in leases:
            by_queue.setdefault(lease.message.queue, []).append(lease)
        for queue, some in by_queue.items():
            held = self._queues.get(queue)
            if held is None or held.channel is None or not held.topic.alive():
                lost += some
                continue
            with store_errors(f"extend leases of {queue}"), held.channel.blocking_section():
                lost += consume.extend(held.channel, some, self._clock.time() + visibility)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        by_queue: dict[str, list[Settlement]] = {}
        for settlement in settlements:
            by_queue.setdefault(settlement.lease.message.queue, []).append(settlement)
        refused: list[Settlement] = []
        for queue, some in by_queue.items():
            held = await self._leasable(queue)
            if held is None or held.channel is None:
                refused += some
            else:
                refused += await self._settle(held.channel, some)
        return refused

    async def _settle(self, channel: Channel, settlements: list[Settlement]) -> list[Settlement]:
        done: list[tuple[int, int]] = []
        wake = any(settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP} for settlement in settlements)
        try:
            with store_errors(f"settle messages of {channel.topic.name}"):
                async with channel.section():
                    refused = consume.settle(channel, settlements, self._clock.time(), done)
            if done:
                await self._commit(channel, wake=wake)
        except BaseException:
            # Done, but perhaps not for good: a repetition is told so, and makes it durable.
            channel.unsure.update(done)
            raise
        return refused

    async def reap(self, queue: str) -> int:
        """Return what has expired, and what is due."""
        held = await self._leasable(queue)
        if held is None or held.channel is None:
            return 0
        channel = held.channel
        with store_errors(f"reap {queue}"):
            async with channel.section():
                count = consume.expire(channel, self._clock.time())
            if count:
                channel.topic.wake()
        return count

    # -- besides the contract (qworker/backend/offers.py) ----------------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Try the directory."""
        from qworker.kit.directory.doctor import examine_directory

        return await examine_directory(url.directory)

    @classmethod
    def follower(cls, url: BackendURL, queue: str) -> Follower:
        """Follow a topic as the URL's channel."""
        from qworker_sq.follow import SqFollower

        return SqFollower(url, queue)
