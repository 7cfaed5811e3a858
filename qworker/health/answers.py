"""The answers of the health port, from the report of one worker or of all workers of a supervisor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from qworker.health.worker_report import WorkerReport
from qworker.message import QueueStats
from qworker.worker.metrics import TaskCounts, merge_counts

__all__ = ["HealthAnswers", "WorkerReports"]


class WorkerReports:
    """The reports of a supervisor's workers. The supervisor writes them, and the thread of the server reads them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        # Each report by process id, with the monotonic time at which it arrived.
        self._last: dict[int, tuple[float, WorkerReport]] = {}
        # The counts of processes that have ended, because a counter must not fall when a worker dies.
        self._past: list[TaskCounts] = []

    def add_report(self, pid: int, report: WorkerReport) -> None:
        """Add the report of a worker."""
        with self._lock:
            before = self._last.get(pid)
            if before is not None and before[1].life != report.life:
                self._past = merge_counts([*self._past, *before[1].counts])
            self._last[pid] = (self._now(), report)

    def remove_process(self, pid: int) -> None:
        """Remove a worker process that has ended, and keep its counts."""
        with self._lock:
            _, report = self._last.pop(pid, (0.0, None))
            if report is not None:
                self._past = merge_counts([*self._past, *report.counts])

    def reports(self) -> list[WorkerReport]:
        """Return the last report of each running process. A process that sends no reports counts as blocked."""
        with self._lock:
            now = self._now()
            return [
                msgspec.structs.replace(report, stalled=report.stalled + _silence(now - at))
                for at, report in self._last.values()
            ]

    def past_counts(self) -> list[TaskCounts]:
        """Return the counts of processes that have ended."""
        with self._lock:
            return list(self._past)


# A report arrives twice per second, or less often on a busy machine.
_USUAL_SILENCE_S = 5.0


def _silence(seconds: float) -> float:
    return seconds if seconds > _USUAL_SILENCE_S else 0.0


class HealthAnswers:
    """The answers of the health port. Any thread can call every method.

    Args:
        reports: A function that returns the reports of the running processes.
        stall_timeout: Seconds that an event loop can be blocked before `/livez` fails.
        past: A function that returns the counts of processes that have ended.
        stopping: A function that returns whether the whole service is stopping.
        stalled: A function that returns the seconds for which the supervisor's own loop has been blocked.
        own_metrics: Whether to show the metrics of the app from prometheus-client in this process too.
    """

    def __init__(
        self,
        reports: Callable[[], Sequence[WorkerReport]],
        *,
        stall_timeout: float,
        past: Callable[[], Iterable[TaskCounts]] = tuple,
        stopping: Callable[[], bool] = lambda: False,
        stalled: Callable[[], float] = lambda: 0.0,
        own_metrics: bool = True,
    ) -> None:
        self._reports = reports
        self._stall_timeout = stall_timeout
        self._past = past
        self._stopping = stopping
        self._stalled = stalled
        # The import is here, because an import while a handler blocks the loop could take longer than a scrape, and
        # because a process without a health port does not need it.
        from qworker.health import exposition

        self._exposition = exposition
        self._own_metrics = own_metrics

    def live(self) -> tuple[bool, str]:
        """Return whether the process is alive, and the reason if it is not."""
        if (stalled := self._stalled()) > self._stall_timeout:
            return False, f"the supervisor's event loop has been blocked for {stalled:.0f} s"
        for report in self._reports():
            if report.stalled > self._stall_timeout:
                return False, f"the event loop of worker {report.pid} has been blocked for {report.stalled:.0f} s"
        return True, "ok"

    def ready(self) -> tuple[bool, str]:
        """Return whether a worker leases messages, and the reason if none does."""
        reports = self._reports()
        if self._stopping():
            return False, "draining"
        if any(report.state == "working" and report.problem is None for report in reports):
            return True, "ok"
        problem = next((report.problem for report in reports if report.problem), None)
        return False, problem or (reports[0].state if reports else "starting")

    def stats(self) -> dict[str, Any] | None:
        """Return the depths for a scaler, or None if no worker has sampled the queues yet."""
        reports = self._reports()
        queues, looked_at = _latest(reports)
        if looked_at is None:
            return None
        open_queues = [stats for stats in queues if not stats.paused]
        return {
            # A scaler needs the number of messages that could run now. Those of paused queues cannot.
            "backlog": sum(s.ready + s.leased for s in open_queues),
            "ready": sum(s.ready for s in open_queues),
            "oldest_age_s": max((s.oldest_age_s or 0.0 for s in open_queues), default=0.0),
            "stats_age_s": round(max(0.0, time.time() - looked_at), 3),
            "workers": len(reports),
            "running": sum(report.running for report in reports),
            "concurrency": sum(report.concurrency for report in reports),
            "suspects": sum(report.suspects for report in reports),
            "queues": {stats.queue: _plain(stats) for stats in queues},
            "outcomes": _outcomes(self._counts(reports)),
        }

    def metrics(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page for Prometheus and its content type.

        Args:
            accept: The header `Accept` of the request. If it asks for OpenMetrics, the page has that format.
        """
        reports = self._reports()
        workers = self._exposition.WorkerCollector(reports, self._counts(reports), _latest(reports)[0])
        return self._exposition.format_metrics(workers, own_metrics=self._own_metrics, accept=accept)

    def _counts(self, reports: Sequence[WorkerReport]) -> list[TaskCounts]:
        return merge_counts([*self._past(), *(task for report in reports for task in report.counts)])


def _latest(reports: Sequence[WorkerReport]) -> tuple[list[QueueStats], float | None]:
    looked = [report for report in reports if report.looked_at is not None]
    if not looked:
        return [], None
    latest = max(looked, key=lambda report: report.looked_at or 0.0)
    return latest.queues, latest.looked_at


def _plain(stats: QueueStats) -> dict[str, Any]:
    return {
        "ready": stats.ready,
        "leased": stats.leased,
        "delayed": stats.delayed,
        "failed": stats.failed,
        "oldest_age_s": stats.oldest_age_s,
        "paused": stats.paused,
        "blocked": stats.blocked,
        "problem": stats.problem,
    }


def _outcomes(tasks: Iterable[TaskCounts]) -> dict[str, dict[str, int]]:
    """Return the number of finished deliveries by queue and outcome."""
    found: dict[str, dict[str, int]] = {}
    for task in tasks:
        counts = found.setdefault(task.queue, {})
        for outcome, count in task.outcomes.items():
            counts[outcome] = counts.get(outcome, 0) + count
    return found
