"""The sampler behind all pages of one store. It runs while a page is open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from qworker.backend import Backend
from qworker.backend.each_queue import describe_problem
from qworker.backend.offers import OffersDue
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import QworkerError
from qworker.failures.index import FailureIndex, IndexedGroup
from qworker.message import StoredMessage
from qworker.sampling import ErrorCount, QueueSampler, QueueSnapshot, RingSample, StoreSnapshot
from qworker.sampling.cpu_time import Timed
from qworker.sampling.ring import LEVELS
from qworker.schedules.code import supports_schedules
from qworker.ui.looks import Look, Looks

__all__ = ["Seen", "Watch"]

# Seconds between two samples, for which the first page waits, and after the last page until sampling ends.
_EVERY_S = 2.0
_PATIENCE_S = 2.0
# The part of a core that samples may cost, besides counts.
_SHARE = 0.02
_IDLE_S = 60.0
# Seconds of one sample after which the store is said not to answer.
_SILENT_S = 2.0
# Seconds between two reads of past samples, which are 10 s apart.
_PAST_S = 10.0
# Seconds between two refreshes of an index of failures at most.
_INDEXED_S = 60.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the sampler knows.

    Attributes:
        store: The URL of the store, without a password.
        snapshot: The last sample. None: there is none yet.
        problem: Why the store cannot be asked.
        has_schedules: Whether the store can keep schedules.
        deviations: The rules of the contract that the store does not keep.
        has_due: Whether a delayed message can be made due.
        is_writable: Whether this user can change the store, as far as it is known.
        unworked: The queues in which messages wait although no worker is seen, with the Unix seconds since when.
    """

    store: str
    snapshot: StoreSnapshot | None = None
    problem: str | None = None
    has_schedules: bool = False
    deviations: frozenset[str] = frozenset()
    has_due: bool = False
    is_writable: bool = False
    unworked: dict[str, float] = {}

    @property
    def queues(self) -> list[QueueSnapshot]:
        """The queues of the last sample."""
        return [] if self.snapshot is None else self.snapshot.queues

    @property
    def sampled_at(self) -> float | None:
        """Unix seconds of the last sample. None: there is none yet."""
        return None if self.snapshot is None else self.snapshot.at

    @property
    def has_history(self) -> bool:
        """Whether workers keep a history, as far as it is known."""
        return self.snapshot is None or self.snapshot.has_history

    def queue(self, name: str) -> QueueSnapshot | None:
        """Return the sample of a queue, or None if it is not known."""
        return next((one for one in self.queues if one.queue == name), None)


class Watch:
    """Samples a store from the first look to a minute after the last one.

    An application that is mounted in another one gets no lifespan. So nothing has to be started or closed.

    Args:
        open_store: A function that returns the open backend.
        url: A function that returns the URL, by which another process counts large queues. None: this process does.
        clock: The clock.

    Attributes:
        clock: The clock.
        looks: Other reads of the store.
    """

    def __init__(
        self,
        open_store: Callable[[], Awaitable[Backend]],
        url: Callable[[], str] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._open_store = open_store
        self._url = url
        self.clock = clock
        self._task: asyncio.Task[None] | None = None
        self._sampler: QueueSampler | None = None
        self._first = asyncio.Event()
        self._looked_at = clock.monotonic()
        # Monotonic seconds at which the sample began that is being taken.
        self._tick_began: float | None = None
        self._seen = Seen(store="")
        self.looks = Looks(clock=clock)
        self._indexes: dict[str, FailureIndex] = {}

    @property
    def seen(self) -> Seen:
        """What the last look has seen."""
        return self._seen

    @property
    def url(self) -> str | None:
        """The URL of the store. None: it is not known."""
        return None if self._url is None else self._url()

    async def see(self) -> Seen:
        """Return what is known. The first look waits for the first sample, but not for long."""
        self._looked_at = self.clock.monotonic()
        if self._task is None or self._task.done():
            self._first = asyncio.Event()
            self._task = asyncio.create_task(self._run(), name="qworker-ui-sampler")
        if not self._first.is_set():
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._first.wait()
            except TimeoutError:
                pass
        began = self._tick_began
        silent = 0.0 if began is None else self.clock.monotonic() - began
        if silent < _SILENT_S or self._seen.problem is not None:
            return self._seen
        return msgspec.structs.replace(self._seen, problem=f"it has not answered for {silent:.0f} s")

    async def backend(self) -> Backend:
        """Return the open backend.

        Raises:
            BackendError: It cannot be opened.
        """
        return await self._open_store()

    async def past(self, queue: str, level: int) -> list[RingSample]:
        """Return the samples of the last hour (level 0), day (1) or week (2) of a queue. They are empty at first."""
        sampler = self._sampler
        if sampler is None:
            return []
        read = partial(sampler.past, queue, LEVELS[level])
        return (await self.looks.look(("past", queue, level), read, _PAST_S)).value or []

    async def failures(self, queue: str) -> Look[list[IndexedGroup]]:
        """Return the groups of the failed messages of a queue, the largest first."""

        async def refresh() -> list[IndexedGroup]:
            if queue not in self._indexes:
                self._indexes[queue] = FailureIndex(await self._open_store(), queue)
            return await self._indexes[queue].refresh()

        # The first refresh reads all messages, and the next ones what is new.
        return await self.looks.look(("failures", queue), refresh, most=_INDEXED_S)

    async def newest_of(self, queue: str, key: str) -> Look[list[StoredMessage]]:
        """Return the newest messages of a group of failures that `failures` has found, the last one first."""

        async def read() -> list[StoredMessage]:
            index = self._indexes.get(queue)
            return [] if index is None else await index.read_newest(key)

        return await self.looks.look(("group", queue, key), read)

    def errors(self) -> tuple[float, list[ErrorCount]]:
        """Return for how many seconds errors have been counted, at most an hour, and the errors."""
        return (0.0, []) if self._sampler is None else self._sampler.errors()

    async def aclose(self) -> None:
        """End sampling, and all reads. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self.looks.aclose()

    async def _run(self) -> None:
        try:
            while self.clock.monotonic() - self._looked_at < _IDLE_S:
                self._tick_began = self.clock.monotonic()
                tick = Timed(self._tick())
                await tick
                self._tick_began = None
                self._first.set()
                # To look at hundreds of queues is not free, even if none has changed.
                await asyncio.sleep(max(_EVERY_S, tick.cpu_s / _SHARE))
        finally:
            self._tick_began = None
            sampler, self._sampler = self._sampler, None
            self._indexes.clear()
            if sampler is not None:
                await sampler.aclose()

    async def _tick(self) -> None:
        try:
            if self._sampler is None:
                backend = await self._open_store()
                self._seen = msgspec.structs.replace(
                    self._seen,
                    store=backend.describe(),
                    has_schedules=supports_schedules(backend.deviations),
                    deviations=frozenset(backend.deviations),
                    has_due=isinstance(backend, OffersDue),
                    is_writable=backend.directory is None or os.access(backend.directory, os.W_OK),
                )
                self._sampler = QueueSampler(backend, url=None if self._url is None else self._url(), clock=self.clock)
            snapshot = await self._sampler.tick()
            for gone in self._indexes.keys() - {one.queue for one in snapshot.queues}:
                del self._indexes[gone]
        except (QworkerError, OSError) as error:
            self._seen = msgspec.structs.replace(self._seen, problem=describe_problem(error))
            return
        self._seen = msgspec.structs.replace(
            self._seen, snapshot=snapshot, problem=snapshot.problem, unworked=self._unworked(snapshot)
        )

    def _unworked(self, snapshot: StoreSnapshot) -> dict[str, float]:
        found = (one.queue for one in snapshot.queues if _waits_for_a_worker(one))
        return {queue: self._seen.unworked.get(queue, snapshot.at) for queue in found}


def _waits_for_a_worker(one: QueueSnapshot) -> bool:
    if one.counted is None or one.problem is not None:
        return False
    stats = one.counted.count.stats
    has_worker = one.flow is not None and one.flow.workers > 0
    return stats.ready > 0 and not stats.leased and not stats.paused and not has_worker
