"""The options of a worker, checked when they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from qworker.errors import UsageError
from qworker.queue_share import QueueShare, check_shares
from qworker.validation import check_flag, check_seconds, check_whole, shown

__all__ = ["WorkerOptions"]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker.

    Attributes:
        queues: The queues to lease from, each a name or a `QueueShare`. None: every queue that the app's tasks and
            raw handlers name.
        concurrency: Maximum number of messages at once. If a worker is killed, at most this number runs again.
        visibility_timeout: Lease length in seconds. The worker extends leases while handlers run. If the worker dies,
            its messages run elsewhere after this time.
        shutdown_timeout: Seconds that handlers get to finish after `drain`.
        burst: Whether to end when no message is ready or leased. The worker does not wait for delayed messages.
        max_messages: Number of messages after which the worker drains. None: no limit.
        strict: Whether to lease from a queue only if those in front of it in `queues` are empty. If not, each queue
            gets its share of each lease.
        isolated: Maximum number of processes for suspects: messages whose last attempt killed its process.
        schedules: Whether the worker enqueues the calls of schedules, for all queues of the app.
        started: Monotonic seconds at which its command started, of which other processes may be workers too. The newer
            command decides what a schedule is. None: when the worker starts.

    Raises:
        UsageError: An option has the wrong type or is out of range.
    """

    queues: tuple[str | QueueShare, ...] | None = None
    concurrency: int = 100
    visibility_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    burst: bool = False
    max_messages: int | None = None
    strict: bool = False
    isolated: int = 4
    schedules: bool = True
    started: float | None = None

    def __post_init__(self) -> None:
        check_flag("strict", self.strict)
        check_shares(self.shares, strict=self.strict)
        check_whole("concurrency", self.concurrency, 1)
        for name, positive in (("visibility_timeout", True), ("shutdown_timeout", False)):
            seconds = check_seconds(name, getattr(self, name), positive=positive)
            msgspec.structs.force_setattr(self, name, seconds)
        check_whole("isolated", self.isolated, 1)
        check_flag("burst", self.burst)
        check_flag("schedules", self.schedules)
        if self.max_messages is not None:
            check_whole("max_messages", self.max_messages, 1)

    @property
    def shares(self) -> tuple[QueueShare, ...] | None:
        """The queues with their shares. None: every queue of the app.

        Raises:
            UsageError: The queues are not a sequence, or a queue is neither a name nor a `QueueShare`, or its name is
                not valid.
        """
        if self.queues is None:
            return None
        # Each letter of a text would be a queue.
        given = cast("object", self.queues)
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise UsageError(f"queues must be a tuple of names, such as ('mail',) (got {shown(given)})")
        return tuple(queue if isinstance(queue, QueueShare) else QueueShare(queue) for queue in self.queues)
