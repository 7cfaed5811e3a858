"""ClientLeases taken over HTTP. The client has the token; this keeps the backend's own object beside it, as long as the process lives.

After a restart the backend is asked for the lease again: it ends by time, by its holder, and by nothing else.
"""

from __future__ import annotations

import asyncio

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import NotSupported
from qworker.message import Lease, SettleAction, Settlement

__all__ = ["ClientLeases", "parse_token"]

# Seconds that a lease is remembered past its expiry: the store's clock decides, and this one may be ahead.
_GRACE = 60.0


class ClientLeases:
    """The leases that clients hold.

    Args:
        backend: Where they were taken.
        clock: When to forget them.
    """

    def __init__(self, backend: Backend, clock: Clock = SYSTEM_CLOCK) -> None:
        self._backend = backend
        self._clock = clock
        self._held: dict[tuple[str, str], Lease] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def take(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages, waiting up to `timeout` seconds for the first, and remember the leases."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        left = timeout
        while not (leases := await self._backend.lease(queue, limit, visibility, left)) and left > 0:
            # A lease may return early with nothing.
            await asyncio.sleep(0.001)
            left = max(0.0, deadline - loop.time())
        for lease in leases:
            self._held[lease.message.queue, lease.message.id] = lease
        return leases

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Return the lease that has this token; None when it is lost."""
        lease = self._held.get((queue, message_id))
        if lease is not None and lease.token == token:
            return lease
        remote = self._backend.remote_leases
        return None if remote is None else await remote.find(queue, message_id, token)

    async def extend(self, queue: str, message_id: str, token: int, visibility: float) -> Lease | None:
        """Extend a lease; None when it is lost."""
        lease = await self.find(queue, message_id, token)
        if lease is None:
            return None
        # It blocks: on a network, for as long as that takes.
        if await asyncio.to_thread(self._backend.extend, [lease], visibility):
            self.forget(queue, message_id)
            return None
        self._held[queue, message_id] = lease
        return lease

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
        """End a lease; False when it is lost."""
        lease = await self.find(queue, message_id, token)
        if lease is None:
            return False
        refused = await self._backend.settle([Settlement(lease=lease, action=action, delay=delay, error=error)])
        self.forget(queue, message_id)
        return not refused

    async def release(self, leases: list[Lease]) -> None:
        """Give back leases that nobody heard of."""
        await self._backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases])
        for lease in leases:
            self.forget(lease.message.queue, lease.message.id)

    def forget(self, queue: str, message_id: str) -> None:
        """A lease is over."""
        self._held.pop((queue, message_id), None)

    def prune(self) -> None:
        """Forget what expired long ago."""
        limit = self._clock.time() - _GRACE
        for place in [place for place, lease in self._held.items() if lease.expires_at < limit]:
            del self._held[place]


def parse_token(text: bytes | None) -> int | None:
    """Return the token of a request's header; None without one.

    Raises:
        NotSupported: It is no token.
    """
    if text is None:
        return None
    if not text.isdigit() or len(text) > 20:
        raise NotSupported("the X-Lease-Token header must be the whole number that you received with the message")
    return int(text)
