"""Hints for wrong names: options and methods that do not exist, with the name that was probably meant.

Static types stay exact: a type checker refuses all of this too. The code here runs only after a name was not found.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TypeVar

from qworker.errors import UsageError
from qworker.validation import shown

__all__ = ["OtherMethods", "exact_options"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_TASK_OPTIONS = frozenset(
    {
        "name",
        "queue",
        "max_tries",
        "timeout",
        "retry",
        "retry_on",
        "fail_on",
        "process",
        "priority",
        "hold",
        "result",
        "hooks",
        "on_failure",
        "unique",
    }
)
_CALL_OPTIONS = frozenset(
    {
        "delay",
        "due_at",
        "priority",
        "unique_key",
        "id",
        "queue",
        "headers",
        "hold",
        "result",
        "timeout",
        "max_tries",
        "expires",
        "validate",
        "unique",
    }
)

# Names of other libraries: the option that is meant, and the difference.
_OPTIONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("max_retries", "retries", "retry_limit", "max_attempts", "attempts", "tries"),
        ("max_tries", "it counts the first run too"),
    ),
    **dict.fromkeys(("countdown", "defer_by", "_defer_by", "delay_ms", "schedule_in"), ("delay", "in seconds")),
    **dict.fromkeys(
        ("eta", "defer_until", "_defer_until", "schedule_at", "scheduled", "run_at"),
        ("due_at", "Unix seconds or a datetime"),
    ),
    **dict.fromkeys(("queue_name", "_queue_name"), ("queue", "")),
    **dict.fromkeys(
        ("time_limit", "soft_time_limit", "job_timeout", "_job_timeout", "max_run_time"), ("timeout", "in seconds")
    ),
    **dict.fromkeys(
        (
            "backoff",
            "retry_backoff",
            "retry_backoff_max",
            "retry_jitter",
            "retry_delay",
            "default_retry_delay",
            "retry_interval",
            "min_backoff",
            "max_backoff",
        ),
        ("retry", "a Backoff(initial=..., maximum=...), Delays(...) or a time"),
    ),
    **dict.fromkeys(("job_id", "_job_id", "task_id", "message_id"), ("id", "")),
    **dict.fromkeys(("queueing_lock", "unique_for", "dedup_key", "key"), ("unique_key", "")),
    **dict.fromkeys(("autoretry_for", "retry_when"), ("retry_on", "a tuple of exception classes")),
    **dict.fromkeys(("dont_autoretry_for", "throws"), ("fail_on", "a tuple of exception classes")),
    **dict.fromkeys(("actor_name", "task_name"), ("name", "")),
    **dict.fromkeys(
        ("store_results", "store_result", "result_ttl", "keep_result", "keep_result_forever", "result_expires"),
        ("result", "the seconds for which it is kept"),
    ),
    **dict.fromkeys(("max_age", "ttl", "_expires"), ("expires", "in seconds")),
    **dict.fromkeys(("link_error", "on_error", "on_retry_exhausted"), ("on_failure", "another task")),
    "at_front": ("priority", "0 to 9, and 9 is first"),
}
# Names that have no option here.
_NO_OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        ("bind", "pass_context", "context", "ctx"), "annotate the handler's first parameter with Context instead"
    ),
    **dict.fromkeys(
        ("acks_late", "ack_late", "task_acks_late"),
        "leave it out: a message is always acked after its handler has returned",
    ),
    "ignore_result": "leave it out: a result is kept only if result= is given",
    **dict.fromkeys(
        ("link", "on_success", "depends_on"),
        "enqueue the next task in the handler, or wait there for the job of another",
    ),
    "rate_limit": "raise Retry('rate limited', delay=1, counts=False) in the handler if your limiter refuses",
}
_CALLS = ("s", "si", "subtask", "message")
_ENQUEUES = (
    "delay",
    "apply_async",
    "send",
    "send_with_options",
    "kiq",
    "kicker",
    "defer",
    "defer_async",
    "enqueue_job",
    "enqueue_async",
    "submit",
    "schedule",
    "publish",
)


def exact_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function refuse an unknown keyword with one line that names the keyword that was probably meant.

    Raises:
        UsageError: By the returned function, for such a keyword.
    """
    options = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    known = frozenset(inspect.signature(function).parameters)
    by_position = len(known) - len(options)
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if len(args) > by_position:
            raise UsageError(
                f"{name}() takes its options by name (got {shown(args[by_position])}): write {name}({options[0]}=...)"
            )
        if not kwargs.keys() <= known:
            wrong = next(given for given in kwargs if given not in known)
            raise UsageError(f"{name}() has no option {wrong!r}: {_meant(wrong, options)}")
        return function(*args, **kwargs)

    return checked


def _meant(name: str, options: Iterable[str]) -> str:
    if name in _NO_OPTIONS and name not in options:
        return _NO_OPTIONS[name]
    option, note = _OPTIONS.get(name, (name, ""))
    note = f" ({note})" if note else ""
    if option in options:
        return f"did you mean {option}={note}?"
    if option in _TASK_OPTIONS:
        return f"did you mean {option}={note} of @tasks.task(...)?"
    if option in _CALL_OPTIONS:
        return f"did you mean task.using({option}=...){note}?"
    close = difflib.get_close_matches(name, options, 1)
    return f"did you mean {close[0]}=?" if close else f"it has {', '.join(options)}"


class _Elsewhere:
    """A method of other libraries. A `__getattr__` instead would slow down the lookup of every attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        if self._name in _CALLS:
            advice = "`task.call(...)` makes a call for `tasks.enqueue_many`"
        else:
            advice = (
                "write `await task.enqueue(...)`, or `task.enqueue_sync(...)` without an event loop;"
                " `task.using(delay=...)` has the options of a call"
            )
        raise AttributeError(f"a task has no method {self._name!r}: {advice}")


class OtherMethods:
    """The enqueueing methods of other libraries. The error names the method to use, and `hasattr` returns False."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        # So that completion does not offer them.
        return [name for name in super().__dir__() if name not in _ENQUEUES and name not in _CALLS]


for _name in (*_ENQUEUES, *_CALLS):
    _elsewhere = _Elsewhere()
    _elsewhere.__set_name__(OtherMethods, _name)
    setattr(OtherMethods, _name, _elsewhere)
