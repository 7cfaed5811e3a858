"""The counts of one queue, taken as often as they are cheap and shared with other processes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Iterable

import msgspec

from qworker.backend import Backend
from qworker.backend.count_process import count_in_process
from qworker.backend.each_queue import can_be_of_one_queue, describe_problem
from qworker.backend.offers import OffersCount, QueueCount
from qworker.clock import Clock
from qworker.errors import QueueNotFound
from qworker.kit.samples import SampleStore
from qworker.sampling.cpu_time import Timed
from qworker.sampling.ring import RING_SIZE, Ring
from qworker.sampling.snapshot import Counted
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["Budget", "QueueCounter", "SharedCount", "decode_shared", "encode_shared"]

# The part of a core that the counts of one queue may cost, and those of all.
_SHARE, _SHARE_OF_ALL = 0.02, 0.05
# Above this number of messages a count has its own process, if the queue can be opened again.
_MANY = 50_000
# Seconds in which two changes of a directory may have the same time.
_TICK = 2.0
# Seconds between two counts of which the growth of the backlog is computed, at least.
_GROWTH_S = 10.0
# The largest stored count in bytes.
_MOST_SHARED = 1 << 17


class Budget(msgspec.Struct):
    """How often queues are counted.

    Attributes:
        least_s: Seconds between two counts of a cheap queue.
        slower: By how much all pauses are longer, because all queues together would cost too much.
    """

    least_s: float
    slower: float = 1.0

    def limit(self, cpu_s: Iterable[float]) -> None:
        """Make the pauses longer if counts that cost so many seconds of CPU each would cost too much together."""
        self.slower = max(1.0, sum(min(one / max(self.least_s, 1e-3), _SHARE) for one in cpu_s) / _SHARE_OF_ALL)

    def pause(self, cpu_s: float) -> float:
        """Return the seconds from a count that cost `cpu_s` seconds of CPU to the next one."""
        return max(self.least_s, cpu_s / _SHARE) * self.slower


class SharedCount(msgspec.Struct, frozen=True):
    """A count, as one process leaves it for the others.

    Attributes:
        at: Unix seconds at which it began.
        cpu_s: CPU seconds that it cost.
        settled: Whether the queue's directories had not changed for some time before it began, so that a later change
            changes the version.
        count: The count.
    """

    at: float
    cpu_s: float
    settled: bool
    count: QueueCount


def encode_shared(shared: SharedCount) -> bytes:
    """Return the stored form of a count, which follows the ring."""
    data = msgspec.json.encode(shared)
    return len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def decode_shared(stored: bytes) -> SharedCount | None:
    """Read a count. None: there is none, or a crash has cut it."""
    data = stored[8 : 8 + int.from_bytes(stored[:4], "little")]
    if zlib.crc32(data) != int.from_bytes(stored[4:8], "little"):
        return None
    try:
        return msgspec.json.decode(data, type=SharedCount)
    except msgspec.DecodeError:
        return None


class QueueCounter:
    """Counts one queue.

    Args:
        backend: The open backend.
        queue: The queue.
        samples: Where counts are shared.
        budget: How often it is counted.
        clock: The clock.
        url: The URL of the backend. None: a large queue is counted in this process too.

    Attributes:
        counted: The newest count. None: there is none yet.
        problem: Why the queue cannot be used, while other queues may work.
        error: The error of the last call, if it concerns the whole store.
        exists: False after a count did not find the queue.
        cpu_s: CPU seconds of the last count.
        is_free: Set while no count runs in this process. A count in another process takes longer than a tick waits.
        ring: The past of the queue.
    """

    def __init__(
        self, backend: Backend, queue: str, samples: SampleStore, budget: Budget, clock: Clock, url: str | None
    ) -> None:
        self._backend = backend
        self._queue = queue
        self._samples = samples
        self._budget = budget
        self._clock = clock
        self._url = url
        self._offer: OffersCount | None = backend if isinstance(backend, OffersCount) else None
        self.counted: Counted | None = None
        self.problem: str | None = None
        self.error: Exception | None = None
        self.exists = True
        self.cpu_s = 0.0
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.ring = Ring(samples, queue)
        self._shared: SharedCount | None = None
        # Counts of which the growth is computed, the newest last.
        self._past: list[tuple[float, int]] = []
        # The version of the directories, and the monotonic time at which it was first seen.
        self._version: str | None = None
        self._version_at = 0.0
        self._due = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that counts now, if one does."""
        return self._task

    def silence(self, now: float) -> float:
        """Return the seconds for which a store that counts at once has not answered."""
        return now - self._began if self._task is not None and self._offer is None else 0.0

    async def tick(self, now: float) -> None:
        """Confirm the last count if nothing has changed. Otherwise start a count if one is due and none is running.

        Args:
            now: Monotonic seconds.
        """
        if self._task is None and not await self._guarded(self._confirm(now)) and now >= self._due:
            self._began = now
            self.is_free.clear()
            self._task = asyncio.create_task(self._count_in_task(now), name=f"qworker-count-{self._queue}")

    async def aclose(self) -> None:
        """End a count that is running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _count_in_task(self, now: float) -> None:
        try:
            # Before the count: if it fails, the next one is not at once.
            self._due = now + self._budget.least_s
            await self._guarded(self._count(now))
        finally:
            self._task = None
            self.is_free.set()

    async def _guarded(self, step: Awaitable[bool]) -> bool:
        """Return the result of a step. If it fails, keep the reason, and return False."""
        try:
            done = await step
        except QueueNotFound:
            self.exists = False
            self.counted = self._shared = self.problem = self.error = None
            return False
        except BACKEND_ERRORS as error:
            if can_be_of_one_queue(self._backend, error):
                self.problem, self.error = describe_problem(error), None
            else:
                self.error = error
            return False
        if done:
            self.exists = True
            self.problem = self.error = None
        return done

    async def _confirm(self, now: float) -> bool:
        stands = await self._stands(now)
        counted = self.counted
        if counted is None or not stands:
            return False
        at, stats = self._clock.time(), counted.count.stats
        growth = self._growth(at, stats.ready + stats.leased + stats.delayed)
        self.counted = msgspec.structs.replace(counted, at=at, backlog_rate=growth)
        return True

    async def _stands(self, now: float) -> bool:
        """Return whether the last count is still right, because nothing has changed."""
        if self._offer is None:
            return False
        version = await self._offer.count_version(self._queue)
        if version != self._version:
            self._version, self._version_at = version, now
        last = self._shared
        if last is None or version is None or not last.settled or last.count.version != version:
            return False
        due = last.count.next_due
        return due is None or due > self._clock.time()

    async def _count(self, now: float) -> bool:
        with self._samples.lock(self._queue) as is_free:
            # If not, another process counts. Its count is here at the next tick.
            if is_free:
                other = await self._read_shared()
                if other is None or self._clock.time() - other.at >= self._budget.pause(other.cpu_s):
                    await self._count_and_share(now)
                else:
                    self._due = now + other.at + self._budget.pause(other.cpu_s) - self._clock.time()
                    self._take(other)
        return True

    async def _count_and_share(self, now: float) -> None:
        at = self._clock.time()
        settled = self._version is not None and now - self._version_at >= _TICK
        count, self.cpu_s = await self._count_now()
        self._due = now + self._budget.pause(self.cpu_s)
        shared = SharedCount(at, self.cpu_s, settled, count)
        self._take(shared)
        if self._offer is not None:
            await self._samples.write(self._queue, RING_SIZE, encode_shared(shared))

    async def _read_shared(self) -> SharedCount | None:
        """Return a count of another process that is newer than the last one here."""
        if self._offer is None:
            return None
        stored = decode_shared(await self._samples.read(self._queue, RING_SIZE, _MOST_SHARED))
        mine = self._shared
        if stored is None or stored.at > self._clock.time() or (mine is not None and stored.at <= mine.at):
            return None
        return stored

    async def _count_now(self) -> tuple[QueueCount, float]:
        """Count, and return the CPU seconds that it cost."""
        offer = self._offer
        if offer is None:
            whole = Timed(self._backend.stats(self._queue))
            return QueueCount(stats=await whole), whole.cpu_s
        can_start = self._url is not None
        if self._shared is None or not can_start or self._shared.count.messages <= _MANY:
            timed = Timed(offer.count(self._queue, _MANY if can_start else None))
            count = await timed
            if count is not None:
                return count, timed.cpu_s
        assert self._url is not None
        self.is_free.set()
        return await count_in_process(self._url, self._queue)

    def _take(self, shared: SharedCount) -> None:
        self._shared = shared
        stats = shared.count.stats
        age = stats.oldest_age_s
        self.counted = Counted(
            at=shared.at,
            count=shared.count,
            oldest_at=None if age is None else shared.at - age,
            backlog_rate=self._growth(shared.at, stats.ready + stats.leased + stats.delayed),
        )

    def _growth(self, at: float, backlog: int) -> float | None:
        """Return the growth of the backlog since a count that is some seconds older."""
        if self._past and at < self._past[-1][0]:
            # The clock was set back.
            self._past.clear()
        while len(self._past) > 1 and self._past[1][0] <= at - _GROWTH_S:
            self._past.pop(0)
        since, before = self._past[0] if self._past else (at, backlog)
        if not self._past or at > self._past[-1][0]:
            self._past.append((at, backlog))
        return (backlog - before) / (at - since) if at > since else None
