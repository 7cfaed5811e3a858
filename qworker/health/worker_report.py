"""What one worker process knows of itself, in the form in which it tells its supervisor."""

from __future__ import annotations

from typing import Literal

import msgspec

from qworker.message import QueueStats
from qworker.worker.metrics import TaskCounts

__all__ = ["Phase", "WorkerReport"]

Phase = Literal["starting", "working", "quiet", "draining"]


# The tag is what processes of every version write on the line to a supervisor.
class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag="Report"):
    """A worker process at one moment."""

    # One life of one process: a process that replaces itself keeps its id, and counts from nothing again.
    life: str
    pid: int
    state: Phase
    # Seconds that its loop has stood still.
    stalled: float = 0.0
    # Why the store cannot be reached; None: it can, or nobody has looked yet.
    problem: str | None = None
    # Handlers at work, and how many may be.
    running: int = 0
    concurrency: int = 0
    counts: list[TaskCounts] = []
    # The queues when they were last looked at, and that time in Unix seconds; None: never yet.
    queues: list[QueueStats] = []
    looked_at: float | None = None
