"""Prometheus' text format, version 0.0.4: names of the messaging semantic conventions where there are any, else `qworker_`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

from qworker.health.worker_report import WorkerReport
from qworker.message import QueueStats
from qworker.worker.metrics import SECONDS, TRIES, TaskCounts

__all__ = ["CONTENT_TYPE", "format_metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Sample = tuple[str, dict[str, str], float]


def format_metrics(reports: Sequence[WorkerReport], counts: Iterable[TaskCounts], queues: Iterable[QueueStats]) -> str:
    """Return the page of `/metrics`.

    Args:
        reports: One for each worker process that runs.
        counts: The counts of all processes, also of those that are gone, one for each queue and task.
        queues: The queues as they were last seen.
    """
    lines: list[str] = []
    for name, kind, text, samples in (*_counts(list(counts)), *_depths(list(queues)), *_processes(reports)):
        if samples:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{sample}{_labels(labels)} {_number(value)}" for sample, labels, value in samples]
    return "\n".join(lines) + "\n"


def _counts(counts: list[TaskCounts]) -> list[tuple[str, str, str, list[_Sample]]]:
    consumed = "messaging_client_consumed_messages_total"
    duration = "messaging_process_duration_seconds"
    tries = "qworker_message_tries"
    lost = "qworker_leases_lost_total"
    return [
        (
            consumed,
            "counter",
            "Messages that left a worker, by outcome: acked, retried, failed, released, lost.",
            [
                (consumed, {**_of(c), "qworker_outcome": outcome}, n)
                for c in counts
                for outcome, n in c.outcomes.items()
                if n
            ],
        ),
        (
            duration,
            "histogram",
            "Seconds that handlers took.",
            [s for c in counts for s in _histogram(duration, _of(c), SECONDS, c.durations, c.seconds)],
        ),
        (
            tries,
            "histogram",
            "Failed attempts that messages had behind them at their final outcome.",
            [s for c in counts for s in _histogram(tries, _of(c), TRIES, c.tries, c.attempts)],
        ),
        (
            lost,
            "counter",
            "Leases that were lost before their outcome was stored.",
            [(lost, _of(c), c.lost) for c in counts],
        ),
    ]


def _depths(queues: list[QueueStats]) -> list[tuple[str, str, str, list[_Sample]]]:
    depth = "qworker_queue_depth"
    age = "qworker_queue_oldest_age_seconds"
    paused = "qworker_queue_paused"
    depths: list[_Sample] = []
    for stats in queues:
        for state in ("ready", "leased", "delayed", "failed"):
            count: int = getattr(stats, state)
            depths.append((depth, {**_on(stats.queue), "qworker_state": state}, count))
    return [
        (depth, "gauge", "Messages in the store, by state: ready, leased, delayed, failed.", depths),
        (
            age,
            "gauge",
            "Seconds that the oldest ready message has waited; 0 when none waits.",
            [(age, _on(s.queue), s.oldest_age_s or 0.0) for s in queues],
        ),
        (paused, "gauge", "1 while the queue is paused.", [(paused, _on(s.queue), float(s.paused)) for s in queues]),
    ]


def _processes(reports: Sequence[WorkerReport]) -> list[tuple[str, str, str, list[_Sample]]]:
    looked = [report.looked_at for report in reports if report.looked_at is not None]
    gauges = [
        ("qworker_workers", "Worker processes that run.", len(reports)),
        ("qworker_handlers_running", "Handlers at work.", sum(r.running for r in reports)),
        ("qworker_concurrency", "Handlers that may be at work at once.", sum(r.concurrency for r in reports)),
        (
            "qworker_loop_stalled_seconds",
            "How long the event loop has stood still, in the worker where it has longest.",
            max((r.stalled for r in reports), default=0.0),
        ),
        (
            "qworker_backend_up",
            "1 while every worker reaches its backend.",
            float(bool(looked) and not any(r.problem for r in reports)),
        ),
    ]
    if looked:
        gauges.append(
            (
                "qworker_queue_stats_age_seconds",
                "Age of the depths above.",
                max(0.0, round(time.time() - max(looked), 3)),
            )
        )
    return [(name, "gauge", text, [(name, {}, value)]) for name, text, value in gauges]


def _of(task: TaskCounts) -> dict[str, str]:
    return {**_on(task.queue), "messaging_operation_name": "process", "qworker_task": task.task}


def _on(queue: str) -> dict[str, str]:
    return {"messaging_system": "qworker", "messaging_destination_name": queue}


def _histogram(
    name: str, labels: dict[str, str], bounds: Sequence[float], counts: list[int], total: float
) -> list[_Sample]:
    sums = list(accumulate(counts))
    samples: list[_Sample] = [
        (f"{name}_bucket", {**labels, "le": edge}, count)
        for edge, count in zip([*map(_number, bounds), "+Inf"], sums, strict=True)
    ]
    return [*samples, (f"{name}_sum", labels, total), (f"{name}_count", labels, sums[-1])]


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
