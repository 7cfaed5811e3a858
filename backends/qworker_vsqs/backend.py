"""`vsqs:` queues, shared live with any other implementation of the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from qworker.backend.deviations import refuse_unsupported
from qworker.kit.doctor_check import Check
from qworker.kit.files import list_names, store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_vsqs.admin import VsqsAdministration
from qworker_vsqs.lease import VsqsLease
from qworker_vsqs.queue_dir import Folder

__all__ = ["VsqsBackend"]


class VsqsBackend(VsqsAdministration):
    """Directories of messages; see the module."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "the order is that of the ids",
        "unique_key": "the protocol has no keys",
        "given_ids": "an id is the time of its making",
        "fields": "a message is its contents alone",
        "keep_done": "the protocol has no place for finished messages: an ack deletes the file",
        "argv": "a message is its contents alone",
    }

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages; with a capacity, wait for room."""
        check_queue(queue)
        refuse_unsupported("vsqs", self.deviations, drafts)
        if not drafts:
            return []
        folder = await self._found(queue, make=True)
        assert folder is not None
        assert self._publisher is not None
        with store_errors(f"publish to {queue}"):
            ids = await self._publisher.publish(folder, drafts)
        self._wake()
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def _refresh(self, folder: Folder) -> int:
        """See to it that the window may be believed, and that nothing in it has expired; how much had."""
        if self._events is not None:
            self._events.drain()
        async with folder.refreshing:
            if not folder.window.fresh:
                began = time.monotonic()
                folder.window.fill(await list_names(folder.fd), began)
                if self._events is not None:
                    self._events.drain()
            return await self._requeue_expired(folder)

    async def _requeue_expired(self, folder: Folder) -> int:
        expired = folder.window.expired(self._unit.ticks(self._clock.time()))
        if not expired:
            return 0
        count = 0
        async with folder.locked():
            for number, expiry in expired:
                if folder.requeue_expired(number, expiry):
                    folder.window.came(str(number))
                    count += 1
        return count

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Claim the oldest ready messages."""
        await wait_for_ready(self, queue, limit, timeout)
        folder = await self._found(queue)
        if folder is None or self._paused(folder):
            return []
        leases: list[Lease] = []
        with store_errors(f"lease from {queue}"):
            await self._refresh(folder)
            now = self._clock.time()
            while len(leases) < limit and (number := folder.window.take()) is not None:
                lease = self._consumer.claim(folder, number, now, visibility)
                if lease is not None:
                    leases.append(lease)
        return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a message, for the end of a lease, or for a delay to be over."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        while True:
            soonest = min([await self._until_work(queue) for queue in queues], default=float("inf"))
            give_up = min(give_up, loop.time() + soonest)
            left = give_up - loop.time()
            if left <= 0:
                return
            await self._changed(left)

    async def _until_work(self, queue: str) -> float:
        """Seconds until a queue has something, as far as is known now."""
        folder = await self._found(queue)
        if folder is None or self._paused(folder):
            return float("inf")
        with store_errors(f"read {queue}"):
            await self._refresh(folder)
        if folder.window.some_ready:
            return 0.0
        expiry = folder.window.next_expiry()
        return float("inf") if expiry is None else max(0.001, self._unit.seconds(expiry) - self._clock.time())

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases; from any thread."""
        now = self._clock.time()
        lost: list[Lease] = []
        for lease in leases:
            folder = self._folders.get(lease.message.queue)
            with store_errors(f"extend leases of {lease.message.queue}"):
                if (
                    folder is None
                    or not isinstance(lease, VsqsLease)
                    or not self._consumer.extend(folder, lease, now, visibility)
                ):
                    lost.append(lease)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        by_queue: dict[str, list[Settlement]] = {}
        for settlement in settlements:
            by_queue.setdefault(settlement.lease.message.queue, []).append(settlement)
        refused: list[Settlement] = []
        for queue, some in by_queue.items():
            folder = await self._found(queue)
            refused += some if folder is None else await self._settle(folder, some)
        return refused

    async def _settle(self, folder: Folder, settlements: list[Settlement]) -> list[Settlement]:
        files: list[int] = []
        done: list[VsqsLease] = []
        try:
            with store_errors(f"settle messages of {folder.name}"):
                try:
                    refused = await self._consumer.settle(folder, settlements, self._clock.time(), files, done)
                finally:
                    if done:
                        await self._sync(folder, files, noted=bool(files))
        except BaseException:
            # Ended, but perhaps not for good: a repetition is told so, and makes it durable.
            for lease in done:
                lease.unsure = True
            raise
        if any(settlement.action is not SettleAction.ACK for settlement in settlements):
            self._wake()
        return refused

    async def reap(self, queue: str) -> int:
        """Return expired leases with tries + 1, and what is due."""
        folder = await self._found(queue)
        if folder is None:
            return 0
        with store_errors(f"reap {queue}"):
            count = await self._refresh(folder)
        if count:
            self._wake()
        return count

    # -- besides the contract (qworker/backend/offers.py) ----------------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Try the directory."""
        from qworker.kit.directory.doctor import examine_directory

        return await examine_directory(url.directory)
