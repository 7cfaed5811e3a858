"""The worker: it leases messages, runs their handlers, extends the leases and settles the outcomes."""

from __future__ import annotations

from qworker.queue_share import QueueShare
from qworker.worker.delivery import Observer, RunningMessage, WorkerCounts
from qworker.worker.worker import Worker
from qworker.worker.worker_options import WorkerOptions

__all__ = ["Observer", "QueueShare", "RunningMessage", "Worker", "WorkerCounts", "WorkerOptions"]
