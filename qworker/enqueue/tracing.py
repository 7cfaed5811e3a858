"""The producer's half of a trace: a span for each enqueueing call, whose context travels in the envelope.

As in `telemetry`, only OpenTelemetry's API is imported, and only where the application has configured an SDK: otherwise a call costs
one look-up. By the messaging semantic conventions `enqueue` is a span `send QUEUE` of kind PRODUCER, and the run continues it. Of
calls that are enqueued together each has a span `create QUEUE`, which its run continues, and each batch a span `send QUEUE` of kind
CLIENT, with links to them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from qworker.failure_text import error_type

__all__ = [
    "NAME",
    "create_span",
    "get_provider",
    "is_tracing_possible",
    "on_queue",
    "send_batch_span",
    "send_span",
    "trace_headers",
]

# The instrumentation's, and the messaging system's.
NAME = "qworker"

_API = "opentelemetry.trace"
_modules = sys.modules
_NOTHING: AbstractContextManager[Any] = nullcontext()
# The last provider's tracer: making one for each call would cost more than the span.
_tracers: dict[Any, Any] = {}


def is_tracing_possible() -> bool:
    """Whether somebody may trace: the cheapest question, asked for each call."""
    return _API in _modules


def trace_headers() -> Mapping[str, str]:
    """What carries the current span to the handler; empty without one."""
    if _API not in _modules:
        return {}
    trace: Any = _modules[_API]
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    importlib.import_module("opentelemetry.propagate").inject(carrier)
    return carrier


def get_provider(module: str, getter: str) -> Any:
    """The provider that the application has set; None: it has set none, and what the API hands out does nothing."""
    api: Any = sys.modules.get(f"opentelemetry.{module}")
    if api is None:
        return None
    provider: Any = getattr(api, getter)()
    # The API's own providers stand in for one, or do nothing.
    return None if type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics")) else provider


def on_queue(queue: str) -> dict[str, str]:
    """The attributes that everything about a queue has."""
    return {"messaging.system": NAME, "messaging.destination.name": queue}


def create_span(queue: str, task: str) -> AbstractContextManager[Any]:
    """The span in which a call is made that is enqueued with others; the block's value is it, or None where nobody traces."""
    tracer = _tracer()
    return _NOTHING if tracer is None else _span(tracer, "create", "PRODUCER", queue, {"qworker.task": task})


def send_span(queue: str, task: str) -> AbstractContextManager[Any]:
    """The span in which one call is made and enqueued; None where nobody traces."""
    tracer = _tracer()
    return _NOTHING if tracer is None else _span(tracer, "send", "PRODUCER", queue, {"qworker.task": task})


def send_batch_span(queue: str, created: Sequence[Any]) -> AbstractContextManager[Any]:
    """The span in which a batch is enqueued; None where nobody traces.

    Args:
        queue: where to.
        created: the contexts of the spans of `create_span`, one for each call; None for one that was made before anybody traced.
    """
    tracer = _tracer()
    if tracer is None:
        return _NOTHING
    link: Any = _modules[_API].Link
    links = [link(context) for context in created if context is not None]
    return _span(tracer, "send", "CLIENT", queue, {"messaging.batch.message_count": len(created)}, links)


def _tracer() -> Any:
    """The application's tracer; None: it traces nothing."""
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
