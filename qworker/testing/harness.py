"""The harness of the contract suite: it opens backends on a store, and lets time pass there."""

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

    With a `FakeClock` (the default), `advance` takes no time. A store that does not use the clock of its backend needs
    `clock=None`. Then `advance` really waits, unless a subclass can move the store's clock, for example by changing all
    stored times.

    Args:
        url: The URL of the store. Every `open` opens it.
        clock: The clock of the backends. None: the machine's clock.
        tick: Seconds that are longer than any call takes. It is the unit of all times in the suite. With a real clock
            the suite waits for about fifty ticks, so use a short one.
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
        """The deviations that the backend declares."""
        return (self._opened[0] if self._opened else self.make()).deviations

    def make(self, *, remote_leases: bool = False, **options: str) -> Backend:
        """Return another backend on the same store, which is not open yet. The harness closes it.

        Args:
            remote_leases: Whether its leases outlive it. See `Backend.from_url`.
            options: Options for the URL.
        """
        clock = SYSTEM_CLOCK if self.clock is None else self.clock
        backend = open_backend(self.with_options(options), clock=clock, remote_leases=remote_leases)
        self._opened.append(backend)
        return backend

    def with_options(self, options: Mapping[str, str]) -> str:
        """Return the URL of the store with these options."""
        return BackendURL.parse(self.url).with_options(**options)

    async def open(self, *, remote_leases: bool = False, **options: str) -> Backend:
        """Open another backend on the same store, as another worker does. See `make`."""
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
    """The queue and the backend of one test, with short names for operations."""

    def __init__(self, harness: Harness, backend: Backend) -> None:
        self.harness = harness
        self.backend = backend
        self.queue = f"suite-{secrets.token_hex(6)}"
        # A visibility timeout that is longer than any test.
        self.long = 1000.0 * harness.tick
        self.tick = harness.tick

    async def open(self, *, remote_leases: bool = False, **options: str) -> Backend:
        """Open the backend of another worker, with these options for the URL."""
        return await self.harness.open(remote_leases=remote_leases, **options)

    async def publish(self, *bodies: bytes, **options: Any) -> list[str]:
        """Publish bodies as one batch, with the same options of `Draft` for each."""
        return await self.backend.publish(self.queue, [Draft(body=body, **options) for body in bodies])

    async def lease(self, limit: int = 1, visibility: float | None = None, by: Backend | None = None) -> list[Lease]:
        """Lease messages. The default is a long time and the first backend."""
        return await (by or self.backend).lease(self.queue, limit, self.long if visibility is None else visibility)

    async def lease_one(self, visibility: float | None = None, by: Backend | None = None) -> Lease:
        """Lease one message, which must be ready."""
        leases = await self.lease(1, visibility, by)
        assert len(leases) == 1, "a message is ready, but lease returns none"
        return leases[0]

    async def leased_bodies(self, limit: int = 100) -> list[bytes]:
        """Lease messages and return their bodies."""
        return [lease.message.body for lease in await self.lease(limit)]

    async def settle(
        self,
        lease: Lease,
        action: SettleAction,
        *,
        delay: float = 0.0,
        error: str | None = None,
        died: bool = False,
        survived: bool = False,
        by: Backend | None = None,
    ) -> bool:
        """Settle a lease. Return False if the settlement was refused."""
        settlement = Settlement(lease=lease, action=action, delay=delay, error=error, died=died, survived=survived)
        refused = await (by or self.backend).settle([settlement])
        assert refused in ([], [settlement])
        return not refused

    async def fail(self, *bodies: bytes, error: str = "broken") -> list[str]:
        """Publish messages, fail them permanently, and return their ids."""
        ids = await self.publish(*bodies)
        leases = await self.lease(len(bodies))
        ends = [Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error) for lease in leases]
        assert await self.backend.settle(ends) == []
        return ids

    async def until_waiting(self, call: asyncio.Future[Any], by: Backend | None = None) -> None:
        """Wait until a call of a backend waits for more than an answer of the store, or has ended."""
        while await wait_until_blocked(call):
            before = waits_for(call)
            # If the call waits only for an answer of the store, it continues before another call has its answer.
            await (by or self.backend).queues()
            if before is not None and waits_for(call) is before:
                break

    async def expire(self, visibility: float, by: Backend | None = None) -> int:
        """Let a visibility timeout pass, reap before and after it, and return the number of reaped messages."""
        backend = by or self.backend
        early = (await backend.reap(self.queue)).returned
        await self.harness.advance(visibility * 1.5)
        return early + (await backend.reap(self.queue)).returned

    async def stats(self) -> QueueStats:
        """Return the counts of the queue."""
        return await self.backend.stats(self.queue)

    async def counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of ready, leased, delayed and failed messages."""
        stats = await self.stats()
        return stats.ready, stats.leased, stats.delayed, stats.failed

    async def find(self, message_id: str) -> StoredMessage | None:
        """Return one message, or None."""
        return next(iter(await self.backend.find(self.queue, [message_id])), None)

    async def state(self, message_id: str) -> State | None:
        """Return the state of a message."""
        found = await self.find(message_id)
        return None if found is None else found.state

    async def messages(self, state: State, by: Backend | None = None, **options: Any) -> list[StoredMessage]:
        """Return the messages of a query with these options of `Query`."""
        return await list_messages(by or self.backend, self.queue, Query(state, **options))

    async def browse(self, state: State, **options: Any) -> list[bytes]:
        """Return the bodies of the messages of a query."""
        return [stored.message.body for stored in await self.messages(state, **options)]

    def settlements(self, leases: Sequence[Lease], action: SettleAction, **options: Any) -> list[Settlement]:
        """Return settlements with the same action for several leases."""
        return [Settlement(lease=lease, action=action, **options) for lease in leases]
