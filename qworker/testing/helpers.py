"""Helpers for the tests of apps: queues in memory, a list of enqueued calls, and a worker that runs until idle."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.backend.registry import open_backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.envelope import Envelope, open_envelope
from qworker.errors import UsageError
from qworker.logs import one_line
from qworker.message import Draft, Query, State, StoredMessage
from qworker.worker import Worker, WorkerCounts, WorkerOptions
from qworker.worker.delivery import Delivery, Outcome

__all__ = ["EnqueuedCall", "enqueued_calls", "in_memory", "run_until_idle"]

# The attribute of a backend in memory with the function that refuses drafts.
_REFUSAL = "_refuse_as_own"

_Refusal = Callable[[Sequence[Draft]], None]


class EnqueuedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits in a queue.

    Attributes:
        task: The name of the task. None for a raw message.
        args: The positional arguments.
        kwargs: The keyword arguments.
        headers: The headers of the call: texts by name.
        queue: The name of the queue.
        id: The id of the message.
        state: `ready` or `delayed`.
        due_at: Unix seconds at which the call can run. None if it is ready.
        tries: Failed attempts so far.
        priority: 0 (default) to 9 (first).
        unique_key: The unique key, if the call has one.
        body: The bytes of the message.
    """

    task: str | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    headers: Mapping[str, str] = {}
    queue: str
    id: str
    state: State
    due_at: float | None = None
    tries: int = 0
    priority: int = 0
    unique_key: str | None = None
    body: bytes = b""


@contextmanager
def in_memory(tasks: Tasks, clock: Clock = SYSTEM_CLOCK) -> Generator[Tasks]:
    """Replace the backend of an app by empty queues in memory inside the block.

    Drafts that the backend of the app's own URL refuses, such as a priority in a directory, are refused too. That
    backend is not opened.

    Args:
        tasks: The app.
        clock: The clock of the queues. With a `FakeClock` the test decides when delays are over.
    """
    # This is the URL that the app was given, without the settings of the environment.
    url = tasks._url  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    before, making = tasks.clock, vars(tasks).get("_make_backend")
    refuse = _refusal_of(tasks, clock)
    memory = f"memory://testing-{secrets.token_hex(8)}"

    def make() -> Backend:
        backend = open_backend(memory, clock=clock)
        return backend if refuse is None else _refusing(backend, refuse)

    since = tasks.schedules.since
    tasks.clock = clock
    # So that a test can advance its clock to a tick before it runs the first worker.
    tasks.schedules.since = clock.time()
    tasks.url = memory
    vars(tasks)["_make_backend"] = make
    try:
        yield tasks
    finally:
        tasks.clock = before
        tasks.schedules.since = since
        tasks.url = url
        if making is None:
            del vars(tasks)["_make_backend"]
        else:
            vars(tasks)["_make_backend"] = making


def _refusal_of(tasks: Tasks, clock: Clock) -> _Refusal | None:
    """Return the function that refuses drafts as the app's own store does, or None if the store is not known here."""
    try:
        own = tasks._make_backend()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    except UsageError:
        # No URL is set in the tests, or the backend's driver is not installed.
        return None
    # The app already uses queues in memory: `in_memory` is nested.
    outer: _Refusal | None = vars(own).get(_REFUSAL)
    if outer is not None:
        return outer
    scheme, takes_id = own.describe().partition(":")[0], getattr(own, "takes_id", None)

    def refuse(drafts: Sequence[Draft]) -> None:
        refuse_unsupported(scheme, own.deviations, drafts, takes_id=takes_id, now=clock.time())

    return refuse


def _refusing(backend: Backend, refuse: _Refusal) -> Backend:
    publish = backend.publish

    async def checked(queue: str, drafts: Sequence[Draft]) -> list[str]:
        refuse(drafts)
        return await publish(queue, drafts)

    vars(backend).update({"publish": checked, _REFUSAL: refuse})
    return backend


async def run_until_idle(tasks: Tasks, *, concurrency: int = 100, raise_failures: bool = False) -> WorkerCounts:
    """Run a worker in this process until no message is ready or leased in the app's queues. Delayed messages stay.

    In code without an event loop, use `asyncio.run(run_until_idle(tasks))`.

    Args:
        tasks: The app.
        concurrency: Maximum number of messages at once.
        raise_failures: Whether to raise the exception of the first attempt that was retried or failed, when no message
            is left to run. This includes a `Retry` or `Fail` that a handler raised, a timeout (`TimeoutError`) and
            arguments that do not fit (`InvalidArguments`).

    Returns:
        The counts of the worker.

    Raises:
        RemoteFailure: With `raise_failures`, if a handler with `process=True` raised. The text is the traceback.
        RuntimeError: With `raise_failures`, if a message failed without an exception, for example because it had no
            tries left. It is also raised for a handler that raised something other than an `Exception`, such as
            `SystemExit`, which is then the cause.
    """
    worker = Worker(tasks, WorkerOptions(burst=True, concurrency=concurrency))
    failures = _Failures()
    worker.observers.append(failures)
    await worker.run()
    if raise_failures and failures.first is not None:
        raise failures.first
    return worker.counts


class _Failures:
    """The observer that keeps the first failure."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def handler_started(self, delivery: Delivery) -> None:
        """Do nothing."""

    def message_settled(self, delivery: Delivery, outcome: Outcome, error: str | None, duration: float) -> None:
        """Keep the error if it is the first one."""
        if self.first is None and outcome in {Outcome.RETRIED, Outcome.FAILED}:
            if isinstance(delivery.error, Exception):
                self.first = delivery.error
            else:
                self.first = RuntimeError(f"task {delivery.task!r}: {one_line(error or '')}")
                self.first.__cause__ = delivery.error


async def enqueued_calls(tasks: Tasks, queue: str | None = None) -> list[EnqueuedCall]:
    """Return the calls that wait in one queue, or in all queues of the app: ready ones in order, then delayed ones."""
    backend = await tasks.backend()
    present = set(await backend.queues())
    wanted = tasks.queue_names() if queue is None else [queue]
    calls: list[EnqueuedCall] = []
    for name in wanted:
        if name not in present:
            continue
        for state in (State.READY, State.DELAYED):
            async for page in backend.browse(name, Query(state)):
                calls.extend(map(_call, page))
    return calls


def _call(stored: StoredMessage) -> EnqueuedCall:
    message = stored.message
    opened = open_envelope(message.body)
    envelope = opened if isinstance(opened, Envelope) else None
    return EnqueuedCall(
        task=None if envelope is None else envelope.task,
        args=() if envelope is None else tuple(envelope.args),
        kwargs={} if envelope is None else envelope.kwargs,
        headers={} if envelope is None else envelope.headers,
        queue=message.queue,
        id=message.id,
        state=stored.state,
        due_at=stored.due_at,
        tries=message.tries,
        priority=message.priority,
        unique_key=message.unique_key,
        body=message.body,
    )
