"""The worker: it leases messages, runs their handlers, extends the leases and settles the outcomes."""

from __future__ import annotations

from qworker.worker.delivery import Observer, RunningMessage, WorkerCounts, WorkerOptions
from qworker.worker.worker import Worker

__all__ = ["Observer", "RunningMessage", "Worker", "WorkerCounts", "WorkerOptions"]
