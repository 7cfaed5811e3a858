"""The app that is measured, and a worker to measure it with; imported only by measured processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from harness.stopwatch import Stopwatch
from qworker import Draft, Tasks
from qworker.kit.gc_freeze import freeze_loaded_modules
from qworker.logs import configure
from qworker.supervisor.event_loop import loop_factory
from qworker.task import Call
from qworker.worker import Worker, WorkerOptions
from qworker.worker.delivery import Delivery

__all__ = ["QUEUE", "Finished", "calls", "drafts", "noop_app", "publish", "run_loop", "say", "work_off"]

QUEUE = "bench"
_BODY = 100

T = TypeVar("T")


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop that `qworker run` would take."""
    configure(json=True, level="warning")
    with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
        return runner.run(coroutine)


def say(value: Any) -> None:
    """Tell the bench something before the result."""
    print(json.dumps(value), flush=True)


def noop_app(url: str) -> Tasks:
    """An app with one async task that does nothing."""
    tasks = Tasks(url)

    @tasks.task(queue=QUEUE)
    async def noop(text: str) -> None:
        pass

    return tasks


def calls(tasks: Tasks, count: int) -> list[Call]:
    """Calls of `noop` with bodies of 100 bytes."""
    noop = tasks["noop"]
    padding = "x" * (_BODY - len(noop.call("").draft.body))
    return [noop.call(padding) for _ in range(count)]


def drafts(tasks: Tasks, count: int) -> list[Draft]:
    """The same for `Backend.publish`."""
    return [call.draft for call in calls(tasks, count)]


async def publish(tasks: Tasks, count: int, batch: int) -> float:
    """Publish `count` calls in batches; the seconds that it took, without the making of the calls."""
    backend = await tasks.backend()
    made = drafts(tasks, count)
    timer = Stopwatch()
    for first in range(0, count, batch):
        await backend.publish(QUEUE, made[first : first + batch])
    return timer.seconds


class Finished:
    """Watches a worker: when the first handler began, when messages were settled, and how it ends."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.count = 0
        self.failed = 0
        self.first_ns = 0
        self.last_ns = 0
        self.all = asyncio.Event()

    def handler_started(self, delivery: Delivery) -> None:
        """A handler begins."""
        if not self.first_ns:
            self.first_ns = time.monotonic_ns()

    def message_settled(self, delivery: Delivery, outcome: str, error: str | None, duration: float) -> None:
        """A message is settled."""
        self.count += 1
        if outcome != "acked":
            self.failed += 1
        if self.count >= self.wanted and not self.last_ns:
            self.last_ns = time.monotonic_ns()
            self.all.set()


async def work_off(tasks: Tasks, count: int, concurrency: int) -> tuple[float, float]:
    """Run a worker as `qworker run` does. Return the seconds and CPU seconds until `count` messages are settled.

    Raises:
        RuntimeError: a message failed: whatever was measured, it was not the work.
    """
    worker = Worker(tasks, WorkerOptions(concurrency=concurrency))
    watch = Finished(count)
    worker.observers.append(watch)
    freeze_loaded_modules()
    timer = Stopwatch()
    running = asyncio.create_task(worker.run())
    waiting = asyncio.create_task(watch.all.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    taken = timer.seconds, timer.cpu_seconds
    waiting.cancel()
    worker.drain()
    await running
    if watch.failed:
        raise RuntimeError(f"{watch.failed} of {watch.count} messages failed")
    return taken
