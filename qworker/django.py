"""Helpers for Django: calls that are sent after the commit, and a hook that closes old connections.

This module needs Django, and reads its settings at the first call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, overload

import msgspec

from qworker.attempt.hooks import Attempt, Hook
from qworker.backend.deviations import refuse_unsupported
from qworker.backend.registry import backend_class
from qworker.call import Call
from qworker.errors import NotSupported, UsageError
from qworker.jobs.job import Job
from qworker.names import new_id, to_message_id
from qworker.task import ConfiguredTask, Task
from qworker.url import BackendURL
from qworker.validation import shown

__all__ = ["FreshConnections", "enqueue_on_commit"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def enqueue_on_commit(call: Call, /, *, database: str | None = None) -> Job[Any]: ...


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

    Args:
        task: A task, also one with options (`task.using(...)`), or a call (`task.call(...)`).
        args: The arguments of a task.
        kwargs: The arguments of a task by name. With a call: `database`, the alias of the database whose commit counts.

    Returns:
        The job. Its id is known immediately. Whether its message existed is not known.

    Raises:
        UsageError: This is neither a task nor a call, or Django has no such database.
        InvalidArguments: The arguments do not fit the task.
        NotSupported: The store takes no ids, or does not support an option of the call.
        BackendError: There is no transaction, and the call could not be stored. After a commit, Django raises it, and
            drops what was to follow it, also other calls.
    """
    database: str | None = None
    if isinstance(task, Call):
        database = kwargs.pop("database", None)
        if args or kwargs:
            raise UsageError("enqueue_on_commit takes the arguments of a task, and a call has its own: leave them out")
        call = task
    elif isinstance(task, Task | ConfiguredTask):
        call = task.call(*args, **kwargs)
    else:
        raise UsageError(f"enqueue_on_commit takes a task or a call (got {shown(task)})")
    _check_store(call)
    given = call.draft.id
    message_id = new_id() if given is None else to_message_id(given)
    call = msgspec.structs.replace(call, draft=msgspec.structs.replace(call.draft, id=message_id))
    _on_commit(call, database)
    return Job(message_id, call.queue, None, call.source)


def _app(call: Call) -> Any:
    if call.source is None:
        raise UsageError("this call belongs to no app: make it with task.call(...)")
    return call.source.app


def _check_store(call: Call) -> None:
    """Refuse what the store does not support: after the commit it would be too late."""
    app, draft = _app(call), call.draft
    scheme = BackendURL.parse(app.url).scheme
    deviations = backend_class(scheme).deviations
    reason = deviations.get("given_ids")
    if draft.id is None and reason is not None:
        raise NotSupported(
            f"{scheme}: does not support enqueue_on_commit, because its publisher cannot know the id ({reason}):"
            " use transaction.on_commit(lambda: task.enqueue_sync(...))"
        )
    # Some stores take some ids.
    refuse_unsupported(scheme, deviations, [draft], takes_id=lambda _: True, now=app.clock.time())


def _on_commit(call: Call, database: str | None) -> None:
    app = _app(call)
    # Django has no type hints.
    transaction: Any = import_module("django.db.transaction")
    misconfigured: Any = import_module("django.core.exceptions").ImproperlyConfigured
    unknown: Any = import_module("django.db.utils").ConnectionDoesNotExist
    try:
        transaction.on_commit(lambda: app.enqueue_many_sync([call]), using=database)
    except misconfigured as error:
        raise UsageError("django: enqueue_on_commit needs a database connection: set DATABASES") from error
    except unknown as error:
        raise UsageError(f"django: DATABASES has no {shown(database)}: give database= one of its names") from error


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
