"""The connections between the loops of a worker: which loop reacts to an event in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from qworker import log_events as events
from qworker.context import CancelReason
from qworker.message import Lease, SettleAction
from qworker.schedules.code import supports_schedules
from qworker.worker.cancel_repair import CancelRepair
from qworker.worker.consumers import Consumers
from qworker.worker.delivery import Delivery
from qworker.worker.executor import Executor, Runner
from qworker.worker.feeder import Feeder
from qworker.worker.handlers.process_runner import ProcessRunner, app_place, process_limit
from qworker.worker.handlers.thread_runner import ThreadRunner
from qworker.worker.lease_extender import LeaseExtender
from qworker.worker.reaper import Reaper, stop_lost
from qworker.worker.scheduler import Scheduler
from qworker.worker.settler import SENDERS, Settler
from qworker.worker.state import WorkerState
from qworker.worker.wait_notes import WaitNotes
from qworker.worker.waits import Waits

__all__ = ["WorkerLoops"]

# The least and the most seconds, on average, until a suspect that finds no free process can be leased again.
_SUSPECT_DELAYS = (1.0, 30.0)
_NOT_IMPORTABLE = (
    "the Tasks object is not a global name of a module, so messages that killed their process run in this one:"
    " make it a global name of an importable module"
)


class WorkerLoops:
    """The loops of a running worker, and the receiver of their events. Create it on the running event loop."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        state.events = self
        state.waits = Waits(state)
        state.records.bind()
        concurrency = state.options.concurrency
        self.threads = ThreadRunner(concurrency, state.providers)
        place = app_place(state.app)
        self.processes = ProcessRunner(process_limit(concurrency), state.clock, state.records.report, place)
        runners: dict[str, Runner] = {"thread": self.threads, "process": self.processes}
        self.isolated_processes: ProcessRunner | None = None
        if place is None:
            state.log.warning(events.ISOLATION_DISABLED, **{events.ERROR: _NOT_IMPORTABLE})
        else:
            runners["isolated"] = self.isolated_processes = ProcessRunner(
                state.options.isolated, state.clock, state.records.report, place, isolated=True
            )
        self.lease_extender = LeaseExtender(state)
        self.settler = Settler(state, self.lease_extender.stop_extending)
        # An event of each message: it is the settler's own method, so it costs no call between.
        self.delivery_finished = self.settler.submit
        executor = Executor(state, runners)
        self.consumers = Consumers(state, executor)
        self.suspects = Consumers(state, executor, isolated=True)
        self.feeder = Feeder(state)
        self.reaper = Reaper(state)
        self.cancels = CancelRepair(state)
        self.wait_notes = WaitNotes(state)
        has_schedules = state.options.schedules and supports_schedules(state.backend.deviations)
        self.scheduler = Scheduler(state) if has_schedules else None

    def background(self) -> list[Callable[[], Any]]:
        """Return the loops that run with the feeder and until the handlers have finished. None ends by itself."""
        loops = [
            self.lease_extender.watch,
            self.reaper.run,
            self.cancels.run,
            self.wait_notes.run,
            self.consumers.watch,
            self.suspects.watch,
        ]
        if self.scheduler is not None:
            loops.append(self.scheduler.run)
        return [*[self.settler.run] * SENDERS, *loops]

    async def before_leasing(self) -> None:
        """Let a burst begin when the ticks that are due are enqueued: it ends when no message is left."""
        if self.scheduler is not None and self.state.options.burst:
            await self.scheduler.begun.wait()

    def stop_leasing(self) -> None:
        """Lease nothing more. Idempotent."""
        self.feeder.stop()
        if self.scheduler is not None:
            self.scheduler.begun.set()

    def release_waiting(self) -> None:
        """Release the messages that have not started."""
        self.consumers.release_waiting()
        self.suspects.release_waiting()

    async def close_runners(self) -> None:
        """End the threads and processes of handlers."""
        self.threads.close()
        await self.processes.close()
        if self.isolated_processes is not None:
            await self.isolated_processes.close()

    def quiet(self) -> None:
        """Lease nothing more, but stay."""
        self.state.quiet = True
        self.feeder.interrupt()

    def notice_stopping(self) -> None:
        """Give the handlers the notice that the worker stops. Idempotent."""
        if not self.state.stopping.is_set():
            self.state.stopping.set()
            self.processes.notice_stopping()
            if self.isolated_processes is not None:
                self.isolated_processes.notice_stopping()

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
        closed = await asyncio.gather(self.consumers.close(patience), self.suspects.close(patience))
        if all(closed):
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
        if state.early_losses:
            stop_lost(deliveries, state.early_losses)
        state.counts.leased += len(deliveries)
        if state.listener is not None:
            state.listener.leases_taken()
        self.consumers.feed(deliveries)

    def leases_extended(self, deliveries: Sequence[Delivery]) -> None:
        """Let the settler send what had to wait for the extensions."""
        if self.state.listener is not None:
            self.state.listener.leases_extended(deliveries)
        self.settler.on_extended()

    def leases_missing(self, deliveries: Sequence[Delivery]) -> None:
        """Ask the store why, and stop the handlers."""
        self.reaper.ask_why(deliveries)

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
        if state.suspects:
            state.suspects &= state.held
        self.feeder.wake()

    def message_offered(self, queue: str, seconds: float) -> None:
        """Leave the queue to the others."""
        self.feeder.stay_away(queue, seconds)

    def message_isolated(self, delivery: Delivery) -> None:
        """Run the handler in a process of suspects, and lease another message for its consumer."""
        state = self.state
        if len(state.suspects) - state.waiting_suspects >= state.options.isolated and not state.options.burst:
            # Every lease of a worker that dies counts as a death of its message: a suspect must not wait here. A burst
            # does not wait for what is delayed, so it keeps them.
            delivery.settle(SettleAction.RELEASE, delay=self._suspect_delay())
            self.delivery_finished(delivery)
            return
        delivery.isolated = True
        state.suspects.add(delivery)
        state.log.info(events.MESSAGE_ISOLATED, **delivery.fields())
        self.suspects.feed([delivery])
        self.feeder.wake()

    def _suspect_delay(self) -> float:
        """Return about as many seconds as the slowest suspect has run: so a long handler causes few vain leases."""
        now = self.state.clock.monotonic()
        longest = max((now - each.started for each in self.state.suspects if each.started), default=0.0)
        least, most = _SUSPECT_DELAYS
        return min(max(longest, least), most) * (0.5 + self.state.draw())

    def consumer_freed(self) -> None:
        """Lease the next messages."""
        self.feeder.wake()

    def waits_changed(self) -> None:
        """Give the place of a handler that waits to another message, or to one more thread or process."""
        state = self.state
        self.threads.set_waiting(state.waiting)
        self.consumers.waits_changed()
        self.suspects.waits_changed()
        self.wait_notes.wake()
        if state.capacity() <= 0:
            # A handler has continued: the lease that is under way would take a message for its place.
            self.feeder.interrupt()
        else:
            self.feeder.wake()
