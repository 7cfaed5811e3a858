"""What the helpers for databases share: `enqueue_on_commit` makes a call now, and it is sent after the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from qworker.call import Call
from qworker.enqueue.portal import check_blocking, run_blocking
from qworker.enqueue.waiting_calls import WaitingCall, send_calls, wait_to_send
from qworker.errors import UsageError
from qworker.named_task import NamedTask
from qworker.task import ConfiguredTask, Task
from qworker.validation import shown

__all__ = ["check_thread", "send_blocking", "wait_for_commit"]

_INSTEAD = "a thread for the transaction (asyncio.to_thread), or an AsyncSession of SQLAlchemy"


def wait_for_commit(task: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WaitingCall:
    """Make the call that `enqueue_on_commit` asks for.

    Args:
        task: A task, also one with options, or a call.
        args: The arguments of a task.
        kwargs: The arguments of a task by name.

    Raises:
        UsageError: This is neither a task nor a call.
        InvalidArguments: The arguments do not fit the task.
        MessageTooLarge: The body of the call is larger than `max_body`.
        NotSupported: The store does not support one of its options, or takes no ids.
    """
    if isinstance(task, Call):
        if args or kwargs:
            raise UsageError("enqueue_on_commit takes the arguments of a task, and a call has its own: leave them out")
        call = task
    elif isinstance(task, Task | ConfiguredTask | NamedTask):
        call = cast("Task[..., Any]", task).call(*args, **kwargs)
    else:
        raise UsageError(f"enqueue_on_commit takes a task or a call (got {shown(task)})")
    if call.source is None:
        raise UsageError("this call belongs to no app: make it with task.call(...)")
    return wait_to_send(call.source.app, call)


def check_thread() -> None:
    """Check that `send_blocking` works in this thread. After the commit it would be too late for the error.

    Raises:
        UsageError: An event loop is running in this thread, or gevent has replaced threads.
    """
    check_blocking(_INSTEAD)


def send_blocking(calls: Sequence[WaitingCall]) -> None:
    """Publish calls from code without an event loop. See `send_calls`."""
    run_blocking(send_calls(calls), instead=_INSTEAD)
