"""One source of numbers for every display of a store: nothing that is shown counts by itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from qworker.backend import Backend
from qworker.backend.each_queue import describe_problem
from qworker.backend.offers import samples_of
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.sampling.counting import Budget, QueueCounter
from qworker.sampling.errors import ErrorCount
from qworker.sampling.fallback import FallbackSamples
from qworker.sampling.flow import Flow, HistoryFlow, Period, percentiles
from qworker.sampling.ring import LEVELS, Level, Ring, RingSample
from qworker.sampling.snapshot import QueueSnapshot, StoreSnapshot
from qworker.worker.outage import BACKEND_ERRORS

__all__ = ["QueueSampler"]

# Seconds between two ticks.
EVERY = 2.0
# Seconds over which rates are averages.
_WINDOW_S = 10.0
# Seconds for which a worker without events is remembered.
_WORKERS_S = 3600.0
# Seconds for which a tick waits for the counts of this process. Longer ones end later, and delay no other queue.
_PATIENCE_S = 0.5
# Seconds after which a store that does not answer counts as unreachable.
_SILENCE_S = 10.0


class _Finished(msgspec.Struct):
    """What the history got in the current period of the ring, for one queue."""

    flow: Flow = msgspec.field(default_factory=Flow)
    workers: set[str] = msgspec.field(default_factory=set[str])


class QueueSampler:
    """Samples the queues of a backend.

    Call `tick` about every 2 s, and show what it returns. Each queue is counted as often as it is cheap: a count costs
    at most 2 % of a core on average, and all counts at most 5 %. Processes that sample the same store share counts.

    Args:
        backend: The open backend.
        queues: The queues to sample. None: all queues of the store.
        url: The URL of the backend, by which another process counts large queues. None: this process counts them.
        every: Seconds between two counts of a cheap queue.
        clock: The clock.
    """

    def __init__(
        self,
        backend: Backend,
        queues: Sequence[str] | None = None,
        *,
        url: str | None = None,
        every: float = EVERY,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._backend = backend
        self._queues = queues
        self._url = url
        self._clock = clock
        self._budget = Budget(every)
        self._samples = FallbackSamples(samples_of(backend), clock)
        self._counters: dict[str, QueueCounter] = {}
        self._flow = HistoryFlow(backend.history, queues, _WINDOW_S)
        self._flow_at = 0.0
        self._problem: str | None = None
        # Unix seconds of the start of the ring's period, and what happened in it. None: this process has not seen all
        # of the period.
        self._period: float | None = None
        self._finished: dict[str, _Finished] | None = None

    async def tick(self, patience: float | None = _PATIENCE_S) -> StoreSnapshot:
        """Count what is due, read the history, store samples, and return what is known.

        Args:
            patience: Seconds to wait for the counts of this process. None: until all that were started have ended.
        """
        now = self._clock.monotonic()
        try:
            await self._count_due(now, patience)
            async with asyncio.timeout(_SILENCE_S):
                await self._follow(now)
                await self._store_samples()
        except TimeoutError:
            self._problem = f"the backend has not answered for {_SILENCE_S:g} s"
        except BACKEND_ERRORS as error:
            self._problem = f"the backend cannot be asked: {describe_problem(error)}"
        else:
            self._problem = self._silence(now)
        return self.snapshot()

    async def aclose(self) -> None:
        """End the counts that are running. Idempotent."""
        for counter in self._counters.values():
            await counter.aclose()

    def snapshot(self) -> StoreSnapshot:
        """Return what is known now."""
        queues: list[QueueSnapshot] = []
        for name, counter in sorted(self._counters.items()):
            if counter.exists:
                flow, tasks = self._flow.rates(name, self._flow_at)
                queues.append(
                    QueueSnapshot(queue=name, counted=counter.counted, flow=flow, tasks=tasks, problem=counter.problem)
                )
        now = self._clock.time()
        return StoreSnapshot(
            at=now,
            queues=queues,
            workers=self._flow.workers(now - _WORKERS_S),
            has_history=self._flow.enabled,
            problem=self._problem,
            samples_problem=self._samples.problem,
        )

    async def past(self, queue: str, level: Level) -> list[RingSample]:
        """Return the samples of a queue over an hour, a day or a week (`ring.LEVELS`), sorted by time."""
        return await Ring(self._samples, queue).read(level, self._clock.time())

    def errors(self) -> tuple[float, list[ErrorCount]]:
        """Return the errors that workers have recorded, the most frequent first.

        Returns:
            The seconds that are counted, at most an hour, and the errors.
        """
        return self._flow.errors.period_s, self._flow.errors.counts()

    # -- counts --------------------------------------------------------------------------------------------------------

    async def _count_due(self, now: float, patience: float | None) -> None:
        async with asyncio.timeout(_SILENCE_S):
            names = await self._backend.queues() if self._queues is None else self._queues
        directory = self._backend.directory
        # A directory that is moved away, or not mounted, is not a store whose queues were deleted.
        if self._counters and not names and directory is not None and not os.path.isdir(directory):
            raise BackendUnavailable(f"{directory} does not exist any more")
        for gone in self._counters.keys() - set(names):
            await self._counters.pop(gone).aclose()
        for name in names:
            if name not in self._counters:
                self._counters[name] = QueueCounter(
                    self._backend, name, self._samples, self._budget, self._clock, self._url
                )
            await self._counters[name].tick(now)
            # A store in a directory awaits nothing: other tasks of the loop run between two queues.
            await asyncio.sleep(0)
        await self._wait_for_counts(patience)
        for counter in self._counters.values():
            if counter.error is not None:
                raise counter.error
        self._budget.limit([counter.cpu_s for counter in self._counters.values()])

    async def _wait_for_counts(self, patience: float | None) -> None:
        """Wait until all counts have ended, or with a patience, those of this process."""
        if patience is None:
            running = [counter.task for counter in self._counters.values() if counter.task is not None]
            if running:
                await asyncio.wait(running)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                for counter in self._counters.values():
                    await counter.is_free.wait()

    def _silence(self, now: float) -> str | None:
        longest = max((counter.silence(now) for counter in self._counters.values()), default=0.0)
        return f"the backend has not answered for {longest:.0f} s" if longest >= _SILENCE_S else None

    # -- samples -------------------------------------------------------------------------------------------------------

    async def _follow(self, now: float) -> None:
        if self._flow.enabled:
            period = await self._flow.follow(now)
            self._flow_at = self._clock.time()
            self._add_to_ring(period)

    def _add_to_ring(self, period: Period) -> None:
        if self._finished is None:
            return
        for queue, workers in period.workers.items():
            finished = self._finished.setdefault(queue, _Finished())
            finished.workers |= workers
            for flow in period.flows.get(queue, {}).values():
                finished.flow.add(flow)

    async def _store_samples(self) -> None:
        """At the end of a period that this process has seen whole, store a sample of each queue."""
        now = self._clock.time()
        start = LEVELS[0].start(now)
        if start == self._period:
            return
        ended, finished = self._period, self._finished
        self._period, self._finished = start, {}
        # After a pause of the process or a step of the clock there is a gap.
        if ended is None or finished is None or start - ended != LEVELS[0].step:
            return
        for name, counter in self._counters.items():
            if counter.counted is not None and counter.problem is None:
                sample = self._sample(counter, finished.get(name, _Finished()), ended)
                await counter.ring.add(sample)
                # As in `_count_due`.
                await asyncio.sleep(0)

    @staticmethod
    def _sample(counter: QueueCounter, finished: _Finished, start: float) -> RingSample:
        assert counter.counted is not None
        stats = counter.counted.stats_at(start + LEVELS[0].step)
        return RingSample(
            at=start,
            ready=stats.ready,
            leased=stats.leased,
            delayed=stats.delayed,
            failed=stats.failed,
            oldest_age_s=stats.oldest_age_s,
            acked=finished.flow.acked,
            failures=finished.flow.failed,
            retried=finished.flow.retried,
            lost=finished.flow.lost,
            wait=percentiles(finished.flow.waits),
            run=percentiles(finished.flow.runs),
            workers=len(finished.workers),
            exact=counter.counted.exact,
            paused=stats.paused,
        )
