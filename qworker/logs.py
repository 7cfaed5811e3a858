"""Logging: structlog, lines for people on a terminal and JSON everywhere else, always to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import structlog

from qworker import events
from qworker.errors import UsageError
from qworker.failure import summary
from qworker.names import printable
from qworker.streams import ERROR_STREAM

__all__ = ["configure", "configured", "debug_enabled", "one_line"]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_LONGEST_LINE = 500

_configured: list[tuple[bool | None, str]] = []


def configure(json: bool | None = None, level: str = "info") -> None:
    """Set structlog up for this process.

    Args:
        json: JSON lines; None: unless stderr is a terminal.
        level: the lowest level that is shown: debug, info, warning, error or critical.

    Raises:
        UsageError: no such level.
    """
    number = _LEVELS.get(level.lower())
    if number is None:
        raise UsageError(f"no log level {printable(level)!r}: use one of {', '.join(_LEVELS)}")
    as_json = not sys.stderr.isatty() if json is None else json
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_trace,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _strip_controls,
            structlog.processors.JSONRenderer(serializer=_to_json) if as_json else _console(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=ERROR_STREAM),
        cache_logger_on_first_use=False,
    )
    _configured[:] = [(json, level)]


def configured() -> tuple[bool | None, str] | None:
    """The arguments of the last `configure`, for handlers' processes to do the same; None: it was not called."""
    return _configured[0] if _configured else None


def debug_enabled() -> bool:
    """Whether debug lines are shown. An application that never set structlog up gets none per message from a worker."""
    if not structlog.is_configured():
        return False
    return bool(structlog.get_logger().is_enabled_for(logging.DEBUG))


def one_line(text: str) -> str:
    """What went wrong, short and printable: see `failure.summary`."""
    return printable(summary(text)[:_LONGEST_LINE])


def _console() -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)


def _add_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The current span's ids, where the application has OpenTelemetry at all."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is not None and events.TRACE_ID not in event:
        span = trace.get_current_span()
        if span.is_recording():
            context = span.get_span_context()
            event[events.TRACE_ID] = trace.format_trace_id(context.trace_id)
            event[events.SPAN_ID] = trace.format_span_id(context.span_id)
    return event


def _strip_controls(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    # What comes from messages must not draw on the terminal, nor begin a new line that looks like another event.
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and name != "exception":
            event[name] = printable(value)
        elif name == "exception" and isinstance(value, str):
            event[name] = "\n".join(printable(line) for line in value.split("\n"))
    return event


def _to_json(event: Mapping[str, Any], **_options: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
