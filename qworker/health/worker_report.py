"""The report of a worker process to its supervisor."""

from __future__ import annotations

from typing import Literal

import msgspec

from qworker.message import QueueStats
from qworker.worker.metrics import TaskCounts

__all__ = ["Phase", "WorkerReport"]

Phase = Literal["starting", "working", "quiet", "draining"]


# The tag is part of the protocol between a supervisor and its workers, which can have different versions.
class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag="Report"):
    """The state of a worker process at one moment."""

    # A process that replaces itself keeps its id and restarts its counts. Then this value changes.
    life: str
    pid: int
    state: Phase
    # Seconds that its event loop has been blocked.
    stalled: float = 0.0
    # Why the store cannot be reached. None: it can be reached, or was not sampled yet.
    problem: str | None = None
    # The number of running handlers, and its maximum.
    running: int = 0
    concurrency: int = 0
    # The number of messages whose last attempt killed its process, and which run apart from the others.
    suspects: int = 0
    counts: list[TaskCounts] = []
    # The last sample of the queues, and its time in Unix seconds. None: there is no sample yet.
    queues: list[QueueStats] = []
    looked_at: float | None = None
