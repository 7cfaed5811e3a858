"""How a worker works: its options, checked where they are given."""

from __future__ import annotations

import msgspec

from qworker.names import check_queue
from qworker.validation import check_flag, check_seconds, check_whole

__all__ = ["WorkerOptions"]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker works.

    Attributes:
        queues: The queues whose messages it takes; None: every queue that the app's tasks and handlers name.
        concurrency: Messages at once. A worker that is killed repeats at most so many.
        visibility_timeout: Seconds until others may take the messages of a worker that has died.
        shutdown_timeout: Seconds that handlers get to finish after `drain`.
        burst: Whether it ends when nothing is ready or leased. Messages due in the future do not hold it.
        max_messages: It drains after so many; None: no limit.

    Raises:
        UsageError: An option has the wrong type or is out of range.
    """

    queues: tuple[str, ...] | None = None
    concurrency: int = 100
    visibility_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    burst: bool = False
    max_messages: int | None = None

    def __post_init__(self) -> None:
        for queue in self.queues or ():
            check_queue(queue)
        check_whole("concurrency", self.concurrency, 1)
        for name, positive in (("visibility_timeout", True), ("shutdown_timeout", False)):
            seconds = check_seconds(name, getattr(self, name), positive=positive)
            msgspec.structs.force_setattr(self, name, seconds)
        check_flag("burst", self.burst)
        if self.max_messages is not None:
            check_whole("max_messages", self.max_messages, 1)
