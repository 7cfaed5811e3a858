"""Priorities on a directory: what overtakes a backlog, and what the working off of mixed priorities costs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from harness import Bench, Figure
from harness.report import median

_URGENT = 9


def measure(bench: Bench) -> list[Figure]:
    """One urgent message behind many others; then as many messages of ten priorities, beside those of one."""
    waiting = bench.size(100_000, 2_000)
    folder = bench.fresh()
    overtaken: int = bench.call(overtake, url=bench.url(folder), waiting=waiting)
    bench.discard(folder)
    count = bench.size(30_000, 1_000)
    times = bench.turns([(name, partial(_worked_off, bench, count, many)) for name, many in (("one", 1), ("many", 10))])
    ratios = [many / one for many, one in zip(times["many"], times["one"], strict=True)]
    return [
        Figure(
            figure="priorities",
            what=f"starts of others before one of priority {_URGENT}, {waiting:,} of priority 0 waiting, one consumer",
            asked=0,
            measured=overtaken,
            unit="",
        ),
        Figure(
            figure="priorities",
            what="CPU of a worker per message, ten priorities / one",
            measured=median(ratios),
            unit="x",
            rounds=ratios,
            note=f"{median(times['many']):.1f} us and {median(times['one']):.1f} us",
        ),
    ]


def _worked_off(bench: Bench, count: int, priorities: int) -> float:
    folder = bench.fresh()
    cpu: float = bench.call(work, url=bench.url(folder), count=count, priorities=priorities)
    bench.discard(folder)
    return cpu


def overtake(given: dict[str, Any]) -> int:
    """Return how many messages start between the enqueue of an urgent one and its start."""
    from harness.work import QUEUE, publish, run_loop
    from qworker import Tasks
    from qworker.worker import Worker, WorkerOptions

    async def run() -> int:
        tasks = Tasks(given["url"])
        started: list[str] = []
        urgent = asyncio.Event()

        @tasks.task(queue=QUEUE)
        async def noop(text: str) -> None:
            started.append(text)
            await asyncio.sleep(0.002)
            if text == "urgent":
                urgent.set()

        await publish(tasks, given["waiting"], 1000)
        worker = Worker(tasks, WorkerOptions(concurrency=1))
        running = asyncio.create_task(worker.run())
        while len(started) < 50:
            await asyncio.sleep(0.001)
        await noop.using(priority=_URGENT).enqueue("urgent")
        before = len(started)
        await urgent.wait()
        worker.drain()
        await running
        return started.index("urgent") - before

    return run_loop(run())


def work(given: dict[str, Any]) -> float:
    """Microseconds of CPU per message of a worker, for messages of some priorities in turns."""
    import msgspec

    from harness.work import QUEUE, drafts, noop_app, run_loop, work_off

    async def run() -> float:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        made = drafts(tasks, given["count"])
        mixed = [msgspec.structs.replace(one, priority=n % given["priorities"]) for n, one in enumerate(made)]
        for first in range(0, len(mixed), 1000):
            await backend.publish(QUEUE, mixed[first : first + 1000])
        _, cpu = await work_off(tasks, given["count"], 100)
        return float(cpu / given["count"] * 1e6)

    return run_loop(run())
