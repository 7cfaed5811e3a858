"""For tests of apps: queues in memory, a look at what was enqueued, and a worker that runs until nothing is left."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from qworker.app import Tasks
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.envelope import Envelope, open_envelope
from qworker.message import State, StoredMessage
from qworker.worker import Worker, WorkerCounts, WorkerOptions

__all__ = ["EnqueuedCall", "enqueued", "in_memory", "run_until_idle"]

_PAGE = 1000


class EnqueuedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits in a queue."""

    # The task's name; None for a message that no task wrote.
    task: str | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    headers: Mapping[str, str] = {}
    # Where and how it waits.
    queue: str
    id: str
    state: State
    # Unix seconds; None for what is ready.
    due_at: float | None = None
    tries: int = 0
    priority: int = 0
    key: str | None = None
    body: bytes = b""


@contextmanager
def in_memory(tasks: Tasks, clock: Clock = SYSTEM_CLOCK) -> Generator[Tasks]:
    """Give an app empty queues in memory, and its own backend back at the end.

    Args:
        tasks: the app.
        clock: what the queues read the time from, such as a `FakeClock`, on which delays pass when the test says so.
    """
    # What was given, if anything: not what the environment says today.
    url = tasks._url  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    before = tasks.clock
    tasks.clock = clock
    tasks.url = f"memory://testing-{secrets.token_hex(8)}"
    try:
        yield tasks
    finally:
        tasks.clock = before
        tasks.url = url


async def run_until_idle(tasks: Tasks, *, concurrency: int = 100) -> WorkerCounts:
    """Run a worker in this process until nothing is ready or leased in the app's queues; what is due later stays.

    From code without an event loop: `tasks.run_sync(run_until_idle(tasks), instead="await it")`.

    Returns:
        What the worker counted.
    """
    worker = Worker(tasks, WorkerOptions(burst=True, concurrency=concurrency))
    await worker.run()
    return worker.counts


async def enqueued(tasks: Tasks, queue: str | None = None) -> list[EnqueuedCall]:
    """The calls that wait in a queue, or in every queue that the app names: the ready in their order, then the delayed."""
    backend = await tasks.backend()
    present = set(await backend.queues())
    wanted = tasks.queue_names() if queue is None else [queue]
    calls: list[EnqueuedCall] = []
    for name in wanted:
        if name not in present:
            continue
        for state in (State.READY, State.DELAYED):
            offset = 0
            while page := await backend.browse(name, state, _PAGE, offset):
                calls.extend(map(_call, page))
                offset += len(page)
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
        key=message.key,
        body=message.body,
    )
