"""Samples as text, with the same columns on the screen and in a printed table."""

from __future__ import annotations

from qworker.cli.output import format_seconds
from qworker.cli.schedules import format_tick
from qworker.cli.top.sampler import Row, Sample
from qworker.names import counted
from qworker.schedules.store import ScheduleStatus
from qworker.tools.running import RunningJob

__all__ = ["COLUMNS", "cells", "heading", "running_line", "schedule_line"]

# Seconds after which the age of a count is shown.
_OLD_S = 4.0

COLUMNS = (
    "queue",
    "ready",
    "leased",
    "delayed",
    "failed",
    "backlog/s",
    "acked/s",
    "failed/s",
    "oldest",
    "workers",
    "note",
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of a row, one for each of `COLUMNS`."""
    counts = (f"{count:,}" for count in (row.ready, row.leased, row.delayed, row.failed))
    rates = (_signed(row.backlog_rate), _number(row.acked_rate), _number(row.failed_rate))
    return (
        row.queue,
        *counts,
        *rates,
        format_seconds(row.oldest_age_s),
        str(row.workers),
        _note(row),
    )


def _note(row: Row) -> str:
    if row.problem is not None:
        return row.problem
    notes = {
        "counting": row.count_age_s is None,
        "paused": row.paused,
        f"{row.blocked:,} blocked": row.blocked > 0,
        f"counted {format_seconds(row.count_age_s)} ago": (row.count_age_s or 0.0) >= _OLD_S,
        "approximate": not row.exact,
    }
    return ", ".join([note for note, is_true in notes.items() if is_true])


def heading(sample: Sample) -> str:
    """Return the line above the table."""
    if sample.fleet is None:
        return sample.backend
    totals = sample.fleet
    running = f"{totals.running:,} of {counted(totals.concurrency, 'handler')} running"
    suspects = f", {counted(totals.suspects, 'suspect')}" if totals.suspects else ""
    return f"{sample.backend}   {counted(totals.workers, 'worker')}, {running}{suspects}"


def _number(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _signed(rate: float | None) -> str:
    if rate is None:
        return "-"
    # A rate that is rounded to zero has no sign.
    return f"{rate:+,.0f}" if abs(rate) >= 100 else f"{rate:+,.1f}" if abs(rate) >= 0.05 else "0.0"


def schedule_line(row: ScheduleStatus) -> str:
    """Return a schedule on one line: its last tick with the outcome, and the next one."""
    last = "not yet" if row.last is None else f"{format_tick(row.last)} {row.outcome or ''}".rstrip()
    upcoming = "paused" if row.paused else f"next {format_tick(row.next)}"
    return f"{row.name} ({row.definition}): last {last}, {upcoming}"


def running_line(job: RunningJob, now: float) -> str:
    """Return the progress of a running job on one line.

    Args:
        job: The job.
        now: Unix seconds.
    """
    progress = job.progress
    total = "" if progress.total is None else f"/{progress.total:g}"
    text = f", {progress.text}" if progress.text else ""
    since = "" if job.started_at is None else f", running for {format_seconds(max(0.0, now - job.started_at))}"
    return f"{job.task or 'raw message'} {job.id} in {job.queue}: {progress.done:g}{total}{text}{since}"
