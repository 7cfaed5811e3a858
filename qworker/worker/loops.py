"""The connections between the loops of a worker: which loop reacts to an event in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from qworker import log_events as events
from qworker.message import Lease
from qworker.worker.consumers import Consumers
from qworker.worker.delivery import CancelReason, Delivery
from qworker.worker.executor import Executor
from qworker.worker.feeder import Feeder
from qworker.worker.handlers.process_runner import ProcessRunner
from qworker.worker.handlers.thread_runner import ThreadRunner
from qworker.worker.lease_extender import LeaseExtender
from qworker.worker.reaper import Reaper
from qworker.worker.settler import SENDERS, Settler
from qworker.worker.state import WorkerState

__all__ = ["WorkerLoops"]


class WorkerLoops:
    """The loops of a running worker, and the receiver of their events. Create it on the running event loop."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        state.events = self
        concurrency = state.options.concurrency
        self.threads = ThreadRunner(concurrency)
        self.processes = ProcessRunner(concurrency, state.clock)
        self.lease_extender = LeaseExtender(state)
        self.settler = Settler(state, self.lease_extender.stop_extending)
        # An event of each message: it is the settler's own method, so it costs no call between.
        self.delivery_finished = self.settler.submit
        self.consumers = Consumers(state, Executor(state, {"thread": self.threads, "process": self.processes}))
        self.feeder = Feeder(state)
        self.reaper = Reaper(state)

    def background(self) -> list[Callable[[], Any]]:
        """Return the loops that run with the feeder and until the handlers have finished. None ends by itself."""
        return [*[self.settler.run] * SENDERS, self.lease_extender.watch, self.reaper.run, self.consumers.watch]

    def quiet(self) -> None:
        """Lease nothing more, but stay."""
        self.state.quiet = True
        self.feeder.interrupt()

    async def wait_for_handlers(self, patience: float, aborting: asyncio.Event) -> bool:
        """Wait until no lease is held. Return False if `patience` seconds or `aborting` came first."""
        held = self.state.held
        try:
            async with asyncio.timeout(patience):
                while held and not aborting.is_set():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        return not held

    async def cancel_handlers(self, patience: float) -> bool:
        """Cancel the handlers and release their messages. Return False if one does not end within `patience` seconds.

        Idempotent: each handler is cancelled once, so that its clean-up is not cut short.
        """
        for delivery in list(self.state.held):
            if delivery.settlement is None and delivery.cancel_reason is None:
                delivery.cancel(CancelReason.SHUTDOWN)
        if await self.consumers.close(patience):
            return True
        for delivery in self.state.active:
            self.state.log.warning(events.HANDLER_STUCK, **delivery.fields())
        return False

    # -- events ------------------------------------------------------------------------------------------------------

    def messages_leased(self, leases: Sequence[Lease], began: float) -> None:
        """Hold the leases and pass their messages to the consumers."""
        state = self.state
        expires = began + state.options.visibility_timeout
        now = state.clock.time()
        deliveries = [Delivery(lease, began, expires, now) for lease in leases]
        state.held.update(deliveries)
        state.counts.leased += len(deliveries)
        if state.listener is not None:
            state.listener.leases_taken()
        state.lease_limit = min(state.options.concurrency, state.lease_limit * 2)
        self.consumers.feed(deliveries)

    def leases_extended(self, deliveries: Sequence[Delivery]) -> None:
        """Let the settler send what had to wait for the extensions."""
        if self.state.listener is not None:
            self.state.listener.leases_extended(deliveries)
        self.settler.on_extended()

    def lease_lost(self, delivery: Delivery, reason: str) -> None:
        """Drop the delivery."""
        self.settler.drop_lost(delivery, reason)

    def settlements_sent(self) -> None:
        """Lease the next messages."""
        self.feeder.wake()

    def messages_settled(self) -> None:
        """Lease the next messages, or stop after the last one."""
        state = self.state
        most = state.options.max_messages
        if most is not None and not state.held and state.begun >= most:
            self.feeder.stop()
        self.consumers.on_settled()
        self.feeder.wake()

    def message_isolated(self, delivery: Delivery) -> None:
        """Stop waiting for messages."""
        self.state.log.info(events.MESSAGE_ISOLATED, **delivery.fields())
        self.feeder.interrupt()

    def isolation_ended(self) -> None:
        """Lease again. More messages of this kind may follow, so begin with few: few must be released then."""
        self.state.lease_limit = 1
        self.feeder.wake()

    def consumer_freed(self) -> None:
        """Lease the next messages."""
        self.feeder.wake()
