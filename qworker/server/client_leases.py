"""The leases of HTTP clients.

A client has the fencing token, and this module keeps the `Lease` of the backend while the process lives. After a
restart it asks the backend for the lease again. Such a lease ends only when it expires or when its holder ends it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from qworker.asgi.interface import Receive, wait_for_disconnect
from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import NotSupported
from qworker.kit.task_groups import run_until
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Lease, SettleAction, Settlement

__all__ = ["ClientLeases", "parse_token"]

# Seconds that a lease is kept after its expiry. The store's clock decides, and the clock of this machine can be ahead.
_GRACE = 60.0


class ClientLeases:
    """The leases that clients hold.

    Args:
        backend: The backend of the leases.
        clock: The clock that decides when old leases are dropped.
    """

    def __init__(self, backend: Backend, clock: Clock = SYSTEM_CLOCK) -> None:
        self._backend = backend
        self._clock = clock
        self._held: dict[tuple[str, str], Lease] = {}
        # The number of calls of `take` that run now, by queue.
        self._taking: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    async def take(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages and keep the leases. Wait up to `timeout` seconds for the first message."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        left = timeout
        self._taking[queue] += 1
        try:
            while not (leases := await self._backend.lease(queue, limit, visibility, left)) and left > 0:
                # `lease` can return early without a message.
                await asyncio.sleep(0.001)
                left = max(0.0, deadline - loop.time())
        finally:
            self._taking[queue] -= 1
            if not self._taking[queue]:
                del self._taking[queue]
        for lease in leases:
            self._held[lease.message.queue, lease.message.id] = lease
        return leases

    async def take_unless_disconnected(
        self, receive: Receive, queue: str, limit: int, visibility: float, timeout: float
    ) -> list[Lease]:
        """Take messages as `take` does. If the client disconnects meanwhile, release them and return none."""
        taking = self.take(queue, limit, visibility, timeout)
        return await run_until(partial(wait_for_disconnect, receive), taking, self.release) or []

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Return the lease with this token, or None if it is lost."""
        lease = self._held.get((queue, message_id))
        if lease is not None and lease.token == token:
            return lease
        remote = self._backend.remote_leases
        return None if remote is None else await remote.find(queue, message_id, token)

    async def extend(self, queue: str, message_id: str, token: int, visibility: float) -> Lease | None:
        """Extend a lease and return it, or None if it is lost."""
        lease = await self.find(queue, message_id, token)
        if lease is None:
            return None
        if await self.extend_all([lease], visibility):
            self.forget(queue, message_id)
            return None
        self._held[queue, message_id] = lease
        return lease

    async def extend_all(self, leases: list[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        # `Backend.extend` blocks, on a network for a long time.
        return list(await run_in_thread(BlockingCall.EXTEND, self._backend.extend, leases, visibility))

    async def settle(
        self,
        queue: str,
        message_id: str,
        token: int,
        action: SettleAction,
        *,
        delay: float = 0.0,
        error: str | None = None,
    ) -> bool:
        """Settle a lease. Return False if it is lost."""
        lease = await self.find(queue, message_id, token)
        if lease is None:
            return False
        refused = await self._backend.settle([Settlement(lease=lease, action=action, delay=delay, error=error)])
        self.forget(queue, message_id)
        return not refused

    async def release(self, leases: list[Lease]) -> None:
        """Release leases that no client has received."""
        await self._backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases])
        for lease in leases:
            self.forget(lease.message.queue, lease.message.id)

    def queues_in_use(self) -> set[str]:
        """Return the queues from which clients lease or hold messages."""
        return {*(queue for queue, _ in self._held), *self._taking}

    def forget(self, queue: str, message_id: str) -> None:
        """Drop a lease that has ended."""
        self._held.pop((queue, message_id), None)

    def prune(self) -> None:
        """Drop leases that expired some time ago."""
        limit = self._clock.time() - _GRACE
        for place in [place for place, lease in self._held.items() if lease.expires_at < limit]:
            del self._held[place]


def parse_token(text: bytes | None) -> int | None:
    """Return the fencing token of a request's header, or None if the header is missing.

    Raises:
        NotSupported: The header is not a fencing token.
    """
    if text is None:
        return None
    if not text.isdigit() or len(text) > 20:
        raise NotSupported("the X-Lease-Token header must be the whole number that you received with the message")
    return int(text)
