"""The hooks of docs/howto/hooks.md with the real SDKs of Sentry and OpenTelemetry, and with Django's connections."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from qworker import Fail, Retry
from qworker.enqueue import tracing
from qworker.worker import Worker, WorkerOptions
from tests.support.pages import blocks
from tests.unit.conftest import App
from tests.unit.test_hooks import _import


def _block(file: str) -> str:
    return next(block.text for block in blocks("docs/howto/hooks.md") if block.file == file)


def _module(file: str) -> ModuleType:
    module = ModuleType(file.removesuffix(".py"))
    exec(compile(_block(file), file, "exec"), vars(module))
    return module


class Kept(Transport):
    """Keeps what the SDK sends."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        event = envelope.get_event()
        if event is not None:
            self.events.append(event)


@pytest.fixture
def sentry() -> Iterator[Kept]:
    kept = Kept()
    sentry_sdk.init("https://key@sentry.example/1", transport=kept, default_integrations=False)
    yield kept
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_sentry_gets_each_error_once_with_its_message(sentry: Kept, kind: str) -> None:
    app = App(hooks=[_module("sentry_hook.py").Sentry()])

    def run(what: str) -> None:
        if what == "retry":
            raise Retry(delay=1000)
        if what == "fail":
            raise Fail("not allowed")
        if what == "error":
            raise ValueError("no luck")

    async def run_async(what: str) -> None:
        run(what)

    task = app.task(max_tries=1, name="work")(run if kind == "thread" else run_async)
    retried = app.task(max_tries=2, name="retried")(run if kind == "thread" else run_async)
    await retried.enqueue("retry")
    await task.enqueue("good")
    ids = {(await task.enqueue(what)).id for what in ("fail", "error")}
    await app.burst()
    assert {event["contexts"]["message"]["id"] for event in sentry.events} == ids
    assert {event["exception"]["values"][-1]["type"] for event in sentry.events} == {"Fail", "ValueError"}
    assert [event["tags"] for event in sentry.events] == [{"task": "work", "queue": "default"}] * 2
    # Nothing of a message is left for what runs next.
    sentry_sdk.capture_message("afterwards")
    assert "tags" not in sentry.events[-1] or "task" not in sentry.events[-1]["tags"]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_ask_at", 0.0)
    yield kept
    provider.shutdown()


async def test_a_hook_adds_to_the_span_of_an_attempt(spans: InMemorySpanExporter) -> None:
    app = App(hooks=[_module("tracing_hook.py").Spans()])

    @app.task
    async def loop() -> None: ...

    @app.task
    def thread() -> None: ...

    await loop.enqueue()
    await thread.enqueue()
    await app.burst()
    found = [span for span in spans.get_finished_spans() if span.name == "process default"]
    assert [dict(span.attributes or {})["shop.attempt"] for span in found] == [1, 1]


CHILD = """
import json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from qworker import Tasks

class ToFile(SpanExporter):
    def export(self, spans):
        with open(FILE, "a") as file:
            for span in spans:
                print(json.dumps([span.name, f"{span.context.trace_id:032x}"]), file=file)
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
if __name__ == CHILD_NAME and not HERE:
    trace.set_tracer_provider(provider)

tasks = Tasks("memory://spans-child", hooks=[Spans()])

@tasks.task(process=True)
def work() -> None: ...
"""


async def test_a_hook_continues_the_trace_in_the_process_of_a_handler(
    spans: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans"
    here = (
        f"import os\nHERE = os.getpid() == {__import__('os').getpid()}\nFILE = {str(file)!r}\nCHILD_NAME = __name__\n"
    )
    app: Any = _import("spans_child", _block("tracing_hook.py") + here + CHILD, tmp_path, monkeypatch)
    await app.work.enqueue()
    await Worker(app.tasks, WorkerOptions(burst=True)).run()
    (sent,) = [span for span in spans.get_finished_spans() if span.name == "send default"]
    ((name, trace_id),) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (name, trace_id) == ("run work", f"{sent.context.trace_id:032x}")


async def test_djangos_connections_are_closed_in_the_thread_of_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    module = _module("connections.py")
    closed: list[int] = []
    module.close_old_connections = lambda: closed.append(threading.get_ident())  # type: ignore[attr-defined]
    app = App(hooks=[module.FreshConnections()])
    ran: list[int] = []

    @app.task
    def work() -> None:
        ran.append(threading.get_ident())

    @app.task
    async def loop() -> None: ...

    await work.enqueue()
    await loop.enqueue()
    await app.burst()
    assert closed == ran * 2
    assert "sentry_sdk" in sys.modules
