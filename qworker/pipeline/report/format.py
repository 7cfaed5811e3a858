"""The numbers of a report as texts and rows, for the terminal and for the page."""

from __future__ import annotations

from datetime import UTC, datetime

from qworker.pipeline.report.model import Percentiles, Report

__all__ = [
    "failure_rows",
    "format_count",
    "format_rate",
    "format_seconds",
    "format_time",
    "queue_rows",
    "step_rows",
    "task_rows",
    "worker_rows",
]

Table = tuple[list[str], list[list[str]]]


def format_time(seconds: float) -> str:
    """Return a Unix time in the usual notation, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def format_seconds(seconds: float) -> str:
    """Return a duration with about three digits: `250 us`, `3.2 ms`, `45 s`, `12 min`, `3 h`, `2 d`."""
    for most, size, unit in (
        (1e-3, 1e-6, "us"),
        (1.0, 1e-3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 60.0, "min"),
        (172_800.0, 3600.0, "h"),
    ):
        if seconds < most:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 100 or value.is_integer() else f"{value:.2g} {unit}"
    return f"{seconds / 86_400:.3g} d"


def format_count(value: float) -> str:
    """Return a number as text: `1,234`. It has a fraction if the scale is that fine."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2g}"


def format_rate(value: float) -> str:
    """Return a number per second, with three digits."""
    if value >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def queue_rows(report: Report) -> Table:
    """Return the counts of each queue."""
    headings = ["queue", "enqueued", "done", "failed", "open", "runs", "retries", "released", "lost leases", "done/s"]
    rows = [
        [
            q.queue,
            *(format_count(n) for n in (q.enqueued, q.done, q.failed, q.open, q.runs, q.retried, q.released, q.lost)),
            format_rate(q.per_second),
        ]
        for q in report.queues
    ]
    return headings, rows


def task_rows(report: Report) -> Table:
    """Return how long each task's messages waited and ran."""
    headings = [
        "queue",
        "task",
        "done",
        "failed",
        "wait 50 %",
        "90 %",
        "99 %",
        "max",
        "run 50 %",
        "90 %",
        "99 %",
        "max",
    ]
    rows = [
        [t.queue, t.task or "-", format_count(t.done), format_count(t.failed), *_cells(t.wait), *_cells(t.run)]
        for t in report.tasks
    ]
    return headings, rows


def _cells(found: Percentiles | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    return [format_seconds(found.p50), format_seconds(found.p90), format_seconds(found.p99), format_seconds(found.max)]


def failure_rows(report: Report) -> Table:
    """Return errors, the most frequent first."""
    headings = ["queue", "task", "error", "failed", "tried again"]
    return headings, [
        [f.queue, f.task or "-", f.example, format_count(f.failed), format_count(f.retried)] for f in report.failures
    ]


def worker_rows(report: Report) -> Table:
    """Return the work of each worker, the busiest first."""
    headings = ["worker", "runs", "failed runs", "busy"]
    return headings, [
        [w.worker, format_count(w.runs), format_count(w.failed), format_seconds(w.busy_s)] for w in report.workers
    ]


def step_rows(report: Report) -> Table:
    """Return the counts of each step of time."""
    headings = ["step", "enqueued", "done", "failed", "tried again"]
    return headings, [
        [format_time(m.at), *(format_count(n) for n in (m.enqueued, m.done, m.failed, m.retried))]
        for m in report.moments
    ]
