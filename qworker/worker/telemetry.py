"""OpenTelemetry in a worker: instruments, and a span for each delivery in the trace of its enqueueing call.

Only the API is imported, and only if the application has configured an SDK. Otherwise a call costs one look-up, and a
message nothing. Names are those of the messaging semantic conventions where there are any, else `qworker.*`.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from qworker import log_events as events
from qworker.enqueue.tracing import NAME, get_provider, on_queue
from qworker.failure_text import error_type
from qworker.logs import one_line
from qworker.message import QueueStats
from qworker.worker.delivery import Delivery, Observer, Outcome
from qworker.worker.metrics import Feature, FeatureCounts, Metrics

__all__ = ["Meter", "Tracer", "flush", "observe_queues", "observers"]

_FLUSH_MS = 3000
# The maximum number of different exception classes, because a library can create classes at run time.
_MOST_ERROR_TYPES = 100
_OTHER = "_OTHER"
_ERRORS = {Outcome.RETRIED, Outcome.FAILED, Outcome.LOST}


def observers(features: FeatureCounts) -> list[Observer]:
    """Return the observers that feed OpenTelemetry. The list is empty if the application has not configured it.

    Args:
        features: The counts of the worker's features.
    """
    found: list[Observer] = []
    if (tracer_provider := get_provider("trace", "get_tracer_provider")) is not None:
        found.append(Tracer(tracer_provider))
    if (meter_provider := get_provider("metrics", "get_meter_provider")) is not None:
        found.append(Meter(meter_provider, features))
    return found


def observe_queues(look: Callable[[], Iterable[QueueStats]]) -> bool:
    """Register gauges for the depth and oldest age of queues. Return False if OpenTelemetry is not configured.

    Args:
        look: A function that returns the last sample of the queues. The thread of the metrics reader calls it.
    """
    provider = get_provider("metrics", "get_meter_provider")
    if provider is None:
        return False
    observation: Any = importlib.import_module("opentelemetry.metrics").Observation

    def usable() -> Iterator[QueueStats]:
        return (stats for stats in look() if stats.problem is None)

    def depths(_options: Any) -> Iterator[Any]:
        for stats in usable():
            for state in ("ready", "leased", "delayed", "failed"):
                yield observation(getattr(stats, state), {**on_queue(stats.queue), "qworker.state": state})

    def ages(_options: Any) -> Iterator[Any]:
        for stats in usable():
            yield observation(stats.oldest_age_s or 0.0, on_queue(stats.queue))

    meter = provider.get_meter(NAME)
    meter.create_observable_gauge("qworker.queue.depth", [depths], "{message}", "Messages in the store, by state.")
    meter.create_observable_gauge(
        "qworker.queue.oldest_age", [ages], "s", "How long the oldest ready message has waited."
    )
    return True


def flush() -> None:
    """Export collected spans and metrics, before the process replaces itself or ends without its exit handlers.

    The call takes a few seconds at most, even if an exporter waits longer for its collector.
    """
    providers = [get_provider("trace", "get_tracer_provider"), get_provider("metrics", "get_meter_provider")]
    flushes = [f for f in (getattr(provider, "force_flush", None) for provider in providers) if f is not None]
    if flushes:
        thread = threading.Thread(target=lambda: [f(_FLUSH_MS) for f in flushes], name="qworker-flush", daemon=True)
        thread.start()
        thread.join(_FLUSH_MS / 1000)


class Tracer:
    """An `Observer` that creates a span for each attempt, as a child of the span that enqueued the call."""

    def __init__(self, provider: Any) -> None:
        self._trace: Any = importlib.import_module("opentelemetry.trace")
        self._context: Any = importlib.import_module("opentelemetry.context")
        self._extract: Any = importlib.import_module("opentelemetry.propagate").extract
        self._tracer: Any = provider.get_tracer(NAME)
        # Each span has the Unix nanoseconds of its start.
        self._spans: dict[Delivery, tuple[Any, int]] = {}

    def handler_started(self, delivery: Delivery) -> None:
        """Start the span, and make it the current span of the handler."""
        message = delivery.lease.message
        # The parent is not from the consumer's context, which still has the previous message.
        parent: Any = self._extract(delivery.headers or {}, context=self._context.Context())
        creation: Any = self._trace.get_current_span(parent).get_span_context()
        now = time.time_ns()
        span = self._tracer.start_span(
            f"process {message.queue}",
            context=parent,
            kind=self._trace.SpanKind.CONSUMER,
            start_time=now,
            links=[self._trace.Link(creation)] if creation.is_valid else (),
            attributes={
                **on_queue(message.queue),
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.message.id": message.id,
                "messaging.message.body.size": len(message.body),
                "qworker.task": delivery.task,
                "qworker.tries": message.tries,
            },
        )
        self._spans[delivery] = span, now
        # The handler gets a copy of this context. The next message replaces it.
        self._context.attach(self._trace.set_span_in_context(span, parent))
        context: Any = span.get_span_context()
        delivery.trace = {
            events.TRACE_ID: self._trace.format_trace_id(context.trace_id),
            events.SPAN_ID: self._trace.format_span_id(context.span_id),
        }

    def message_settled(self, delivery: Delivery, outcome: Outcome, error: str | None, duration: float) -> None:
        """End the span at the time when the handler ended, with the outcome that the store accepted."""
        span, began = self._spans.pop(delivery, (None, 0))
        if span is None:
            return
        span.set_attribute("qworker.outcome", str(outcome))
        if outcome in _ERRORS:
            if delivery.error is not None:
                span.set_attribute("error.type", error_type(delivery.error))
            span.set_status(self._trace.StatusCode.ERROR, one_line(error or ""))
        span.end(end_time=began + round(duration * 1e9))


class Meter:
    """An `Observer` that feeds instruments. The counters are read only when they are collected.

    Args:
        provider: The provider of meters.
        features: The counts of the worker's features.
    """

    def __init__(self, provider: Any, features: FeatureCounts) -> None:
        self._counts = Metrics()
        self._features = features
        self._observation: Any = importlib.import_module("opentelemetry.metrics").Observation
        self._attributes: dict[tuple[str, str, str], dict[str, str]] = {}
        self._error_types: set[str] = set()
        meter = provider.get_meter(NAME)
        meter.create_observable_counter(
            "messaging.client.consumed.messages", [self._consumed], "{message}", "Messages that left the worker."
        )
        meter.create_observable_counter(
            "qworker.leases_lost", [self._lost], "{lease}", "Leases that were lost before their outcome was stored."
        )
        meter.create_observable_counter(
            "qworker.schedule.ticks", [self._count("ticks", "qworker.outcome")], "{tick}", "Ticks of schedules."
        )
        meter.create_observable_counter(
            "qworker.results_stored",
            [self._count("results", "qworker.outcome")],
            "{result}",
            "Results that were stored for callers.",
        )
        meter.create_observable_counter(
            "qworker.failure_reports",
            [self._count("failure_reports", "qworker.outcome")],
            "{call}",
            "Calls of on_failure.",
        )
        meter.create_observable_counter(
            "qworker.releases",
            [self._count("releases", "qworker.reason")],
            "{message}",
            "Messages that were released for other workers.",
        )
        self._duration: Any = meter.create_histogram(
            "messaging.process.duration", "s", "Duration of processing operation."
        )
        self._tries: Any = meter.create_histogram(
            "qworker.message.tries", "{try}", "Failed attempts that messages had behind them at their final outcome."
        )

    def handler_started(self, delivery: Delivery) -> None:
        """Do nothing: deliveries are measured when they end."""

    def message_settled(self, delivery: Delivery, outcome: Outcome, error: str | None, duration: float) -> None:
        """Measure a message that has left the worker."""
        self._counts.message_settled(delivery, outcome, error, duration)
        handler = delivery.handler
        queue = delivery.lease.message.queue
        problem = self._error_type(delivery) if delivery.error is not None and outcome in _ERRORS else ""
        key = (queue, "" if handler is None else handler.name, problem)
        attributes = self._attributes.get(key)
        if attributes is None:
            attributes = self._attributes[key] = self._labels(*key)
        if delivery.started:
            self._duration.record(duration, attributes)
        if outcome is Outcome.ACKED or outcome is Outcome.FAILED:
            self._tries.record(delivery.lease.message.tries, attributes)

    def _error_type(self, delivery: Delivery) -> str:
        name = error_type(delivery.error)
        if name not in self._error_types:
            if len(self._error_types) >= _MOST_ERROR_TYPES:
                return _OTHER
            self._error_types.add(name)
        return name

    def _labels(self, queue: str, task: str, problem: str) -> dict[str, str]:
        labels = {**on_queue(queue), "messaging.operation.name": "process", "qworker.task": task}
        return {**labels, "error.type": problem} if problem else labels

    def _consumed(self, _options: Any) -> Iterator[Any]:
        for cell in self._counts.counts():
            for outcome, count in cell.outcomes.items():
                if count:
                    yield self._observation(
                        count, {**self._labels(cell.queue, cell.task, ""), "qworker.outcome": outcome}
                    )

    def _count(self, feature: Feature, label: str) -> Callable[[Any], Iterator[Any]]:
        """Return the callback of a feature's counter."""

        def observe(_options: Any) -> Iterator[Any]:
            for one in self._features.counts():
                shared = on_queue(one.queue) if feature == "ticks" else self._labels(one.queue, one.task, "")
                for value, count in one.features.get(feature, {}).copy().items():
                    yield self._observation(count, {**shared, label: value})

        return observe

    def _lost(self, _options: Any) -> Iterator[Any]:
        for cell in self._counts.counts():
            yield self._observation(cell.lost, self._labels(cell.queue, cell.task, ""))
