"""Helpers for Django: calls that are sent after the commit, a hook for connections, and `manage.py qworker`.

This package needs Django, and reads its settings at the first call. For the command, add it to `INSTALLED_APPS`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, overload

from qworker.after_commit import check_thread, send_blocking, wait_for_commit
from qworker.attempt.hooks import Attempt, Hook
from qworker.call import Call
from qworker.enqueue.waiting_calls import WaitingCall
from qworker.errors import QworkerError, UsageError
from qworker.jobs.job import Job
from qworker.named_task import NamedTask
from qworker.task import ConfiguredTask, Task
from qworker.validation import shown

__all__ = ["FreshConnections", "enqueue_on_commit"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Calls log to the logging of the application, because they run in its process.
_log = logging.getLogger("qworker")


@overload
def enqueue_on_commit(call: Call, /, *, database: str | None = None) -> Job[Any]: ...


@overload
def enqueue_on_commit(task: NamedTask[T], /, *args: Any, **kwargs: Any) -> Job[T]: ...


@overload
def enqueue_on_commit(
    task: Task[P, Awaitable[T]] | ConfiguredTask[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> Job[T]: ...


@overload
def enqueue_on_commit(task: Task[P, R] | ConfiguredTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]: ...


def enqueue_on_commit(task: Any, /, *args: Any, **kwargs: Any) -> Job[Any]:
    """Enqueue a call after the commit of the transaction in which this is called.

    A rollback drops it, also that of a savepoint. Without a transaction it is sent immediately. If the process is
    killed between the commit and the send, the call is lost.

    The calls of a transaction are sent together. If some cannot be sent, the others are, the other hooks of the
    transaction run, and the logger `qworker` has the error with the ids.

    Args:
        task: A task, also one with options (`task.using(...)`), or a call (`task.call(...)`).
        args: The arguments of a task.
        kwargs: The arguments of a task by name. With a call: `database`, the alias of the database whose commit counts.

    Returns:
        The job. Its id is known immediately. `Job.existed` is None until the call is sent.

    Raises:
        UsageError: This is neither a task nor a call, or Django has no such database. Or an event loop is running in
            this thread, or gevent has replaced threads.
        InvalidArguments: The arguments do not fit the task.
        MessageTooLarge: The body of the call is larger than `max_body`.
        NotSupported: The store takes no ids, or does not support an option of the call.
        EnqueueFailed: There is no transaction, and the call could not be stored.
    """
    database = kwargs.pop("database", None) if isinstance(task, Call) else None
    waiting = wait_for_commit(task, args, kwargs)
    check_thread()
    connection = _connection(database)
    if connection.in_atomic_block:
        _batch_of(connection).calls.append(waiting)
    else:
        # Django calls it now, or refuses it if the program manages transactions by itself.
        connection.on_commit(lambda: send_blocking([waiting]))
    return waiting.job


def _connection(database: str | None) -> Any:
    # Django has no type hints.
    transaction: Any = import_module("django.db.transaction")
    misconfigured: Any = import_module("django.core.exceptions").ImproperlyConfigured
    unknown: Any = import_module("django.db.utils").ConnectionDoesNotExist
    try:
        connection = transaction.get_connection(database)
        connection.get_autocommit()
    except misconfigured as error:
        raise UsageError("django: enqueue_on_commit needs a database connection: set DATABASES") from error
    except unknown as error:
        raise UsageError(f"django: DATABASES has no {shown(database)}: give database= one of its names") from error
    return connection


class _Batch:
    """The calls that one hook of Django sends.

    Attributes:
        calls: The calls.
        is_sent: Whether Django has called it.
    """

    def __init__(self) -> None:
        self.calls: list[WaitingCall] = []
        self.is_sent = False

    def __call__(self) -> None:
        """Send the calls. Django calls it after the commit.

        An exception would drop the hooks that follow, also those of other code, and the transaction is committed.
        """
        self.is_sent = True
        try:
            send_blocking(self.calls)
        except QworkerError:
            ids = ", ".join(waiting.job.id for waiting in self.calls if waiting.job.existed is None)
            _log.exception("calls were not enqueued after the commit, or it is not known: %s", ids)


def _batch_of(connection: Any) -> _Batch:
    """Return the batch for a call: the last hook of the transaction, if it has the same savepoints, or a new one.

    So the calls and the hooks of other code keep their order, and Django drops the batch if a savepoint is rolled back.
    In the transaction of a TestCase, each call has its hook, as in autocommit mode: `captureOnCommitCallbacks` calls
    those that are added in its block.
    """
    if connection.run_on_commit and not connection.atomic_blocks[-1]._from_testcase:  # noqa: SLF001
        savepoints, hook, *_ = connection.run_on_commit[-1]
        if isinstance(hook, _Batch) and not hook.is_sent and savepoints == set(connection.savepoint_ids):
            return hook
    batch = _Batch()
    connection.on_commit(batch)
    return batch


class FreshConnections(Hook):
    """Closes broken and old connections to the database before and after each attempt, as a request of Django does."""

    # The connections belong to the thread in which the handler runs.
    kinds = frozenset({"thread", "process"})

    def around_sync(self, attempt: Attempt) -> Iterator[None]:
        """Close connections in the thread of the handler."""
        close: Any = import_module("django.db").close_old_connections
        close()
        try:
            yield
        finally:
            close()
