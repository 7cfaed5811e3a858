"""What a worker's loops share: the record of one leased message, and who wants to hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from qworker.context import Context
from qworker.errors import UsageError
from qworker.message import Lease, Settle, Settlement
from qworker.names import check_queue
from qworker.task import Handler

__all__ = ["Observer", "Run", "RunningMessage", "Stop", "Transitions", "WorkerCounts", "WorkerOptions"]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker works."""

    # None: every queue that the app's tasks and handlers name.
    queues: tuple[str, ...] | None = None
    # Messages at once; a worker that is killed repeats at most so many.
    concurrency: int = 100
    # Seconds until others may take the messages of a worker that has died.
    visibility: float = 30.0
    # Seconds that handlers get to finish after `drain`.
    shutdown_timeout: float = 30.0
    # End when nothing is ready or leased; messages due in the future do not hold it.
    burst: bool = False
    # Drain after so many.
    max_messages: int | None = None

    def __post_init__(self) -> None:
        for queue in self.queues or ():
            check_queue(queue)
        if self.concurrency < 1:
            raise UsageError(f"concurrency is at least 1, not {self.concurrency}")
        if self.visibility <= 0:
            raise UsageError(f"visibility is more than 0 seconds, not {self.visibility}")
        if self.shutdown_timeout < 0:
            raise UsageError(f"the shutdown timeout is at least 0 seconds, not {self.shutdown_timeout}")
        if self.max_messages is not None and self.max_messages < 1:
            raise UsageError(f"max_messages is at least 1, not {self.max_messages}")


class Stop(StrEnum):
    """Why a handler is cancelled."""

    TIMEOUT = "timeout"
    # Another may have the message.
    LOST = "lost"
    # The lease could not be renewed and is about to expire.
    EXPIRING = "expiring"
    # The worker ends.
    SHUTDOWN = "shutdown"


class Run(msgspec.Struct, eq=False):
    """One leased message on its way through a worker; lives from its lease to its settlement."""

    lease: Lease
    # Monotonic seconds: when the lease was last known to begin, and when it ends at the earliest.
    renewed: float
    expires: float
    # Unix seconds: when it was leased.
    leased_at: float = 0.0
    # The name of the task or raw handler, once known.
    task: str = ""
    handler: Handler | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] | None = None
    context: Context | None = None
    # Monotonic seconds at which the handler began, and how long it took; 0 for what was never run.
    started: float = 0.0
    duration: float = 0.0
    # The asyncio task that the handler runs in, while it runs there.
    consumer: asyncio.Task[None] | None = None
    # Set: the handler's own outcome no longer counts.
    stop: Stop | None = None
    # What the handler raised.
    error: BaseException | None = None
    settlement: Settlement | None = None
    # True from the moment at which its settlement may be on its way: no extension begins any more.
    settling: bool = False
    # What log lines say of its span, while it is traced.
    trace: dict[str, str] | None = None
    # A thread that outlives its message: done when it ends.
    leftover: asyncio.Future[None] | None = None

    def cancel(self, why: Stop) -> None:
        """Cancel the handler, or keep it from starting; the first reason stays. Only on the loop's thread."""
        if self.stop is None:
            self.stop = why
        if self.consumer is not None:
            self.consumer.cancel()

    def settle(self, how: Settle, *, delay: float = 0.0, error: str | None = None) -> None:
        """Decide how the lease ends."""
        self.settlement = Settlement(lease=self.lease, how=how, delay=delay, error=error)

    def fields(self) -> dict[str, Any]:
        """What a log line says of the message."""
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
    """A handler at work, for those who look at the worker."""

    message_id: str
    task: str
    queue: str
    tries: int
    token: int
    # Monotonic seconds.
    started: float
    # Seconds until the lease ends, unless it is renewed.
    lease_left: float
    # The handler's last progress.
    note: str | None = None


class WorkerCounts(msgspec.Struct):
    """What a worker has done since its start."""

    leased: int = 0
    acked: int = 0
    retried: int = 0
    failed: int = 0
    released: int = 0
    # Leases whose outcome was refused, or never reached the store.
    lost: int = 0


class Observer(Protocol):
    """Is told what a worker runs, on the loop's thread; must be quick, and must not raise."""

    def started(self, run: Run) -> None:
        """A handler is about to run."""
        ...

    def finished(self, run: Run, outcome: str, error: str | None, duration: float) -> None:
        """A message has left the worker.

        Args:
            run: the message's record.
            outcome: a `Settle` value, or `lost`.
            error: why it failed, or was lost.
            duration: seconds that the handler took; 0.0 if it was not run.
        """
        ...


class Transitions(Protocol):
    """Is told what becomes of a worker's leases, a batch at a time, on the loop's thread; must be quick, and must not raise."""

    def leased(self) -> None:
        """Messages were leased, and are held from now on."""
        ...

    def extended(self, runs: Sequence[Run]) -> None:
        """Their leases were renewed."""
        ...

    def settled(self, runs: Sequence[Run], at: float, acked: bool) -> None:
        """Their leases have ended as their settlements, sent at `at`, say; `acked`: all of them by an ack."""
        ...

    def lost(self, run: Run, why: str) -> None:
        """Its outcome does not count."""
        ...
