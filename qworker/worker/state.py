"""The state that the loops of a worker share, and the events that they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qworker import log_events as events
from qworker.app import Tasks
from qworker.attempt.providers import WorkerProviders
from qworker.backend import Backend
from qworker.clock import Clock
from qworker.context import Stopping
from qworker.failure_text import summary_of
from qworker.jobs.handler_wait import HandlerWaits
from qworker.message import Lease
from qworker.worker.delivery import Delivery, LeaseListener, Observer, WorkerCounts
from qworker.worker.job_records import JobRecords
from qworker.worker.metrics import FeatureCounts
from qworker.worker.outage import Outage
from qworker.worker.store_clock import StoreClock
from qworker.worker.worker_options import WorkerOptions

__all__ = ["WorkerEvents", "WorkerState", "WorkerWaits"]


class WorkerWaits(HandlerWaits, Protocol):
    """The handlers of a worker that wait for other jobs."""

    def drop(self, delivery: Delivery, /) -> None:
        """Count a delivery no longer, because its handler has ended."""
        ...


class WorkerEvents(Protocol):
    """The events in the loops of a worker, on the event loop's thread. `WorkerLoops` decides which loop reacts."""

    def messages_leased(self, leases: Sequence[Lease], began: float) -> None:
        """Report that the store gave these leases. They began at this monotonic time at the latest."""
        ...

    def leases_extended(self, deliveries: Sequence[Delivery]) -> None:
        """Report that a round of extensions has extended the leases of these deliveries."""
        ...

    def leases_missing(self, deliveries: Sequence[Delivery]) -> None:
        """Report that the store did not extend the leases of these deliveries: they are gone."""
        ...

    def delivery_finished(self, delivery: Delivery) -> None:
        """Report that the settlement of this delivery is decided."""
        ...

    def lease_lost(self, delivery: Delivery, reason: str) -> None:
        """Report that the lease of this delivery is lost, so there is nothing to settle."""
        ...

    def settlements_sent(self) -> None:
        """Report that a batch of settlements is on its way, so the consumers of its messages are free."""
        ...

    def messages_settled(self) -> None:
        """Report that some leases have ended."""
        ...

    def message_offered(self, queue: str, seconds: float) -> None:
        """Report that a message of this queue is for another worker, which is to lease it within these seconds."""
        ...

    def message_isolated(self, delivery: Delivery) -> None:
        """Report that the handler of a message must run in a process of suspects."""
        ...

    def consumer_freed(self) -> None:
        """Report that a consumer that waited for a thread is free again."""
        ...

    def waits_changed(self) -> None:
        """Report that a handler waits for another job from now on, or continues."""
        ...


@dataclass(eq=False, kw_only=True, slots=True)
class WorkerState:
    """The state of a running worker. Only the event loop's thread changes it.

    Attributes:
        app: The app, whose handlers run.
        backend: The store.
        queues: The queues whose messages are leased.
        options: The options of the worker.
        clock: The monotonic clock for leases, and the wall clock.
        draw: Returns uniform numbers from [0, 1), for jitter.
        log: The worker's logger.
        counts: The counts of the worker since its start.
        features: What the features in use have done, for metrics.
        observers: The observers of each start of a handler and of each outcome.
        lifespan_value: The value that the app's lifespan yielded.
        providers: The values of providers with the scope `worker`.
        listener: The observer of batches of leases, if there is a history.
        held: Every lease of this worker, from its start to its settlement. Other threads read it.
        early_losses: Losses that were named while the feeder leases, of leases that it may not have registered yet: by
            queue, id and token, and whether the message was cancelled. None: it does not lease now.
        active: The deliveries whose handler is running. Other threads read its size.
        quiet: Whether the worker leases nothing more, but stays.
        stopping: The notice for handlers that the worker stops.
        suspects: The deliveries that run in a process of suspects, or wait for one.
        settling: Messages whose settlement is on its way to the store. Their consumers are free.
        leftover_threads: Consumers whose thread has outlived its message.
        records: What is stored for the callers of jobs.
        waits: The receiver of the waits of handlers. None: they are not counted.
        waiting: Handlers that wait for other jobs, without the suspects.
        waiting_suspects: Suspects whose handler waits for other jobs.
        events: The receiver of what happens in the loops.
        store_clock: The store's time.
    """

    app: Tasks
    backend: Backend
    queues: tuple[str, ...]
    options: WorkerOptions
    clock: Clock
    draw: Callable[[], float]
    log: Any
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    features: FeatureCounts = field(default_factory=FeatureCounts)
    observers: list[Observer] = field(default_factory=list[Observer])
    lifespan_value: Any = None
    providers: WorkerProviders = field(init=False)
    listener: LeaseListener | None = None
    held: set[Delivery] = field(default_factory=set[Delivery])
    early_losses: dict[tuple[str, str, int], bool] | None = None
    active: set[Delivery] = field(default_factory=set[Delivery])
    quiet: bool = False
    stopping: Stopping = field(default_factory=Stopping)
    suspects: set[Delivery] = field(default_factory=set[Delivery])
    settling: int = 0
    leftover_threads: int = 0
    waits: WorkerWaits | None = None
    waiting: int = 0
    waiting_suspects: int = 0
    records: JobRecords = field(init=False)
    events: WorkerEvents = field(init=False)
    store_clock: StoreClock = field(init=False)

    def __post_init__(self) -> None:
        """Create what is empty at the start."""
        # The clock of the app: its backends have it too.
        self.store_clock = StoreClock(self.app.clock)
        self.records = JobRecords(self.backend, self.clock, self.log, self.features)
        self.providers = WorkerProviders(self._log_provider)

    def _log_provider(self, name: str, error: BaseException) -> None:
        fields = {events.ERROR_TYPE: type(error).__name__, events.ERROR: summary_of(error)}
        self.log.error(events.PROVIDER_FAILED, **{events.PROVIDER: name}, **fields)

    @property
    def begun(self) -> int:
        """The number of messages that were leased and not released."""
        return self.counts.leased - self.counts.released

    def capacity(self) -> int:
        """Return how many messages can be leased now."""
        if self.quiet:
            return 0
        options = self.options
        most = options.concurrency
        # Settlements on their way occupy no consumer: the next messages are leased while the store commits. But a store
        # that takes no settlements must not be leased empty.
        # Suspects occupy no consumer either, but a worker holds no more of them than it can run other messages.
        # Handlers that wait for other jobs occupy none, or they could wait for what they keep from running.
        idle = self.waiting + self.waiting_suspects
        suspects = min(len(self.suspects) - self.waiting_suspects, most)
        occupied = len(self.held) - min(self.settling, most) - suspects - idle + self.leftover_threads
        room = most - occupied
        return room if options.max_messages is None else min(room, options.max_messages - self.begun)

    def outage(self, loop_name: str) -> Outage:
        """Return the record of one loop's failed calls of the store."""
        return Outage(loop_name, self.log, self.draw)
