"""Reaping many queues: those in use every second, all others in turns, so that idle queues cost little."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from qworker.backend.contract import Backend
from qworker.backend.each_queue import can_be_of_one_queue
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendError
from qworker.message import LostLease

__all__ = ["ReapRounds"]

# Seconds after its last use for which a queue is in use.
_IN_USE = 60.0
# The idle queues of one round: as many as take this processor time in seconds, and at least this number.
_BUDGET = 0.01
_LEAST = 100
# Queues after which other tasks of the loop run.
_SLICE = 10
# A server that refuses so many queues in a round cannot be reached: the others are not tried.
_MOST_REFUSED = 3


class ReapRounds:
    """Reaps queues, one round at a time. Call `run` about once per second.

    With up to 100 queues each round reaps all of them. More queues that are idle are reaped every few seconds.

    Args:
        backend: The backend.
        names: A function that returns the names of all queues.
        clock: The clock that decides which queues are in use.
        on_lost: Called with a queue and the lost leases that were named there.
        on_time: Called after each reap with the store's time in it, and the seconds that the reap took.

    Attributes:
        failing: The queues whose last reaping failed, each with its error.
    """

    def __init__(
        self,
        backend: Backend,
        names: Callable[[], Awaitable[Sequence[str]]],
        clock: Clock = SYSTEM_CLOCK,
        on_lost: Callable[[str, Sequence[LostLease]], None] | None = None,
        on_time: Callable[[float, float], None] | None = None,
    ) -> None:
        self._backend = backend
        self._names = names
        self._clock = clock
        self._on_lost = on_lost
        self._on_time = on_time
        # Monotonic seconds of the last use.
        self._used: dict[str, float] = {}
        # The idle queues that this turn has not reached yet.
        self._idle: deque[str] = deque()
        self._refused = 0
        self.failing: dict[str, Exception] = {}

    def use(self, queues: Iterable[str]) -> None:
        """Reap these queues in every round of the next minute."""
        now = self._clock.monotonic()
        for queue in queues:
            self._used[queue] = now

    async def run(self) -> None:
        """Run one round. The error of one queue does not stop it.

        Raises:
            BackendError: The queues cannot be listed, or the server cannot be reached.
        """
        self._refused = 0
        limit = self._clock.monotonic() - _IN_USE
        self._used = {queue: at for queue, at in self._used.items() if at > limit}
        for queue in tuple(self._used):
            await self._reap(queue)
        if not self._idle:
            names = await self._names()
            self._idle.extend(queue for queue in names if queue not in self._used)
            for queue in self.failing.keys() - set(names):
                del self.failing[queue]
        await self._reap_idle()

    async def _reap_idle(self) -> None:
        ends = time.thread_time() + _BUDGET
        done = 0
        while self._idle and (done < _LEAST or time.thread_time() < ends):
            await self._reap(self._idle.popleft())
            done += 1
            if done % _SLICE == 0:
                await asyncio.sleep(0)

    async def _reap(self, queue: str) -> None:
        try:
            began = self._clock.monotonic()
            result = await self._backend.reap(queue)
            if self._on_time is not None:
                self._on_time(result.now, self._clock.monotonic() - began)
            if result.lost and self._on_lost is not None:
                self._on_lost(queue, result.lost)
            if result.returned:
                self._used[queue] = self._clock.monotonic()
        except (BackendError, OSError) as error:
            self.failing[queue] = error
            self._refused += 1
            if self._refused >= _MOST_REFUSED and not can_be_of_one_queue(self._backend, error):
                raise
        else:
            self.failing.pop(queue, None)
