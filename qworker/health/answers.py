"""What is answered to whom: one worker's report, or those of all that a supervisor has."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from qworker.health.exposition import format_metrics
from qworker.health.worker_report import WorkerReport
from qworker.message import QueueStats
from qworker.worker.metrics import TaskCounts, merge_counts

__all__ = ["HealthAnswers", "WorkerReports"]


class WorkerReports:
    """The reports of a supervisor's workers. Written on the supervisor's loop, read from the server's thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        # By process id, each with the monotonic time at which it came.
        self._last: dict[int, tuple[float, WorkerReport]] = {}
        # What those who are gone have counted: a counter must not fall when a worker dies.
        self._past: list[TaskCounts] = []

    def add_report(self, pid: int, report: WorkerReport) -> None:
        """Take a worker's report."""
        with self._lock:
            before = self._last.get(pid)
            if before is not None and before[1].life != report.life:
                self._past = merge_counts([*self._past, *before[1].counts])
            self._last[pid] = (self._now(), report)

    def remove_process(self, pid: int) -> None:
        """A worker process has ended."""
        with self._lock:
            _, report = self._last.pop(pid, (0.0, None))
            if report is not None:
                self._past = merge_counts([*self._past, *report.counts])

    def reports(self) -> list[WorkerReport]:
        """Return the last report of each process that runs; silence counts as a loop that stands still."""
        with self._lock:
            now = self._now()
            return [
                msgspec.structs.replace(report, stalled=report.stalled + _silence(now - at))
                for at, report in self._last.values()
            ]

    def past_counts(self) -> list[TaskCounts]:
        """Return the counts of processes that are gone."""
        with self._lock:
            return list(self._past)


# A report comes twice a second; on a busy machine not quite.
_USUAL_SILENCE_S = 5.0


def _silence(seconds: float) -> float:
    return seconds if seconds > _USUAL_SILENCE_S else 0.0


class HealthAnswers:
    """The answers. Every method may be called from any thread.

    Args:
        reports: The processes that run.
        stall_timeout: Seconds that a loop may stand still.
        past: The counts of processes that are gone.
        stopping: Whether the whole service is on its way out.
        stalled: Seconds that the supervisor's own loop has stood still.
        own_metrics: Also show what the app itself counts with prometheus-client in this process.
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
        # Found now: an import beside a handler that blocks the loop would take longer than a scrape may.
        self._client = _prometheus_client()
        self._own_metrics = own_metrics

    def live(self) -> tuple[bool, str]:
        """Return whether to let it live, and why not."""
        if (stalled := self._stalled()) > self._stall_timeout:
            return False, f"the supervisor's loop has stood still for {stalled:.0f} s"
        for report in self._reports():
            if report.stalled > self._stall_timeout:
                return False, f"the loop of worker {report.pid} has stood still for {report.stalled:.0f} s"
        return True, "ok"

    def ready(self) -> tuple[bool, str]:
        """Return whether some worker takes messages, and why none does."""
        reports = self._reports()
        if self._stopping():
            return False, "draining"
        if any(report.state == "working" and report.problem is None for report in reports):
            return True, "ok"
        problem = next((report.problem for report in reports if report.problem), None)
        return False, problem or (reports[0].state if reports else "starting")

    def stats(self) -> dict[str, Any] | None:
        """Return the depths, for a scaler; None: nobody has looked yet."""
        reports = self._reports()
        queues, looked_at = _latest(reports)
        if looked_at is None:
            return None
        open_queues = [stats for stats in queues if not stats.paused]
        return {
            # What a scaler wants to know: work that could be done now. A paused queue has none.
            "backlog": sum(s.ready + s.leased for s in open_queues),
            "ready": sum(s.ready for s in open_queues),
            "oldest_age_s": max((s.oldest_age_s or 0.0 for s in open_queues), default=0.0),
            "stats_age_s": round(max(0.0, time.time() - looked_at), 3),
            "workers": len(reports),
            "running": sum(report.running for report in reports),
            "concurrency": sum(report.concurrency for report in reports),
            "queues": {stats.queue: _plain(stats) for stats in queues},
            "outcomes": _outcomes(self._counts(reports)),
        }

    def metrics(self) -> str:
        """Prometheus' page."""
        reports = self._reports()
        page = format_metrics(reports, self._counts(reports), _latest(reports)[0])
        return page + self._app_metrics()

    def _counts(self, reports: Sequence[WorkerReport]) -> list[TaskCounts]:
        return merge_counts([*self._past(), *(task for report in reports for task in report.counts)])

    def _app_metrics(self) -> str:
        """Return what the app counts by itself with prometheus-client."""
        client = self._client
        if client is None:
            return ""
        if self._own_metrics:
            return cast("bytes", client.generate_latest(client.REGISTRY)).decode()
        # The app runs in other processes: they share their counts in a directory, if at all.
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            return ""
        registry: Any = client.CollectorRegistry()
        client.multiprocess.MultiProcessCollector(registry)
        return cast("bytes", client.generate_latest(registry)).decode()


def _prometheus_client() -> Any:
    """Return the package, where it is installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    importlib.import_module("prometheus_client.multiprocess")
    return importlib.import_module("prometheus_client")


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
    }


def _outcomes(tasks: Iterable[TaskCounts]) -> dict[str, dict[str, int]]:
    """Messages that left the workers, by queue and outcome."""
    found: dict[str, dict[str, int]] = {}
    for task in tasks:
        counts = found.setdefault(task.queue, {})
        for outcome, count in task.outcomes.items():
            counts[outcome] = counts.get(outcome, 0) + count
    return found
