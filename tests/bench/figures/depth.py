"""What a message costs when a million others wait, beside a thousand."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from harness import Bench, Figure
from harness.report import median

ASKED = 1.3


def measure(bench: Bench) -> list[Figure]:
    """Publish + lease + run + ack at a constant depth: as the queue is by default, and without its syncs."""
    deep, count = bench.size(1_000_000, 5_000), bench.size(40_000, 1_000)
    folder = bench.fresh()
    bench.call(fill, url=bench.url(folder), depth=deep)
    shallow: dict[str, list[float]] = {"full": [], "off": []}
    beneath: dict[str, list[float]] = {"full": [], "off": []}
    for _ in range(bench.few):
        for sync, times in shallow.items():
            other = bench.fresh()
            bench.call(fill, url=bench.url(other), depth=1_000)
            times.append(bench.call(work, url=bench.url(other, sync), count=count))
            beneath[sync].append(bench.call(work, url=bench.url(folder, sync), count=count))
            bench.discard(other)
    bench.discard(folder)
    return [
        Figure(
            figure="depth",
            what=f"cost per message, sync={sync}, {deep:,} waiting / 1,000 waiting",
            asked=ASKED if sync == "full" else None,
            measured=median(beneath[sync]) / median(shallow[sync]),
            unit="x",
            rounds=[one / other for one, other in zip(beneath[sync], shallow[sync], strict=True)],
            note=f"{median(beneath[sync]):.0f} us and {median(shallow[sync]):.0f} us, publish included;"
            " the first listing is not",
        )
        for sync in shallow
    ] + [
        Figure(
            figure="depth",
            what=f"cost per message, sync={sync}, {deep:,} waiting",
            measured=median(times),
            unit="us",
            rounds=times,
        )
        for sync, times in beneath.items()
    ]


def fill(given: dict[str, Any]) -> None:
    """Make the queue deep."""
    from harness.work import noop_app, publish, run_loop

    async def run() -> None:
        tasks = noop_app(given["url"])
        step = 50_000
        for done in range(0, given["depth"], step):
            await publish(tasks, min(step, given["depth"] - done), 1000)

    run_loop(run())


def work(given: dict[str, Any]) -> float:
    """Microseconds per message while a publisher keeps the depth as it is, once the worker has got going."""
    from harness.work import QUEUE, Finished, drafts, noop_app, run_loop
    from qworker.worker import Worker

    batch = 100

    class _Pace(Finished):
        """Asks for a batch whenever one is done."""

        def __init__(self, wanted: int) -> None:
            super().__init__(wanted)
            self.due = asyncio.Semaphore(0)
            self.warm_ns = 0

        def message_settled(self, *args: Any) -> None:
            super().message_settled(*args)
            if self.count == self.wanted // 5:
                self.warm_ns = time.perf_counter_ns()
            if self.count % batch == 0:
                self.due.release()

    async def run() -> float:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        made = drafts(tasks, batch)
        worker = Worker(tasks)
        watch = _Pace(given["count"])
        worker.observers.append(watch)
        running = asyncio.create_task(worker.run())
        while watch.count < watch.wanted:
            await watch.due.acquire()
            await backend.publish(QUEUE, made)
        taken = time.perf_counter_ns() - watch.warm_ns
        worker.drain()
        await running
        return taken / (watch.count - watch.wanted // 5) / 1e3

    return run_loop(run())
