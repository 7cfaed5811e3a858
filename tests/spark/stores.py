"""Stores as the Spark tests need them: filled, worked on and looked at from this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State

T = TypeVar("T")

QUEUE = "jobs"


def ask(url: str, question: Callable[[Backend], Awaitable[T]]) -> T:
    """What a question to a store gives."""

    async def asked() -> T:
        backend = open_backend(url)
        try:
            await backend.open()
            return await question(backend)
        finally:
            await backend.aclose()

    return asyncio.run(asked())


def publish(url: str, bodies: Sequence[bytes], queue: str = QUEUE, **options: float) -> list[str]:
    drafts = [Draft(body=body, delay=options.get("delay", 0.0)) for body in bodies]
    return ask(url, lambda backend: backend.publish(queue, drafts))


def finish(url: str, count: int, how: SettleAction, queue: str = QUEUE, error: str | None = None) -> None:
    """Lease messages and end them all in one way."""

    async def work(backend: Backend) -> None:
        leases: list[Lease] = []
        while len(leases) < count:
            more = await backend.lease(queue, count - len(leases), 60.0)
            assert more, "fewer messages are ready than are to be finished"
            leases += more
        ends = [Settlement(lease=lease, action=how, error=error) for lease in leases]
        assert await backend.settle(ends) == []

    ask(url, work)


def count(url: str, state: State, queue: str = QUEUE) -> int:
    return getattr(ask(url, lambda backend: backend.stats(queue)), state.word)


def bodies(url: str, state: State, queue: str = QUEUE) -> list[bytes]:
    found = ask(url, lambda backend: list_messages(backend, queue, Query(state)))
    return sorted(stored.message.body for stored in found)


def file_url(folder: Path, **options: str) -> str:
    given = {"keep_done": "all", "sync": "off", **options}
    return f"file://{folder}?" + "&".join(f"{name}={value}" for name, value in given.items())


def work_off(url: str, messages: int, queue: str = QUEUE) -> None:
    """Enqueue calls and let a worker run them, so that the history tells of it."""
    from qworker import Tasks
    from qworker.worker import Worker
    from qworker.worker.worker_options import WorkerOptions

    tasks = Tasks(url)

    @tasks.task(queue=queue)
    async def noop() -> None:
        """Do nothing."""

    async def work() -> None:
        await tasks.enqueue_many([noop.call() for _ in range(messages)])
        await Worker(tasks, WorkerOptions(burst=True)).run()
        await tasks.aclose()

    asyncio.run(work())
