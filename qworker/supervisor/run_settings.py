"""The options of `qworker run`, and its exit statuses."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from qworker.queue_share import QueueShare

__all__ = ["ExitStatus", "RunSettings"]


class ExitStatus(IntEnum):
    """Exit statuses of a worker process and of its supervisor."""

    CLEAN = 0
    CRASH = 1
    USAGE = 2
    UNREACHABLE = 3
    DRAIN_TIMED_OUT = 4


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `qworker run`, checked."""

    # The queues to lease from. None: every queue that the app names.
    queues: tuple[QueueShare, ...] | None = None
    # Whether to lease from a queue only if those in front of it are empty.
    strict: bool = False
    concurrency: int = 100
    # The maximum number of processes for suspects.
    isolated: int = 4
    # The minimum and the maximum number of worker processes.
    workers: tuple[int, int] = (1, 1)
    burst: bool = False
    # Whether to wait for a backend that cannot be reached at the start.
    wait_for_backend: bool = False
    # Whether the workers enqueue the calls of schedules.
    schedules: bool = True
    # Monotonic seconds at which the command started. None: when a worker starts.
    started: float | None = None
    reload: bool = False
    # Seconds that running handlers get after the first signal.
    shutdown_timeout: float = 30.0
    # Seconds that a lease lasts unless it is extended.
    visibility: float = 30.0
    # The number of messages and the resident memory in MB after which a fresh process replaces this one.
    max_messages: int | None = None
    max_memory_mb: float | None = None
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: str = "info"
    loop: Literal["auto", "asyncio", "uvloop"] = "auto"

    # The address of the health port. None: no health port.
    health: tuple[str, int] | None = None
    # Seconds that the event loop may be blocked before `/livez` fails.
    stall_timeout: float = 60.0

    @property
    def log_json(self) -> bool | None:
        """Whether to log JSON. None: if standard error is not a terminal."""
        return None if self.log_format == "auto" else self.log_format == "json"
