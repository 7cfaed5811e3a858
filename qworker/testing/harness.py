"""What the contract suite needs to know of a store: how to open it twice, and how to let time pass on it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.clock import SYSTEM_CLOCK
from qworker.message import Draft, Lease, Query, QueueStats, SettleAction, Settlement, State, StoredMessage
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until_blocked import wait_until_blocked, waits_for
from qworker.url import BackendURL

__all__ = ["Case", "Harness"]


class Harness:
    """A store under test.

    With a `FakeClock` (the default) the backends take their time from it, and `advance` costs nothing. A store with a clock of
    its own needs `clock=None`: `advance` then really waits, unless a subclass can move the store's clock (by setting all
    stored times back, for one).

    Args:
        url: The store; every `open` opens this URL.
        clock: What the backends get; None: the machine's clock.
        tick: Seconds that are long compared with any one call, and the unit of every time in the suite; short with a real
            clock, where the suite waits for about fifty of them.
    """

    def __init__(self, url: str, *, clock: FakeClock | None, tick: float | None = None) -> None:
        self.url = url
        self.clock = clock
        self.tick = tick if tick is not None else (2.0 if clock is None else 60.0)
        self._opened: list[Backend] = []

    @classmethod
    def fake(cls, url: str) -> Self:
        """Return a harness with a fake clock."""
        return cls(url, clock=FakeClock())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def deviations(self) -> Mapping[str, str]:
        """What the backend declares."""
        return (self._opened[0] if self._opened else self.make()).deviations

    def make(self, *, remote_leases: bool = False, **options: str) -> Backend:
        """Another backend on the same store, not yet opened; closed with the harness.

        Args:
            remote_leases: Whether its leases outlive it.
            options: Options of its URL.
        """
        clock = SYSTEM_CLOCK if self.clock is None else self.clock
        backend = open_backend(self.with_options(options), clock=clock, remote_leases=remote_leases)
        self._opened.append(backend)
        return backend

    def with_options(self, options: Mapping[str, str]) -> str:
        """Return the URL of the store, with these options set."""
        return BackendURL.parse(self.url).with_options(**options)

    async def open(self, *, remote_leases: bool = False, **options: str) -> Backend:
        """Another backend on the same store: another worker. See `make`."""
        backend = self.make(remote_leases=remote_leases, **options)
        await backend.open()
        return backend

    async def advance(self, seconds: float) -> None:
        """Let time pass on the store and on its backends."""
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.advance(seconds)

    async def aclose(self) -> None:
        """Close every backend."""
        while self._opened:
            await self._opened.pop().aclose()


class Case:
    """One test: a queue of its own, a backend, and short names for what tests do."""

    def __init__(self, harness: Harness, backend: Backend) -> None:
        self.harness = harness
        self.backend = backend
        self.queue = f"suite-{secrets.token_hex(6)}"
        # A visibility that no test outlives.
        self.long = 1000.0 * harness.tick
        self.tick = harness.tick

    async def open(self, *, remote_leases: bool = False, **options: str) -> Backend:
        """Return a second worker's backend, with these options of its URL."""
        return await self.harness.open(remote_leases=remote_leases, **options)

    async def publish(self, *bodies: bytes, **options: Any) -> list[str]:
        """Publish bodies as one batch, with the same options of `Draft` for each."""
        return await self.backend.publish(self.queue, [Draft(body=body, **options) for body in bodies])

    async def lease(self, limit: int = 1, visibility: float | None = None, by: Backend | None = None) -> list[Lease]:
        """Lease; for a long time, and with the first backend, unless told otherwise."""
        return await (by or self.backend).lease(self.queue, limit, self.long if visibility is None else visibility)

    async def lease_one(self, visibility: float | None = None, by: Backend | None = None) -> Lease:
        """Lease one message that is known to be there."""
        leases = await self.lease(1, visibility, by)
        assert len(leases) == 1, "a message is ready, and lease gives none"
        return leases[0]

    async def leased_bodies(self, limit: int = 100) -> list[bytes]:
        """Lease, and give the bodies."""
        return [lease.message.body for lease in await self.lease(limit)]

    async def settle(
        self,
        lease: Lease,
        action: SettleAction,
        *,
        delay: float = 0.0,
        error: str | None = None,
        by: Backend | None = None,
    ) -> bool:
        """End a lease; False: it was refused."""
        settlement = Settlement(lease=lease, action=action, delay=delay, error=error)
        refused = await (by or self.backend).settle([settlement])
        assert refused in ([], [settlement])
        return not refused

    async def fail(self, *bodies: bytes, error: str = "broken") -> list[str]:
        """Publish messages and fail them for good."""
        ids = await self.publish(*bodies)
        leases = await self.lease(len(bodies))
        ends = [Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error) for lease in leases]
        assert await self.backend.settle(ends) == []
        return ids

    async def until_waiting(self, call: asyncio.Future[Any], by: Backend | None = None) -> None:
        """Return when a call of a backend waits for more than an answer of the store, or has ended."""
        while await wait_until_blocked(call):
            before = waits_for(call)
            # A call that waited for the store alone goes on while another one goes there and back.
            await (by or self.backend).queues()
            if before is not None and waits_for(call) is before:
                break

    async def expire(self, visibility: float, by: Backend | None = None) -> int:
        """Let a visibility pass as running workers see it, reaping before and after; the number of reaped messages."""
        backend = by or self.backend
        early = await backend.reap(self.queue)
        await self.harness.advance(visibility * 1.5)
        return early + await backend.reap(self.queue)

    async def stats(self) -> QueueStats:
        """Count the queue."""
        return await self.backend.stats(self.queue)

    async def counts(self) -> tuple[int, int, int, int]:
        """Return how many are ready, leased, delayed and failed."""
        stats = await self.stats()
        return stats.ready, stats.leased, stats.delayed, stats.failed

    async def find(self, message_id: str) -> StoredMessage | None:
        """Look at one message."""
        return next(iter(await self.backend.find(self.queue, [message_id])), None)

    async def state(self, message_id: str) -> State | None:
        """Where a message is."""
        found = await self.find(message_id)
        return None if found is None else found.state

    async def messages(self, state: State, by: Backend | None = None, **options: Any) -> list[StoredMessage]:
        """Return the messages that a query with these options of `Query` gives."""
        return await list_messages(by or self.backend, self.queue, Query(state, **options))

    async def browse(self, state: State, **options: Any) -> list[bytes]:
        """Their bodies."""
        return [stored.message.body for stored in await self.messages(state, **options)]

    def settlements(self, leases: Sequence[Lease], action: SettleAction, **options: Any) -> list[Settlement]:
        """Return the same end for several leases."""
        return [Settlement(lease=lease, action=action, **options) for lease in leases]
