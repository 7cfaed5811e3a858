"""Logging with structlog to standard error: one line for each event on a terminal, JSON everywhere else.

A line for a terminal has the time of day, the level, the event, the task and the id of the message, then the other
fields. Logs of the app's own code, from structlog or from the standard library, have the same form. Logs of a handler
also have the fields of its message.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec
import structlog

from qworker import log_events as events
from qworker.errors import UsageError
from qworker.failure_text import summary, summary_of
from qworker.names import printable
from qworker.streams import ERROR_STREAM, is_terminal

__all__ = [
    "RUNNING",
    "Running",
    "WorkerLog",
    "add_message",
    "configure",
    "configured",
    "debug_enabled",
    "one_line",
    "show_standard_logging",
]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_LONGEST_LINE = 500
# The column of the event on a terminal: the longest name of an event of a message.
_EVENT_WIDTH = 17
# On a terminal, the error is before the other fields, and the fields that say nothing about the event are at the end.
_RANKS = {events.ERROR: -1, events.TOKEN: 1, events.WORKER: 2}
# Loggers of libraries that qworker itself uses. The app did not ask for their debug and info lines.
_QUIET = ("asyncio", "watchfiles")

_configured: list[tuple[bool | None, str]] = []


class Running(Protocol):
    """A message whose handler runs."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the message for a log line."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the handler has ended. Code that still runs in a copy of its context belongs to no message."""
        ...


# The message of a handler's context. The tasks and threads that the handler starts inherit the context.
RUNNING: ContextVar[Running | None] = ContextVar("qworker_running", default=None)


def configure(json: bool | None = None, level: str = "info") -> None:
    """Configure structlog for this process.

    Args:
        json: Whether to write JSON lines. None: if standard error is not a terminal.
        level: The lowest level that is shown: debug, info, warning, error or critical.

    Raises:
        UsageError: The level is not valid.
    """
    number = _number(level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_message,
            _add_trace,
            structlog.processors.add_log_level,
            _time(json),
            structlog.processors.format_exc_info,
            _strip_controls,
            *_renderers(json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=ERROR_STREAM),
        cache_logger_on_first_use=False,
    )
    _configured[:] = [(json, level)]


def show_standard_logging(json: bool | None = None, level: str = "info") -> None:
    """Show logs of the standard library in the form that `configure` sets.

    Call it after the app is imported. If the app has added handlers to the root logger, this adds none.
    """
    root, number = logging.getLogger(), _number(level)
    if root.handlers:
        return
    handler = logging.StreamHandler(ERROR_STREAM)
    handler.setLevel(number)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.contextvars.merge_contextvars,
                add_message,
                _add_trace,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.add_log_level,
                structlog.stdlib.ExtraAdder(),
                _time(json),
                structlog.processors.format_exc_info,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _strip_controls,
                *_renderers(json),
            ],
        )
    )
    root.addHandler(handler)
    if root.level == logging.WARNING:
        # This is the level that Python sets, so the app has not chosen one.
        root.setLevel(number)
    for name in _QUIET:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(max(number, logging.WARNING))


def _number(level: str) -> int:
    number = _LEVELS.get(level.lower())
    if number is None:
        raise UsageError(f"{printable(level)!r} is not a log level: use one of {', '.join(_LEVELS)}")
    return number


def configured() -> tuple[bool | None, str] | None:
    """Return the arguments of the last `configure`, for the processes of handlers. None: it was not called."""
    return _configured[0] if _configured else None


def debug_enabled() -> bool:
    """Return whether debug lines are shown. If structlog is not configured, they are not."""
    if not structlog.is_configured():
        return False
    return bool(structlog.get_logger().is_enabled_for(logging.DEBUG))


def one_line(text: str) -> str:
    """Return a short, printable summary of an error text. See `failure_text.summary`."""
    return printable(summary(text)[:_LONGEST_LINE])


class WorkerLog:
    """The logger of a worker. If a processor of the app raises, the line is lost and the worker continues."""

    def __init__(self, log: Any) -> None:
        self._log = log

    def bind(self, **fields: Any) -> WorkerLog:
        """Return a logger with more fields."""
        return WorkerLog(self._log.bind(**fields))

    def debug(self, event: str, **fields: Any) -> None:
        """Log an event at level debug."""
        self._say(self._log.debug, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log an event at level info."""
        self._say(self._log.info, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log an event at level warning."""
        self._say(self._log.warning, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log an event at level error."""
        self._say(self._log.error, event, fields)

    def _say(self, say: Any, event: str, fields: dict[str, Any]) -> None:
        try:
            say(event, **fields)
        except Exception as problem:  # noqa: BLE001 - the app's own logging must not stop the work
            ERROR_STREAM.write(f"qworker: a log line is lost ({event}): {printable(summary_of(problem))}\n")


def add_message(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the fields of the handler's message: a structlog processor for apps that configure structlog themselves."""
    running = RUNNING.get()
    if running is not None and not running.is_over:
        for name, value in running.fields().items():
            event.setdefault(name, value)
    return event


def _is_json(json: bool | None) -> bool:
    return not is_terminal() if json is None else json


def _time(json: bool | None) -> Any:
    """Return the processor for the time: in UTC for programs, the local time of day for people."""
    if _is_json(json):
        return structlog.processors.TimeStamper(fmt="iso", utc=True)
    return structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)


def _renderers(json: bool | None) -> tuple[Any, ...]:
    """Return the last processors, which make the text of a line."""
    if _is_json(json):
        return (structlog.processors.JSONRenderer(serializer=_to_json),)
    console = structlog.dev.ConsoleRenderer(
        colors=_in_colors(), exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )
    return _arrange, console


def _arrange(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put the task and the id of the message beside the event, and order the other fields."""
    name = str(event.pop("event", ""))
    message = [str(event.pop(field)) for field in (events.TASK, events.MESSAGE_ID) if event.get(field)]
    head = " ".join([name.ljust(_EVENT_WIDTH), *message]) if message else name
    return {"event": head, **dict(sorted(event.items(), key=lambda field: _RANKS.get(field[0], 0)))}


def _in_colors() -> bool:
    """Return whether to use colors, by the rules of https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal() and os.environ.get("TERM") != "dumb"


def _add_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the ids of the current span if the app has imported OpenTelemetry."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is not None and events.TRACE_ID not in event:
        span = trace.get_current_span()
        if span.is_recording():
            context = span.get_span_context()
            event[events.TRACE_ID] = trace.format_trace_id(context.trace_id)
            event[events.SPAN_ID] = trace.format_span_id(context.span_id)
    return event


def _strip_controls(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    # Text from messages must not control the terminal, or begin a new line that looks like another event.
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and name != "exception":
            event[name] = printable(value)
        elif name == "exception" and isinstance(value, str):
            event[name] = "\n".join(printable(line) for line in value.split("\n"))
    return event


def _to_json(event: Mapping[str, Any], **_options: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
