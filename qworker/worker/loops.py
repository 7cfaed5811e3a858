"""A worker's loops, tied together: what they share, and what each tells the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from qworker import log_events as events
from qworker.app import Tasks
from qworker.backend import Backend
from qworker.clock import Clock
from qworker.logs import debug_enabled
from qworker.message import Lease
from qworker.worker.consumers import Consumers
from qworker.worker.delivery import CancelReason, Delivery, LeaseListener, Observer, WorkerCounts
from qworker.worker.executor import Executor, clear_pending_cancellations
from qworker.worker.feeder import Feeder
from qworker.worker.handlers.process_runner import ProcessRunner
from qworker.worker.handlers.thread_runner import ThreadRunner
from qworker.worker.lease_extender import LeaseExtender
from qworker.worker.outage import Outage
from qworker.worker.reaper import Reaper
from qworker.worker.settler import SENDERS, Settler
from qworker.worker.worker_options import WorkerOptions

__all__ = ["WorkerLoops"]


class WorkerLoops:
    """The parts of a working worker. Made on the running loop."""

    def __init__(  # noqa: PLR0913 - each is one collaborator
        self,
        tasks: Tasks,
        backend: Backend,
        queues: tuple[str, ...],
        options: WorkerOptions,
        *,
        state: Any,
        counts: WorkerCounts,
        observers: list[Observer],
        listener: Callable[[AbstractSet[Delivery]], LeaseListener | None],
        clock: Clock,
        draw: Callable[[], float],
        log: Any,
    ) -> None:
        self._options = options
        self._clock = clock
        self._counts = counts
        self._log = log
        # Every lease of this worker, from its begin to its settlement.
        self.held: set[Delivery] = set()
        # Those whose handler is at work.
        self.active: set[Delivery] = set()
        self._listener = listener(self.held)
        # Lease nothing, but stay.
        self.quiet = False
        # At most so many messages are asked for: few after one that had to run alone.
        self._window = options.concurrency
        self.threads = ThreadRunner(options.concurrency)
        self.processes = ProcessRunner(options.concurrency, clock)
        self.keeper = LeaseExtender(
            backend,
            self.held,
            options.visibility_timeout,
            clock=clock,
            outage=Outage("keeper", log, draw),
            extended=self._extended,
        )
        self.settler = Settler(
            backend,
            self.held,
            counts,
            stop_extending=self.keeper.stop_extending,
            sending=self._freed,
            settled=self._settled,
            observers=observers,
            listener=self._listener,
            clock=clock,
            outage=Outage("settler", log, draw),
            log=log,
            debug=debug_enabled(),
        )
        executor = Executor(
            tasks,
            self.active,
            runners={"thread": self.threads, "process": self.processes},
            state=state,
            observers=observers,
            clock=clock,
            draw=draw,
            log=log,
        )
        self.consumers = Consumers(
            options.concurrency,
            self.held,
            executor,
            absorb=clear_pending_cancellations,
            submit=self.settler.submit,
            lost=self.settler.lost,
            closed=self._closed,
            opened=self._opened,
            freed=self._freed,
            patience=options.visibility_timeout,
            clock=clock,
        )
        self.feeder = Feeder(
            backend,
            queues,
            options.visibility_timeout,
            burst=options.burst,
            room=self._room,
            feed=self._feed,
            idle=lambda: not self.held,
            outage=Outage("feeder", log, draw),
            clock=clock,
        )
        self.reaper = Reaper(backend, queues, outage=Outage("reaper", log, draw), draw=draw)

    def loops(self) -> list[Callable[[], Any]]:
        """What must go on while the feeder feeds and the handlers finish; each ends by an error or by cancellation only."""
        return [*[self.settler.run] * SENDERS, self.keeper.watch, self.reaper.run, self.consumers.watch]

    async def wait_for_handlers(self, patience: float, aborting: asyncio.Event) -> bool:
        """Wait until no lease is held; False: `patience` seconds or `aborting` came first."""
        try:
            async with asyncio.timeout(patience):
                while self.held and not aborting.is_set():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        return not self.held

    async def cancel_handlers(self, patience: float) -> bool:
        """Cancel what runs and let it be released; False: a handler has not ended within `patience` seconds.

        Idempotent: each handler is cancelled once, so that its clean-up is not cut short.
        """
        for delivery in list(self.held):
            if delivery.settlement is None and delivery.cancel_reason is None:
                delivery.cancel(CancelReason.SHUTDOWN)
        if await self.consumers.close(patience):
            return True
        for delivery in self.active:
            self._log.warning(events.HANDLER_STUCK, **delivery.fields())
        return False

    # -- what the loops tell each other ------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many messages may be leased now."""
        if self.quiet or not self.consumers.open:
            return 0
        most = self._options.concurrency
        # Settlements on their way occupy no consumer: the next messages are leased while the store commits. But a store that takes
        # no settlements must not be leased empty.
        occupied = len(self.held) - min(self.settler.on_the_way, most) + self.consumers.leftover_threads
        room = min(most - occupied, self._window)
        if self._options.max_messages is None:
            return room
        return min(room, self._options.max_messages - self._begun())

    def _begun(self) -> int:
        return self._counts.leased - self._counts.released

    def _feed(self, leases: list[Lease], began: float) -> None:
        expires = began + self._options.visibility_timeout
        now = self._clock.time()
        deliveries = [Delivery(lease, began, expires, now) for lease in leases]
        self.held.update(deliveries)
        self._counts.leased += len(deliveries)
        if self._listener is not None:
            self._listener.leases_taken()
        self._window = min(self._options.concurrency, self._window * 2)
        self.consumers.feed(deliveries)

    def _settled(self) -> None:
        most = self._options.max_messages
        if most is not None and not self.held and self._begun() >= most:
            self.feeder.stop()
        self.consumers.on_settled()
        self.feeder.wake()

    def _extended(self, deliveries: list[Delivery]) -> None:
        if self._listener is not None:
            self._listener.leases_extended(deliveries)
        self.settler.extended()

    def _closed(self, delivery: Delivery) -> None:
        self._log.info(events.MESSAGE_ISOLATED, **delivery.fields())
        self.feeder.interrupt()

    def _freed(self) -> None:
        self.feeder.wake()

    def _opened(self) -> None:
        # More messages of its kind may follow: begin with few, so that few have to be given back.
        self._window = 1
        self.feeder.wake()
