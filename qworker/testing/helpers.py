"""Helpers for the tests of apps: queues in memory, a list of enqueued calls, and a worker that runs until idle."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
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

    Drafts that the backend of the app's own URL refuses, such as a priority in `sq:`, are refused too. That backend
    is not opened. The URL can also be set inside the block, before the first call.

    Args:
        tasks: The app.
        clock: The clock of the queues. With a `FakeClock` the test decides when delays are over.
    """
    # The calls of an app that is included in another one go to that app's store.
    app = tasks._destination().app  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    since = app.schedules.since
    # So that a test can advance its clock to a tick before it runs the first worker.
    app.schedules.since = clock.time()
    try:
        with app._replaced_store(_MemoryStore(app, clock), clock):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            yield tasks
    finally:
        app.schedules.since = since


class _MemoryStore:
    """The store in memory of an app in tests."""

    def __init__(self, tasks: Tasks, clock: Clock) -> None:
        self.url = f"memory://testing-{secrets.token_hex(8)}"
        self._tasks = tasks
        self._clock = clock

    def create(self) -> Backend:
        """Create the backend. Before each publish it refuses what the app's own store refuses."""
        backend = open_backend(self.url, clock=self._clock)
        publish = backend.publish
        # An app factory may set the app's URL after the test has put the memory in its place.
        own = self._own_store()

        async def checked(queue: str, drafts: Sequence[Draft]) -> list[str]:
            if own is not None:
                scheme, takes_id = own.describe().partition(":")[0], getattr(own, "takes_id", None)
                refuse_unsupported(scheme, own.deviations, drafts, takes_id=takes_id, now=self._clock.time())
            return await publish(queue, drafts)

        vars(backend)["publish"] = checked
        return backend

    def _own_store(self) -> Backend | None:
        """Return a backend of the app's own URL, which is not opened. None: the store is not known here."""
        try:
            return self._tasks._make_own_backend()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        except UsageError:
            # No URL is set in the tests, or the backend's driver is not installed.
            return None


async def run_until_idle(tasks: Tasks, *, concurrency: int = 100, raise_failures: bool = False) -> WorkerCounts:
    """Run a worker in this process until no message is ready or leased in the app's queues. Delayed messages stay.

    In code without an event loop, use `asyncio.run(run_until_idle(tasks))`. Arguments that do not fit the signature
    fail immediately, whatever `Tasks(unknown_for=...)` is.

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
    # No deploy runs here.
    patience, tasks.unknown_for = tasks.unknown_for, 0.0
    try:
        await worker.run()
    finally:
        tasks.unknown_for = patience
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
