"""The producer's half of a trace: a span for each enqueueing call, whose context is in the envelope.

As in `telemetry`, OpenTelemetry's API is used only if the application has set a tracer provider. An import of the API
says nothing, because libraries with instrumentation, such as redis-py, import it wherever it is installed. By the
messaging semantic conventions `enqueue` is a span `send QUEUE` of kind PRODUCER, and the span of the handler continues
it. If calls are enqueued together, each has a span `create QUEUE`, which the span of its handler continues, and each
batch has a span `send QUEUE` of kind CLIENT with links to them.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from qworker.failure_text import error_type

__all__ = [
    "NAME",
    "create_span",
    "get_provider",
    "is_tracing_configured",
    "on_queue",
    "send_batch_span",
    "send_span",
    "trace_headers",
]

# The name of the instrumentation and of the messaging system.
NAME = "qworker"

_API = "opentelemetry.trace"
_modules = sys.modules
_clock = time.monotonic
# Seconds for which "no provider" is not asked again. The question takes 1 us, as long as the rest of a call in a batch.
_ASK_AGAIN = 0.001
_ask_at = 0.0
_NOTHING: AbstractContextManager[Any] = nullcontext()
# The last provider's tracer, because creating one for each call would cost more than the span.
_tracers: dict[Any, Any] = {}


def is_tracing_configured() -> bool:
    """Return whether the application has set a tracer provider. Each call asks this, so it is cheap."""
    global _ask_at  # noqa: PLW0603 - a process has one provider
    if _API not in _modules or _clock() < _ask_at:
        return False
    if get_provider("trace", "get_tracer_provider") is not None:
        return True
    _ask_at = _clock() + _ASK_AGAIN
    return False


def trace_headers() -> Mapping[str, str]:
    """Return the headers that carry the current span to the handler. They are empty without a span."""
    if not is_tracing_configured():
        return {}
    trace: Any = _modules[_API]
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    importlib.import_module("opentelemetry.propagate").inject(carrier)
    return carrier


def get_provider(module: str, getter: str) -> Any:
    """Return the provider that the application has set, or None if it has set none."""
    api: Any = sys.modules.get(f"opentelemetry.{module}")
    if api is None:
        return None
    provider: Any = getattr(api, getter)()
    # The API's own providers are placeholders, or do nothing.
    return None if type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics")) else provider


def on_queue(queue: str) -> dict[str, str]:
    """Return the attributes of each span and instrument of a queue."""
    return {"messaging.system": NAME, "messaging.destination.name": queue}


def create_span(queue: str, task: str) -> AbstractContextManager[Any]:
    """Return the span in which a call of a batch is created. The block's value is None if tracing is not configured."""
    tracer = _tracer()
    return _NOTHING if tracer is None else _span(tracer, "create", "PRODUCER", queue, {"qworker.task": task})


def send_span(queue: str, task: str) -> AbstractContextManager[Any]:
    """Return the span in which one call is created and enqueued. The block's value is None as in `create_span`."""
    tracer = _tracer()
    return _NOTHING if tracer is None else _span(tracer, "send", "PRODUCER", queue, {"qworker.task": task})


def send_batch_span(queue: str, created: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return the span in which a batch is enqueued. The block's value is None as in `create_span`.

    Args:
        queue: The queue.
        created: The contexts of the calls' spans. None for a call that was created before tracing was configured.
    """
    tracer = _tracer()
    if tracer is None:
        return _NOTHING
    link: Any = _modules[_API].Link
    links = [link(context) for context in created if context is not None]
    return _span(tracer, "send", "CLIENT", queue, {"messaging.batch.message_count": len(created)}, links)


def _tracer() -> Any:
    """Return the application's tracer, or None if it has configured none."""
    provider = get_provider("trace", "get_tracer_provider")
    if provider is None:
        return None
    tracer = _tracers.get(provider)
    if tracer is None:
        _tracers.clear()
        tracer = _tracers[provider] = provider.get_tracer(NAME)
    return tracer


@contextmanager
def _span(
    tracer: Any, operation: str, kind: str, queue: str, more: Mapping[str, Any], links: Sequence[Any] = ()
) -> Generator[Any]:
    trace: Any = _modules[_API]
    attributes = {
        **on_queue(queue),
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        **more,
    }
    kind_of = getattr(trace.SpanKind, kind)
    with tracer.start_as_current_span(f"{operation} {queue}", kind=kind_of, attributes=attributes, links=links) as span:
        try:
            yield span
        except BaseException as error:
            span.set_attribute("error.type", error_type(error))
            raise
