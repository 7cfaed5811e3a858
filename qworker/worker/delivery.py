"""One leased message on its way through a worker, and the protocols of its observers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from qworker.context import CancelReason, Context
from qworker.definition.callables import not_run_error
from qworker.envelope import CallOptions, EncodedResult, encode_result
from qworker.failure_text import FailureCode, with_code
from qworker.jobs.records import AwaitedJob, Progress
from qworker.message import Lease, SettleAction, Settlement
from qworker.task import Handler

__all__ = [
    "CancelReason",
    "Delivery",
    "LeaseListener",
    "Observer",
    "Outcome",
    "RunningMessage",
    "WorkerCounts",
    "expiry_margin",
]


def expiry_margin(visibility: float) -> float:
    """Return the seconds before the end of a lease in which its handler neither starts nor runs.

    It could still run when another worker has the message.
    """
    return min(visibility / 6, 5.0)


class Delivery(msgspec.Struct, eq=False):
    """One leased message on its way through a worker, from its lease to its settlement."""

    lease: Lease
    # Monotonic seconds: when the lease was last known to begin, and when it ends at the earliest.
    extended_at: float
    expires: float
    # Unix seconds: when it was leased.
    leased_at: float = 0.0
    # The name of the task or raw handler, once known.
    task: str = ""
    handler: Handler | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] | None = None
    # The options that travel with the call. None: it has none.
    options: CallOptions | None = None
    context: Context | None = None
    # Monotonic seconds at which the handler started, and how long it took. 0 if it was not run.
    started: float = 0.0
    duration: float = 0.0
    # The asyncio task that the handler runs in, while it runs there.
    consumer: asyncio.Task[None] | None = None
    # Set: the handler's own outcome no longer counts.
    cancel_reason: CancelReason | None = None
    # Set to `LEASE_LOST` or `CANCELLED`: the store has ended the lease, and takes no settlement.
    gone: CancelReason | None = None
    # The error that the handler raised.
    error: BaseException | None = None
    # Seconds for which the end of the job is kept. 0: nobody wants it.
    result_ttl: float = 0.0
    # Whether the handler's value is wanted, and then the value of a handler that has returned.
    keep_result: bool = False
    result: EncodedResult | None = None
    # What the handler has reported, and whether it is to be stored.
    progress: Progress | None = None
    progress_pending: bool = False
    # The number of jobs that the handler waits for at the moment.
    waits: int = 0
    # The last of them, and monotonic seconds since when the handler waits.
    waits_for: AwaitedJob = AwaitedJob("", "")
    waits_since: float = 0.0
    settlement: Settlement | None = None
    # Why the handler has released its message. It is logged, and not kept.
    released_because: str | None = None
    # Why a message failed permanently, and whether its report is still to be stored, before it is failed.
    code: FailureCode = "error"
    unreported: bool = False
    # True from the moment at which its settlement may be on its way: no extension starts any more.
    settling: bool = False
    # The log fields of its span, if it is traced.
    trace: dict[str, str] | None = None
    # Whether its handler runs in a process of suspects, or waits for one.
    isolated: bool = False
    # A thread that outlives its message: done when it ends.
    leftover: asyncio.Future[None] | None = None

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the handler once, or keep it from starting. The first reason stays. Only on the loop's thread."""
        if self.cancel_reason is not None:
            # A second cancellation would cut the clean-up of the handler short.
            return
        self.cancel_reason = reason
        if self.consumer is not None:
            self.consumer.cancel()

    def lose(self, reason: CancelReason) -> None:
        """Note that the lease is gone, and cancel the handler unless it has ended. Only on the event loop's thread."""
        self.gone = reason
        if self.settlement is None:
            self.cancel(reason)

    def settle(
        self,
        action: SettleAction,
        *,
        delay: float = 0.0,
        error: str | None = None,
        died: bool = False,
        survived: bool = False,
    ) -> None:
        """Decide how the lease ends. See `Settlement`."""
        self.settlement = Settlement(
            lease=self.lease, action=action, delay=delay, error=error, died=died, survived=survived
        )

    def take_value(self, value: Any) -> BaseException | None:
        """Keep the value that the handler returned if it is wanted. Return the error if the handler has not run."""
        error = None if value is None else not_run_error(value)
        if error is None and self.keep_result:
            self.result = encode_result(value)
        return error

    def fail(self, error: str, code: FailureCode = "error") -> None:
        """Decide that the message has failed permanently."""
        self.code = code
        self.unreported = self.handler is not None and self.handler.on_failure is not None
        self.settle(SettleAction.FAIL_PERM, error=with_code(error, code))

    def is_lost(self, now: float) -> bool:
        """Return whether the lease is over at a monotonic time: lost, expired, or to be settled. From any thread."""
        return self.gone is not None or self.settlement is not None or now >= self.expires

    @property
    def max_tries(self) -> int | None:
        """The number of failed attempts after which the message has failed. None: there is no limit."""
        own = None if self.handler is None else self.handler.options.max_tries
        return own if self.options is None else self.options.allowed_tries(own)

    @property
    def timeout(self) -> float | None:
        """Seconds that an attempt may take. None: there is no limit."""
        own = None if self.handler is None else self.handler.options.timeout
        return own if self.options is None else self.options.allowed_time(own)

    @property
    def is_over(self) -> bool:
        """Whether the handler has ended. It has not while a thread outlives its message."""
        return self.consumer is None and (self.leftover is None or self.leftover.done())

    def fields(self) -> dict[str, Any]:
        """Return the log fields of the message."""
        message = self.lease.message
        fields = {
            "message_id": message.id,
            "task": self.task,
            "queue": message.queue,
            "tries": message.tries,
            "token": self.lease.token,
        }
        return fields if self.trace is None else fields | self.trace


class RunningMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A handler at work.

    Attributes:
        message_id: The message's id.
        task: The name of the task or raw handler.
        queue: The message's queue.
        tries: Failed attempts before this one.
        token: The lease's fencing token.
        started: Monotonic seconds at which the handler began.
        lease_remaining: Seconds until the lease ends, unless it is extended.
        progress_text: The handler's last progress as text.
    """

    message_id: str
    task: str
    queue: str
    tries: int
    token: int
    started: float
    lease_remaining: float
    progress_text: str | None = None


class Outcome(StrEnum):
    """How the delivery of a message ended."""

    ACKED = "acked"
    RETRIED = "retried"
    FAILED = "failed"
    RELEASED = "released"
    # Its settlement was refused, or never reached the store.
    LOST = "lost"
    # Its message was cancelled.
    CANCELLED = "cancelled"


class WorkerCounts(msgspec.Struct):
    """The counts of a worker since its start.

    Attributes:
        leased: Number of messages that it leased.
        acked: Number of messages that were acked.
        retried: Number of failed attempts whose message runs again.
        failed: Number of messages that failed permanently.
        released: Number of messages that it released.
        lost: Number of leases whose settlement was refused, or never reached the store.
        cancelled: Number of leased messages that were cancelled.
    """

    leased: int = 0
    acked: int = 0
    retried: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    cancelled: int = 0


class Observer(Protocol):
    """An observer of deliveries. It is called on the event loop's thread, must be quick, and must not raise."""

    def handler_started(self, delivery: Delivery) -> None:
        """Observe that a handler is about to start."""
        ...

    def message_settled(self, delivery: Delivery, outcome: Outcome, error: str | None, duration: float) -> None:
        """Observe that a delivery has ended.

        Args:
            delivery: The delivery of the message.
            outcome: How the delivery ended.
            error: The error of a failed or lost delivery.
            duration: Seconds that the handler ran. 0.0 if it did not run.
        """
        ...


class LeaseListener(Protocol):
    """An observer of leases in batches. It is called on the event loop's thread, must be quick, and must not raise."""

    def leases_taken(self) -> None:
        """Observe that messages were leased. They are held from now on."""
        ...

    def leases_extended(self, deliveries: Sequence[Delivery]) -> None:
        """Observe that the leases of these deliveries were extended."""
        ...

    def leases_settled(self, deliveries: Sequence[Delivery], at: float, acked: bool) -> None:
        """Observe that the leases of these deliveries have ended.

        Args:
            deliveries: The deliveries, with their settlements.
            at: Unix seconds at which the settlements were sent.
            acked: Whether all of them are acks.
        """
        ...

    def lease_lost(self, delivery: Delivery, reason: str) -> None:
        """Observe that the lease of this delivery was lost, and its outcome does not count."""
        ...
