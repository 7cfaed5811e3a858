"""The metrics in Prometheus' text format, version 0.0.4.

The names are from OpenTelemetry's messaging semantic conventions if they have one, and otherwise begin with `qworker_`.
"""

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
        reports: The reports of the running worker processes.
        counts: The counts of all processes, including those that have ended, one for each queue and task.
        queues: The last sample of the queues.
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
            "Finished deliveries by outcome: acked, retried, failed, released, lost.",
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
            "Seconds that handlers ran.",
            [s for c in counts for s in _histogram(duration, _of(c), SECONDS, c.durations, c.seconds)],
        ),
        (
            tries,
            "histogram",
            "Failed attempts of messages before their final outcome.",
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
            "Seconds that the oldest ready message has waited. 0 if no message is ready.",
            [(age, _on(s.queue), s.oldest_age_s or 0.0) for s in queues],
        ),
        (
            paused,
            "gauge",
            "1 if the queue is paused, else 0.",
            [(paused, _on(s.queue), float(s.paused)) for s in queues],
        ),
    ]


def _processes(reports: Sequence[WorkerReport]) -> list[tuple[str, str, str, list[_Sample]]]:
    looked = [report.looked_at for report in reports if report.looked_at is not None]
    gauges = [
        ("qworker_workers", "Running worker processes.", len(reports)),
        ("qworker_handlers_running", "Running handlers.", sum(r.running for r in reports)),
        ("qworker_concurrency", "Maximum number of running handlers.", sum(r.concurrency for r in reports)),
        (
            "qworker_loop_stalled_seconds",
            "Seconds that the event loop has been blocked, the longest of all workers.",
            max((r.stalled for r in reports), default=0.0),
        ),
        (
            "qworker_backend_up",
            "1 if every worker reaches its backend, else 0.",
            float(bool(looked) and not any(r.problem for r in reports)),
        ),
    ]
    if looked:
        gauges.append(
            (
                "qworker_queue_stats_age_seconds",
                "Seconds since the queues were sampled.",
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
