"""The report of a call that has failed permanently: what `on_failure` of a task enqueues."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec

from qworker.backend.registry import backend_class
from qworker.call import Call
from qworker.envelope import Envelope, open_envelope
from qworker.errors import MissingExtra, UsageError
from qworker.failure_text import FailureCode, without_code
from qworker.message import Message
from qworker.names import failure_id_text
from qworker.task import Task
from qworker.url import BackendURL
from qworker.validation import shown

__all__ = ["REPORTED", "FailedCall", "check_holds", "check_on_failure", "failure_report", "reported_by"]

# The header of a report: the code and the id of the message that has failed.
REPORTED = "qworker-failure"
# Seconds for which the id of a report stays taken, so that a failure is reported once.
_HOLD = 86_400.0


class FailedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has failed permanently, as the argument of an `on_failure` task.

    Attributes:
        id: The id of its message.
        queue: The queue of its message.
        task: The task's name.
        args: Its arguments by position, as JSON values. Empty if the message could not be read.
        kwargs: Its arguments by name, as JSON values.
        headers: The headers of the call: texts by name.
        tries: The number of failed attempts, with the last one.
        code: Why it failed: `error` (tries used up, or `Fail`), `timeout`, `poison` (its process died, or its lease
            expired, at its last attempt), `arguments` (they do not fit the task), `expired` or `cancelled`.
        error: The error that is kept with the message.
        failed_at: Unix seconds at which it failed.
    """

    id: str
    queue: str
    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] = {}
    tries: int = 0
    code: FailureCode = "error"
    error: str = ""
    failed_at: float = 0.0


def failure_report(
    on_failure: Task[..., Any],
    message: Message,
    task: str,
    *,
    code: FailureCode,
    error: str,
    tries: int,
    failed_at: float | None = None,
) -> Call:
    """Return the call that reports a failure. Store it before the message is failed: its id allows a repetition.

    Args:
        on_failure: The task to call.
        message: The message that has failed, unpacked.
        task: The name of its task.
        code: Why it failed.
        error: The error that is kept with the message, with or without the line of its code.
        tries: The number of failed attempts, with the last one.
        failed_at: Unix seconds. None: now.

    Raises:
        UsageError: The app's own code refuses the call, such as a header source.
    """
    opened = open_envelope(message.body)
    envelope = opened if isinstance(opened, Envelope) else Envelope(task)
    failed = FailedCall(
        id=message.id,
        queue=message.queue,
        task=task,
        args=envelope.args,
        kwargs=envelope.kwargs,
        headers=envelope.headers,
        tries=tries,
        code=code,
        error=without_code(error),
        failed_at=time.time() if failed_at is None else failed_at,
    )
    headers = {REPORTED: f"{code} {message.id}"}
    return on_failure.using(id=failure_id_text(message.id), hold=_HOLD, headers=headers).call(failed)


def reported_by(headers: dict[str, str]) -> tuple[str, str] | None:
    """Return the code and the message id of the failure that a call with these headers reports, if it is a report."""
    code, _, message_id = headers.get(REPORTED, "").partition(" ")
    return (code, message_id) if message_id else None


def check_on_failure(app: object, on_failure: Any) -> Task[..., Any] | None:
    """Return the task of the option `on_failure`.

    Raises:
        UsageError: It is not a task of this app that takes a `FailedCall`.
    """
    if on_failure is None:
        return None
    if not isinstance(on_failure, Task):
        raise UsageError(f"on_failure must be a task (got {shown(on_failure)}): decorate it with @tasks.task")
    task: Task[..., Any] = cast("Task[..., Any]", on_failure)
    if not task.belongs_to(app):
        raise UsageError(f"on_failure: the task {task.name!r} belongs to another app: use a task of this app")
    if not task.signature.fits(1):
        raise UsageError(f"on_failure: the task {task.name!r} must take one argument, a FailedCall")
    return task


def check_holds(url: str | None, task: str) -> None:
    """Check that the store of a task with `on_failure` has holds: without them a failure could be reported twice.

    Args:
        url: The URL of the app. None: it is not known yet, and the worker checks it when it starts.
        task: The name of the task.

    Raises:
        UsageError: The protocol does not support holds.
    """
    if url is None:
        return
    scheme = BackendURL.parse(url).scheme
    try:
        deviations = backend_class(scheme).deviations
    except MissingExtra:
        # A program that only imports the app does not need the driver.
        return
    if "hold" in deviations:
        raise UsageError(
            f"task {task!r}: on_failure needs holds, which {scheme}: does not support ({deviations['hold']}):"
            " use redis: or file:"
        )
