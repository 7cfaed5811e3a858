"""For tests of apps: queues in memory, a look at what was enqueued, and a worker that runs until nothing is left."""

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

# The attribute of a backend in memory that has what refuses drafts.
_REFUSAL = "_refuse_as_own"

_Refusal = Callable[[Sequence[Draft]], None]


class EnqueuedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits in a queue.

    Attributes:
        task: The task's name; None for a message that no task wrote.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        headers: What travels with it.
        queue: Where it waits.
        id: Its message's id.
        state: `ready` or `delayed`.
        due_at: Unix seconds at which it may run; None if it is ready.
        tries: Failed attempts so far.
        priority: 0 (default) to 9 (first).
        unique_key: The key under which it is stored once at a time.
        body: The message's bytes.
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
    """Give an app empty queues in memory, and its own backend back at the end.

    What the backend of the app's own URL would refuse, such as a priority in a directory, is refused as there. It is not opened.

    Args:
        tasks: The app.
        clock: What the queues read the time from, such as a `FakeClock`, on which delays pass when the test says so.
    """
    # What was given, if anything: not what the environment says today.
    url = tasks._url  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    before, making = tasks.clock, vars(tasks).get("_make_backend")
    refuse = _refusal_of(tasks, clock)
    memory = f"memory://testing-{secrets.token_hex(8)}"

    def make() -> Backend:
        backend = open_backend(memory, clock=clock)
        return backend if refuse is None else _refusing(backend, refuse)

    tasks.clock = clock
    tasks.url = memory
    vars(tasks)["_make_backend"] = make
    try:
        yield tasks
    finally:
        tasks.clock = before
        tasks.url = url
        if making is None:
            del vars(tasks)["_make_backend"]
        else:
            vars(tasks)["_make_backend"] = making


def _refusal_of(tasks: Tasks, clock: Clock) -> _Refusal | None:
    """Return what refuses drafts for the app's own store; None where that cannot be known here."""
    try:
        own = tasks._make_backend()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    except UsageError:
        # No URL is given where tests run, or the backend's driver is not installed.
        return None
    # Queues in memory within queues in memory.
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
    """Run a worker in this process until nothing is ready or leased in the app's queues; what is due later stays.

    From code without an event loop: `asyncio.run(run_until_idle(tasks))`.

    Args:
        tasks: The app.
        concurrency: Messages at once.
        raise_failures: Raise what failed first, once nothing is left to run. That is the exception of the first attempt that ended in
            a retry or a failure, with its traceback; a `Retry` and a `Fail` that a handler raised on purpose, a timeout
            (`TimeoutError`) and arguments that do not fit (`InvalidArguments`) too.

    Returns:
        What the worker counted.

    Raises:
        RemoteFailure: With `raise_failures`, of a handler with `process=True`: its text is the traceback.
        RuntimeError: With `raise_failures`: a message failed without an exception, such as one with its tries used up, or by one
            that is not an `Exception`, such as `SystemExit`, which is the cause.
    """
    worker = Worker(tasks, WorkerOptions(burst=True, concurrency=concurrency))
    failures = _Failures()
    worker.observers.append(failures)
    await worker.run()
    if raise_failures and failures.first is not None:
        raise failures.first
    return worker.counts


class _Failures:
    """The observer that keeps what failed first."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def handler_started(self, delivery: Delivery) -> None:
        """Nothing has failed yet."""

    def message_settled(self, delivery: Delivery, outcome: Outcome, error: str | None, duration: float) -> None:
        """Keep the first."""
        if self.first is None and outcome in {Outcome.RETRIED, Outcome.FAILED}:
            if isinstance(delivery.error, Exception):
                self.first = delivery.error
            else:
                self.first = RuntimeError(f"task {delivery.task!r}: {one_line(error or '')}")
                self.first.__cause__ = delivery.error


async def enqueued_calls(tasks: Tasks, queue: str | None = None) -> list[EnqueuedCall]:
    """Return the calls that wait in a queue, or in every queue that the app names: the ready in their order, then the delayed."""
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
