"""Counts, spans and log fields of a worker, with a real OpenTelemetry SDK that keeps what it gets."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qworker import Context, Fail, FailedCall, Message, Retry, Tasks, logs
from qworker.enqueue import tracing
from qworker.errors import StorageFull
from qworker.message import Lease, QueueStats
from qworker.retry import Backoff
from qworker.worker import Worker, WorkerOptions, telemetry
from qworker.worker.delivery import Delivery, Outcome
from qworker.worker.metrics import SECONDS, FeatureCounts, Metrics


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_ask_at", 0.0)
    yield kept
    provider.shutdown()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    kept = InMemoryMetricReader()
    provider = MeterProvider([kept], shutdown_on_exit=False)
    monkeypatch.setattr(sys.modules["opentelemetry.metrics._internal"], "_METER_PROVIDER", provider)
    yield kept
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


_NAMES = itertools.count()


def app() -> Tasks:
    tasks = Tasks(f"memory://telemetry-{next(_NAMES)}")

    @tasks.task(retry=Backoff(initial=0.001, maximum=0.001))
    async def shaky(context: Context) -> None:
        if context.tries == 0:
            raise Retry("not yet")
        context.log.info("inside")

    @tasks.task
    def threaded() -> None:
        structlog.get_logger().info("in a thread")

    @tasks.task
    async def hopeless() -> None:
        raise Fail("no way")

    @tasks.task
    async def parent() -> None:
        await tasks["threaded"].enqueue()

    return tasks


async def work(tasks: Tasks, **more: Any) -> Worker:
    worker = Worker(tasks, WorkerOptions(burst=True, concurrency=4), **more)
    assert await worker.run()
    return worker


def by_name(
    spans: InMemorySpanExporter, task: str, kind: trace.SpanKind = trace.SpanKind.CONSUMER
) -> list[ReadableSpan]:
    return [
        s for s in spans.get_finished_spans() if (s.attributes or {}).get("qworker.task") == task and s.kind is kind
    ]


def of_kind(spans: InMemorySpanExporter, kind: trace.SpanKind) -> list[ReadableSpan]:
    return [s for s in spans.get_finished_spans() if s.kind is kind]


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def test_enqueueing_and_running_are_one_trace(spans: InMemorySpanExporter) -> None:
    tasks = app()
    with trace.get_tracer("test").start_as_current_span("request") as request:
        await tasks["parent"].enqueue()
    await work(tasks)
    await tasks.aclose()
    (sent,) = by_name(spans, "parent", trace.SpanKind.PRODUCER)
    (run,) = by_name(spans, "parent")
    (sent_on,) = by_name(spans, "threaded", trace.SpanKind.PRODUCER)
    (child,) = by_name(spans, "threaded")
    chain = [request, sent, run, sent_on, child]
    assert {span.get_span_context().trace_id for span in chain} == {request.get_span_context().trace_id}
    for above, below in itertools.pairwise(chain):
        assert parent_of(below) == above.get_span_context().span_id
    assert (run.name, sent.name) == ("process default", "send default")
    assert [link.context.span_id for link in run.links] == [sent.context.span_id]
    assert dict(sent.attributes or {}) == {
        "messaging.system": "qworker",
        "messaging.destination.name": "default",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.id": (run.attributes or {})["messaging.message.id"],
        "messaging.message.body.size": (run.attributes or {})["messaging.message.body.size"],
        "qworker.task": "parent",
    }
    assert (run.attributes or {})["messaging.destination.name"] == "default"


async def test_calls_that_are_enqueued_together_have_a_span_each_and_one_for_the_batch(
    spans: InMemorySpanExporter,
) -> None:
    tasks = app()
    with trace.get_tracer("test").start_as_current_span("request") as request:
        await tasks.enqueue_many(tasks["threaded"].call() for _ in range(3))
    await work(tasks)
    await tasks.aclose()
    created = by_name(spans, "threaded", trace.SpanKind.PRODUCER)
    assert [span.name for span in created] == ["create default"] * 3
    (sent,) = of_kind(spans, trace.SpanKind.CLIENT)
    assert (sent.name, (sent.attributes or {})["messaging.batch.message_count"]) == ("send default", 3)
    ids = {span.context.span_id for span in created}
    assert len(ids) == 3
    assert {link.context.span_id for link in sent.links} == ids
    assert {parent_of(span) for span in (*created, sent)} == {request.get_span_context().span_id}
    runs = by_name(spans, "threaded")
    assert {parent_of(run) for run in runs} == ids
    assert {run.context.trace_id for run in runs} == {request.get_span_context().trace_id}


def test_enqueueing_without_a_loop_is_in_the_callers_trace(spans: InMemorySpanExporter) -> None:
    tasks = Tasks(f"memory://telemetry-{next(_NAMES)}")

    @tasks.task
    def quiet() -> None: ...

    with trace.get_tracer("test").start_as_current_span("request") as request:
        job = quiet.enqueue_sync()
        tasks.enqueue_many_sync([quiet.call()])
    (first, second), (batch,) = of_kind(spans, trace.SpanKind.PRODUCER), of_kind(spans, trace.SpanKind.CLIENT)
    assert (first.name, second.name, batch.name) == ("send default", "create default", "send default")
    assert (first.attributes or {})["messaging.message.id"] == job.id
    assert {parent_of(span) for span in (first, second, batch)} == {request.get_span_context().span_id}


async def test_a_call_that_could_not_be_enqueued_is_an_error_in_the_trace(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = app()
    backend = await tasks.backend()

    async def full(queue: str, drafts: object) -> list[str]:
        raise StorageFull("no space is left")

    monkeypatch.setattr(backend, "publish", full)
    with pytest.raises(StorageFull):
        await tasks["threaded"].enqueue()
    with pytest.raises(StorageFull):
        await tasks.enqueue_many([tasks["threaded"].call()])
    await tasks.aclose()
    sent = [span for span in spans.get_finished_spans() if span.name == "send default"]
    assert [(span.status.status_code, (span.attributes or {})["error.type"]) for span in sent] == [
        (trace.StatusCode.ERROR, "StorageFull")
    ] * 2


async def test_each_try_is_a_span_with_its_outcome(spans: InMemorySpanExporter) -> None:
    tasks = app()
    with trace.get_tracer("test").start_as_current_span("request"):
        await tasks["shaky"].enqueue()
    await tasks["hopeless"].enqueue()
    await work(tasks)
    await tasks.aclose()
    first, second = by_name(spans, "shaky")
    assert [(s.attributes or {})["qworker.outcome"] for s in (first, second)] == ["retried", "acked"]
    assert first.context.trace_id == second.context.trace_id
    (failed,) = by_name(spans, "hopeless")
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "Fail"
    (sent,) = by_name(spans, "hopeless", trace.SpanKind.PRODUCER)
    assert sent.parent is None, "a call that was enqueued outside of a trace must not join its neighbour's"
    assert failed.context.trace_id == sent.context.trace_id != first.context.trace_id


async def test_log_lines_name_their_span(spans: InMemorySpanExporter, capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    logs.configure(json=True)
    try:
        tasks = app()
        for name in ("shaky", "threaded", "hopeless"):
            await tasks[name].enqueue()
        await work(tasks)
        await tasks.aclose()
    finally:
        structlog.configure(**before)
        logs._configured.clear()
    lines = {line["event"]: line for line in map(json.loads, capsys.readouterr().err.splitlines())}
    for event, task in (("inside", "shaky"), ("in a thread", "threaded"), ("message_failed", "hopeless")):
        context = by_name(spans, task)[-1].context
        assert lines[event]["trace_id"] == trace.format_trace_id(context.trace_id)
        assert lines[event]["span_id"] == trace.format_span_id(context.span_id)
    assert "trace_id" not in lines["worker_stopped"]


async def test_instruments_have_bounded_attributes(reader: InMemoryMetricReader) -> None:
    tasks = app()
    assert telemetry.observe_queues(lambda: [QueueStats(queue="default", ready=7, oldest_age_s=2.5)])
    for name in ("shaky", "threaded", "hopeless"):
        await tasks[name].enqueue()
    await work(tasks)
    await tasks.aclose()
    found = points(reader)
    consumed = {
        (p.attributes["qworker.task"], p.attributes["qworker.outcome"]): p.value
        for p in found["messaging.client.consumed.messages"]
    }
    assert consumed == {
        ("shaky", "retried"): 1,
        ("shaky", "acked"): 1,
        ("threaded", "acked"): 1,
        ("hopeless", "failed"): 1,
    }
    assert sum(p.count for p in found["messaging.process.duration"]) == 4
    assert {p.attributes.get("error.type") for p in found["messaging.process.duration"]} == {None, "Retry", "Fail"}
    assert sum(p.sum for p in found["qworker.message.tries"]) == 1
    assert {p.attributes["qworker.state"]: p.value for p in found["qworker.queue.depth"]}["ready"] == 7
    assert found["qworker.queue.oldest_age"][0].value == 2.5
    known = {
        *("messaging.system", "messaging.destination.name", "messaging.operation.name"),
        *("qworker.task", "qworker.outcome", "qworker.state", "error.type"),
    }
    assert {name for group in found.values() for point in group for name in point.attributes} <= known


async def test_what_the_features_of_an_app_do_is_counted_if_it_is_used(reader: InMemoryMetricReader) -> None:
    tasks = app()

    @tasks.task
    async def alert(_failed: FailedCall) -> None: ...

    @tasks.task(result=60, on_failure=alert)
    async def kept() -> int:
        raise Fail("no way")

    await kept.enqueue()
    await work(tasks)
    await tasks.aclose()
    found = points(reader)
    # Nothing else was used.
    assert {name for name in found if name.startswith("qworker.")} == {
        *("qworker.leases_lost", "qworker.message.tries", "qworker.results_stored", "qworker.failure_reports")
    }
    for name, outcome in (("qworker.results_stored", "failed"), ("qworker.failure_reports", "stored")):
        (point,) = found[name]
        assert (point.attributes["qworker.task"], point.attributes["qworker.outcome"], point.value) == (
            "kept",
            outcome,
            1,
        )


def a_delivery(tasks: Tasks, task: str | None, error: BaseException | None = None) -> Delivery:
    message = Message(id="1", queue="default", body=b"", tries=2)
    delivery = Delivery(Lease(message=message, token=1, expires_at=0.0), 0.0, 0.0)
    delivery.handler, delivery.error, delivery.started = (tasks[task] if task else None), error, 1.0
    return delivery


def test_error_types_and_unknown_tasks_make_no_new_series(reader: InMemoryMetricReader) -> None:
    tasks = app()
    meter = next(o for o in telemetry.observers(FeatureCounts()) if isinstance(o, telemetry.Meter))
    for number in range(300):
        error = type(f"Error{number}", (Exception,), {})()
        meter.message_settled(a_delivery(tasks, "hopeless", error), Outcome.FAILED, "", 0.5)
        stranger = a_delivery(tasks, None)
        stranger.task = f"stranger-{number}"
        meter.message_settled(stranger, Outcome.RELEASED, None, 0.0)
    types = {p.attributes.get("error.type") for p in points(reader)["messaging.process.duration"]}
    assert len(types - {None}) == 101
    assert "_OTHER" in types
    assert len(meter._counts.counts()) == 2


def test_counts_come_in_buckets() -> None:
    tasks, counts = app(), Metrics()
    for duration in (0.0005, SECONDS[0], 2.0, 1e6):
        counts.message_settled(a_delivery(tasks, "hopeless"), Outcome.ACKED, None, duration)
    for outcome in (Outcome.RETRIED, Outcome.RELEASED, Outcome.LOST, Outcome.CANCELLED):
        counts.message_settled(a_delivery(tasks, "hopeless"), outcome, None, 0.2)
    (cell,) = counts.counts()
    assert cell.outcomes == {"acked": 4, "retried": 1, "failed": 0, "released": 1, "lost": 1, "cancelled": 1}
    assert (cell.durations[0], cell.durations[-1], sum(cell.durations)) == (2, 1, 8)
    assert (sum(cell.tries), cell.attempts) == (4, 8)


async def test_nothing_is_traced_or_measured_without_an_sdk() -> None:
    assert telemetry.observers(FeatureCounts()) == []
    assert not telemetry.observe_queues(list)
    telemetry.flush()
    tasks = app()
    assert tasks._collect_headers({"a": "b"}) == {"a": "b"}
    assert b"headers" not in tasks["hopeless"].call().draft.body
    assert tasks["hopeless"].call().span_context is None
    await tasks["threaded"].enqueue()
    worker = await work(tasks)
    await tasks.aclose()
    assert worker.observers == []
    assert worker.counts.acked == 1


def test_calls_look_for_no_span_while_the_api_is_imported_but_has_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    asked: list[float] = []
    providers: list[Any] = [trace.ProxyTracerProvider()]

    def get_tracer_provider() -> Any:
        asked.append(now)
        return providers[-1]

    with monkeypatch.context() as patched:
        patched.setattr(tracing, "_clock", lambda: now)
        patched.setattr(tracing, "_ask_at", 0.0)
        patched.setattr(trace, "get_tracer_provider", get_tracer_provider)
        patched.setattr(trace, "get_current_span", lambda: pytest.fail("a span was looked for"))
        task = app()["hopeless"]
        assert [task.call().span_context for _ in range(500)] == [None] * 500
        assert asked == [now]
    with monkeypatch.context() as patched:
        now += 0.002
        providers.append(TracerProvider(shutdown_on_exit=False))
        patched.setattr(tracing, "_clock", lambda: now)
        patched.setattr(tracing, "_ask_at", 1000.001)
        patched.setattr(trace, "get_tracer_provider", get_tracer_provider)
        assert app()["hopeless"].call().span_context is not None


def test_a_collector_that_is_away_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, never = threading.Event(), threading.Event()

    class Stuck(TracerProvider):
        def force_flush(self, timeout_millis: int = 0) -> bool:
            entered.set()
            return never.wait(50)

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Stuck(shutdown_on_exit=False))
    monkeypatch.setattr(telemetry, "_FLUSH_MS", 50)
    try:
        telemetry.flush()
        assert entered.wait(30)
        assert not never.is_set()
    finally:
        never.set()
