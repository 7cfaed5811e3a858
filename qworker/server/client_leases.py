"""The leases of HTTP clients.

A client has the fencing token, and this module keeps the `Lease` of the backend while the process lives. After a
restart it asks the backend for the lease again. Such a lease ends only when it expires or when its holder ends it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import anyio
import structlog
from msgspec.structs import replace

from qworker.asgi.interface import Receive, Scope, call_if_unread
from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendError, NotSupported
from qworker.kit.task_groups import run_until
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Lease, SettleAction, Settlement
from qworker.server.memory import MemoryBudget
from qworker.server.polls import Polls
from qworker.server.schemas import LeaseGrant

__all__ = ["ClientLeases", "parse_token"]

# Seconds that a lease is kept after its expiry. The store's clock decides, and the clock of this machine can be ahead.
_GRACE = 60.0

log = structlog.get_logger()


class ClientLeases:
    """The leases that clients hold.

    Args:
        backend: The backend of the leases.
        memory: The memory of bodies.
        clock: The clock that decides when old leases are dropped.
    """

    def __init__(self, backend: Backend, memory: MemoryBudget, clock: Clock = SYSTEM_CLOCK) -> None:
        self._backend = backend
        self._memory = memory
        self._clock = clock
        self._held: dict[tuple[str, str], Lease] = {}
        # The number of calls of `take` that run now, by queue.
        self._taking: Counter[str] = Counter()
        self._releases: set[asyncio.Task[None]] = set()
        self.polls = Polls()

    def __len__(self) -> int:
        return len(self._held)

    async def take(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[LeaseGrant]:
        """Lease messages, and keep the leases without the bodies.

        Fewer messages are leased if the bodies are large.

        Args:
            queue: Name of the queue.
            limit: Maximum number of messages.
            visibility: Length of the leases in seconds.
            timeout: Seconds to wait for the first message.
        """
        self._taking[queue] += 1
        taken: list[Lease] = []
        try:
            # Their sizes are not known.
            wanted = self._memory.batch(limit)
            while taken_now := await self._lease(queue, wanted, visibility, 0.0 if taken else timeout):
                taken += taken_now
                if len(taken_now) < wanted or (wanted := self._wanted(limit, taken)) <= 0:
                    break
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in taken])
            raise
        finally:
            self._taking[queue] -= 1
            if not self._taking[queue]:
                del self._taking[queue]
        grants = [LeaseGrant(lease.message, lease.token, lease.expires_at) for lease in taken]
        for lease in taken:
            self._held[lease.message.queue, lease.message.id] = _without_body(lease)
        return grants

    def _wanted(self, limit: int, taken: list[Lease]) -> int:
        """Return how many more messages to lease. They are expected to be as large as the largest one so far."""
        sizes = [len(lease.message.body) for lease in taken]
        room = (self._memory.total // 4 - sum(sizes)) // max(1, *sizes)
        return min(limit - len(taken), room)

    async def _lease(self, queue: str, limit: int, visibility: float, timeout: float) -> list[Lease]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        left = timeout
        while not (leases := await self._backend.lease(queue, limit, visibility, left)) and left > 0:
            # `lease` can return early without a message.
            await asyncio.sleep(0.001)
            left = max(0.0, deadline - loop.time())
        return leases

    async def take_unless_disconnected(
        self, receive: Receive, queue: str, limit: int, visibility: float, timeout: float
    ) -> list[LeaseGrant]:
        """Take messages as `take` does. If the client or the server ends meanwhile, release them and return none."""
        taking = self.take(queue, limit, visibility, timeout)
        return await run_until(partial(self.polls.wait_for_end, receive), taking, self.release) or []

    def release_if_unread(self, scope: Scope, grants: list[LeaseGrant]) -> None:
        """Release leases if their client leaves before it has read them in the response to its request."""
        # Without the bodies: this is known until the next request of the connection.
        given = [(grant.message.queue, grant.message.id, grant.token, grant.expires_at) for grant in grants]

        def release() -> None:
            held = [(self._held.get((queue, message_id)), token, expiry) for queue, message_id, token, expiry in given]
            # A client that has extended its lease knows it.
            unread = [
                lease
                for lease, token, expiry in held
                if lease is not None and lease.token == token and lease.expires_at == expiry
            ]
            if unread:
                task = asyncio.create_task(self._release_unread(unread))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)

        call_if_unread(scope, release)

    async def _release_unread(self, leases: list[Lease]) -> None:
        try:
            await self._release(leases)
        except BackendError as error:
            # They end when they expire.
            log.warning("backend_error", error=str(error))

    async def aclose(self) -> None:
        """Wait for the running releases."""
        while self._releases:
            await asyncio.wait(self._releases)

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Return the lease with this token, or None if it is lost."""
        lease = self._held.get((queue, message_id))
        if lease is not None and lease.token == token:
            return lease
        remote = self._backend.remote_leases
        found = None if remote is None else await remote.find(queue, message_id, token)
        return None if found is None else _without_body(found)

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

    async def release(self, grants: list[LeaseGrant]) -> None:
        """Release leases that no client has received."""
        places = [(grant.message.queue, grant.message.id) for grant in grants]
        await self._release([self._held[place] for place in places if place in self._held])

    async def _release(self, leases: list[Lease]) -> None:
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


def _without_body(lease: Lease) -> Lease:
    """Drop the body of a lease. A backend whose leases are nothing but their message may need it to settle."""
    if type(lease) is not Lease:
        lease.message = replace(lease.message, body=b"")
    return lease


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
