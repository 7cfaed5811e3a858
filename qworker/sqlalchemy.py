"""A helper for SQLAlchemy: calls that are sent after the commit of a session. It needs SQLAlchemy 2.0 or newer."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ParamSpec, TypeVar, cast, overload

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from qworker.after_commit import check_thread, send_blocking, wait_for_commit
from qworker.call import Call
from qworker.enqueue.waiting_calls import WaitingCall, send_calls
from qworker.errors import UsageError
from qworker.jobs.job import Job
from qworker.named_task import NamedTask
from qworker.task import ConfiguredTask, Task
from qworker.validation import shown

__all__ = ["AnySession", "enqueue_on_commit"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

AnySession = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]

# The key in `Session.info`.
_CALLS = "qworker.calls"


@overload
def enqueue_on_commit(session: AnySession, call: Call, /) -> Job[Any]: ...


@overload
def enqueue_on_commit(session: AnySession, task: NamedTask[T], /, *args: Any, **kwargs: Any) -> Job[T]: ...


@overload
def enqueue_on_commit(
    session: AnySession,
    task: Task[P, Awaitable[T]] | ConfiguredTask[P, Awaitable[T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Job[T]: ...


@overload
def enqueue_on_commit(
    session: AnySession, task: Task[P, R] | ConfiguredTask[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Job[R]: ...


def enqueue_on_commit(session: Any, task: Any, /, *args: Any, **kwargs: Any) -> Job[Any]:
    """Enqueue a call after the commit of a session.

    A rollback drops it, also that of a savepoint (`begin_nested`), and so does `close` without a commit. As with
    `session.add`, a transaction begins if there is none. If the process is killed between the commit and the send, the
    call is lost.

    The calls of a transaction are sent together, when its connection is back in the pool. If some cannot be sent, the
    others are, and `session.commit()` raises `EnqueueFailed`. The transaction is committed, and the session can be used
    again.

    Args:
        session: A `Session` or `AsyncSession`, or a scoped one.
        task: A task, also one with options (`task.using(...)`), or a call (`task.call(...)`).
        args: The arguments of a task.
        kwargs: The arguments of a task by name.

    Returns:
        The job. Its id is known immediately. `Job.existed` is None until the call is sent.

    Raises:
        UsageError: This is not a session, or neither a task nor a call. Or an event loop is running, and the session
            would block it.
        InvalidArguments: The arguments do not fit the task.
        MessageTooLarge: The body of the call is larger than `max_body`.
        NotSupported: The store takes no ids, or does not support an option of the call.
    """
    plain = _plain_session(session)
    waiting = wait_for_commit(task, args, kwargs)
    if not plain.in_transaction():
        plain.begin()
    plain.info.setdefault(_CALLS, _SessionCalls()).add(waiting, _savepoints(plain))
    return waiting.job


def _plain_session(session: object) -> Session:
    """Return the session whose events say what becomes of the transaction."""
    if isinstance(session, scoped_session | async_scoped_session):
        session = cast("object", session())
    if isinstance(session, AsyncSession):
        return session.sync_session
    if not isinstance(session, Session):
        raise UsageError(f"session is not a SQLAlchemy Session or AsyncSession (got {shown(session)})")
    if not in_greenlet():
        check_thread()
    return session


def _savepoints(session: Session) -> set[SessionTransaction]:
    """Return the open savepoints of a session."""
    found: set[SessionTransaction] = set()
    transaction = session.get_nested_transaction()
    while transaction is not None:
        if transaction.nested:
            found.add(transaction)
        transaction = transaction.parent
    return found


class _SessionCalls:
    """The calls of one session that wait for its commit."""

    def __init__(self) -> None:
        # Each call, with the savepoints whose rollback drops it.
        self._waiting: list[tuple[WaitingCall, set[SessionTransaction]]] = []
        self._committed: list[WaitingCall] = []

    def add(self, waiting: WaitingCall, savepoints: set[SessionTransaction]) -> None:
        """Add a call that was made in these savepoints."""
        self._waiting.append((waiting, savepoints))

    def release(self, savepoint: SessionTransaction) -> None:
        """Note that a savepoint was released: from now on only what is around it can drop its calls."""
        for _, savepoints in self._waiting:
            savepoints.discard(savepoint)

    def commit(self) -> None:
        """Note that the transaction was committed."""
        self._committed, self._waiting = [waiting for waiting, _ in self._waiting], []

    def drop(self, savepoint: SessionTransaction) -> None:
        """Drop the calls of a savepoint that has ended. If it was released, it has none."""
        self._waiting = [entry for entry in self._waiting if savepoint not in entry[1]]

    def end(self) -> list[WaitingCall]:
        """End the transaction, and return the calls that are committed."""
        committed, self._committed, self._waiting = self._committed, [], []
        return committed


@event.listens_for(Session, "after_commit")
def _on_commit(session: Session) -> None:
    calls: _SessionCalls | None = session.info.get(_CALLS)
    if calls is None:
        return
    savepoint = session.get_nested_transaction()
    if savepoint is None:
        calls.commit()
    else:
        calls.release(savepoint)


# The session sends here, and not in `after_commit`: an exception there would leave its transaction open.
@event.listens_for(Session, "after_transaction_end")
def _on_end(session: Session, transaction: SessionTransaction) -> None:
    calls: _SessionCalls | None = session.info.get(_CALLS)
    if calls is None:
        return
    if transaction.nested:
        calls.drop(transaction)
    elif transaction.parent is None and (committed := calls.end()):
        _send(committed)


def _send(calls: list[WaitingCall]) -> None:
    if in_greenlet():
        await_only(send_calls(calls))
    else:
        send_blocking(calls)
