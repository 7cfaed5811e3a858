"""The metrics in Prometheus' text format or in OpenMetrics, which prometheus-client writes.

The names are from OpenTelemetry's messaging semantic conventions if they have one, and otherwise begin with `qworker_`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric, multiprocess
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from qworker.health.worker_report import WorkerReport
from qworker.message import QueueStats
from qworker.worker.metrics import SECONDS, TRIES, Feature, TaskCounts

__all__ = ["WorkerCollector", "format_metrics"]

_QUEUE = ("messaging_system", "messaging_destination_name")
_TASK = (*_QUEUE, "messaging_operation_name", "qworker_task")


class WorkerCollector(Collector):
    """A collector of prometheus-client for the reports of workers.

    Args:
        reports: The reports of the running worker processes.
        counts: The counts of all processes, including those that have ended, one for each queue and task.
        queues: The last sample of the queues.
    """

    def __init__(
        self, reports: Sequence[WorkerReport], counts: Sequence[TaskCounts], queues: Sequence[QueueStats]
    ) -> None:
        self._reports = reports
        self._counts = counts
        self._queues = queues

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a value."""
        counted = (*_counted(self._counts), *_featured(self._counts))
        for metric in (*counted, *_sampled(self._queues), *_running(self._reports)):
            if metric.samples:
                yield metric


def format_metrics(workers: WorkerCollector, *, own_metrics: bool, accept: str = "") -> tuple[bytes, str]:
    """Return the page of `/metrics` and its content type.

    Args:
        workers: The collector of the workers' metrics.
        own_metrics: Whether to add the metrics that the app defines with prometheus-client in this process. Otherwise
            the app runs in other processes. If they share their metrics in a directory, these are added.
        accept: The header `Accept` of the request.
    """
    registry = CollectorRegistry()
    registry.register(workers)
    if own_metrics:
        registry.register(REGISTRY)
    elif os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        # The class has no type hints.
        add_shared_metrics: Any = multiprocess.MultiProcessCollector
        add_shared_metrics(registry)
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        # A version in the header is not a number.
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


def _counted(counts: Sequence[TaskCounts]) -> Iterator[Metric]:
    consumed = CounterMetricFamily(
        "messaging_client_consumed_messages_total",
        "Finished deliveries by outcome: acked, retried, failed, released, lost, cancelled.",
        labels=(*_TASK, "qworker_outcome"),
    )
    duration = HistogramMetricFamily("messaging_process_duration_seconds", "Seconds that handlers ran.", labels=_TASK)
    tries = HistogramMetricFamily(
        "qworker_message_tries", "Failed attempts of messages before their final outcome.", labels=_TASK
    )
    lost = CounterMetricFamily(
        "qworker_leases_lost_total", "Leases that were lost before their outcome was stored.", labels=_TASK
    )
    for one in counts:
        if not any(one.outcomes.values()):
            # Only a feature has counted here, such as the ticks of a queue that other workers consume.
            continue
        labels = (*_on(one.queue), "process", one.task)
        for outcome, count in one.outcomes.items():
            if count:
                consumed.add_metric((*labels, outcome), count)
        duration.add_metric(labels, _buckets(SECONDS, one.durations), one.seconds)
        tries.add_metric(labels, _buckets(TRIES, one.tries), one.attempts)
        lost.add_metric(labels, one.lost)
    return iter((consumed, duration, tries, lost))


def _featured(counts: Sequence[TaskCounts]) -> Iterator[Metric]:
    ticks = CounterMetricFamily(
        "qworker_schedule_ticks_total",
        "Ticks of schedules by outcome: enqueued, or missed, which includes those that were skipped.",
        labels=(*_QUEUE, "qworker_outcome"),
    )
    results = CounterMetricFamily(
        "qworker_results_stored_total",
        "Results that were stored for callers, by outcome: done, failed, too_big, not_encodable.",
        labels=(*_TASK, "qworker_outcome"),
    )
    reports = CounterMetricFamily(
        "qworker_failure_reports_total",
        "Calls of on_failure by outcome: stored, or lost, because they can never be stored.",
        labels=(*_TASK, "qworker_outcome"),
    )
    releases = CounterMetricFamily(
        "qworker_releases_total",
        "Messages that were released for other workers, by reason: unknown_task, arguments.",
        labels=(*_TASK, "qworker_reason"),
    )
    of_tasks: dict[Feature, CounterMetricFamily] = {
        "results": results,
        "failure_reports": reports,
        "releases": releases,
    }
    for one in counts:
        # Copies: the event loop's thread may write to them.
        for outcome, count in one.features.get("ticks", {}).copy().items():
            ticks.add_metric((*_on(one.queue), outcome), count)
        for feature, metric in of_tasks.items():
            for value, count in one.features.get(feature, {}).copy().items():
                metric.add_metric((*_on(one.queue), "process", one.task, value), count)
    return iter((ticks, *of_tasks.values()))


def _sampled(queues: Sequence[QueueStats]) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "qworker_queue_depth",
        "Messages in the store, by state: ready, leased, delayed, failed.",
        labels=(*_QUEUE, "qworker_state"),
    )
    age = GaugeMetricFamily(
        "qworker_queue_oldest_age_seconds",
        "Seconds that the oldest ready message has waited. 0 if no message is ready.",
        labels=_QUEUE,
    )
    paused = GaugeMetricFamily("qworker_queue_paused", "1 if the queue is paused, else 0.", labels=_QUEUE)
    blocked = GaugeMetricFamily(
        "qworker_queue_blocked",
        "Messages whose files cannot be opened, read or moved, or are larger than max_body.",
        labels=_QUEUE,
    )
    for stats in queues:
        if stats.problem is not None:
            # Its counts are not known, and a missing value is not mistaken for an empty queue.
            continue
        labels = _on(stats.queue)
        for state in ("ready", "leased", "delayed", "failed"):
            depth.add_metric((*labels, state), getattr(stats, state))
        age.add_metric(labels, stats.oldest_age_s or 0.0)
        paused.add_metric(labels, stats.paused)
        blocked.add_metric(labels, stats.blocked)
    return iter((depth, age, paused, blocked))


def _running(reports: Sequence[WorkerReport]) -> Iterator[Metric]:
    looked = [report.looked_at for report in reports if report.looked_at is not None]
    yield GaugeMetricFamily("qworker_workers", "Running worker processes.", len(reports))
    yield GaugeMetricFamily("qworker_handlers_running", "Running handlers.", sum(r.running for r in reports))
    yield GaugeMetricFamily(
        "qworker_concurrency", "Maximum number of running handlers.", sum(r.concurrency for r in reports)
    )
    yield GaugeMetricFamily(
        "qworker_suspects",
        "Messages whose last attempt killed its process. They run apart from the others.",
        sum(r.suspects for r in reports),
    )
    yield GaugeMetricFamily(
        "qworker_loop_stalled_seconds",
        "Seconds that the event loop has been blocked, the longest of all workers.",
        max((r.stalled for r in reports), default=0.0),
    )
    yield GaugeMetricFamily(
        "qworker_backend_up",
        "1 if every worker reaches its backend, else 0.",
        bool(looked) and not any(r.problem for r in reports),
    )
    if looked:
        yield GaugeMetricFamily(
            "qworker_queue_stats_age_seconds",
            "Seconds since the queue was counted whose count is the oldest.",
            max(0.0, round(time.time() - max(looked), 3)),
        )


def _on(queue: str) -> tuple[str, str]:
    return "qworker", queue


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return the upper bounds as OpenMetrics writes them, with the number of values up to each."""
    return list(zip([*(str(float(bound)) for bound in bounds), "+Inf"], accumulate(counts), strict=True))
