"""A queue that once held a million messages, and is empty: what a wake costs, beside a queue that never did."""

from __future__ import annotations

import asyncio
from typing import Any

from figures.depth import fill
from harness import Bench, Figure
from harness.report import median
from harness.stopwatch import Stopwatch

ASKED = 1.2


def measure(bench: Bench) -> list[Figure]:
    """Directories do not shrink: reading one that was large takes long, however little is in it."""
    once = bench.size(1_000_000, 5_000)
    held, fresh = bench.fresh(), bench.fresh()
    bench.call(fill, url=bench.url(held), depth=once)
    bench.call(drain, url=bench.url(held))
    count = bench.size(200, 30)
    sides = [
        (name, lambda folder=folder: bench.call(work, url=bench.url(folder), count=count))
        for name, folder in (("held", held), ("fresh", fresh))
    ]
    times = bench.turns(sides)
    ratios = [a / b for a, b in zip(times["held"], times["fresh"], strict=True)]
    return [
        Figure(
            figure="held",
            what=f"a wake, queue that once held {once:,} / fresh queue",
            asked=ASKED,
            measured=median(ratios),
            unit="x",
            rounds=ratios,
            note=f"{median(times['held']):.0f} us and {median(times['fresh']):.0f} us"
            " of CPU for each message to an idle worker",
        ),
        *(
            Figure(
                figure="held",
                what=f"CPU of a wake, {what}",
                measured=median(times[name]),
                unit="us",
                rounds=times[name],
            )
            for name, what in (("held", f"queue that once held {once:,}"), ("fresh", "fresh queue"))
        ),
    ]


def drain(given: dict[str, Any]) -> None:
    """Take everything out again, by the worker."""
    from harness.work import QUEUE, noop_app, run_loop, work_off

    async def run() -> None:
        tasks = noop_app(given["url"])
        stats = await (await tasks.backend()).stats(QUEUE)
        await work_off(tasks, stats.ready, 1000)

    run_loop(run())


def work(given: dict[str, Any]) -> float:
    """Microseconds of CPU per message that is published to an idle worker, after a warm-up.

    The mean, so that what happens once a second (the reaper, the rescan) has its share.
    """
    from harness.work import QUEUE, drafts, noop_app, run_loop
    from qworker.worker import Worker
    from qworker.worker.delivery import Delivery

    class _Each:
        def __init__(self) -> None:
            self.done = asyncio.Event()

        def handler_started(self, delivery: Delivery) -> None:
            pass

        def message_settled(self, *_: Any) -> None:
            self.done.set()

    async def run() -> float:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        made = drafts(tasks, 1)
        worker = Worker(tasks)
        watch = _Each()
        worker.observers.append(watch)
        running = asyncio.create_task(worker.run())
        timer = Stopwatch()
        for number in range(given["count"] + 10):
            # Long enough for the worker to look once more, find nothing, and wait.
            await asyncio.sleep(0.02)
            watch.done.clear()
            if number == 10:
                timer = Stopwatch()
            await backend.publish(QUEUE, made)
            await watch.done.wait()
        taken = timer.cpu_seconds
        worker.drain()
        await running
        return float(taken / given["count"] * 1e6)

    return run_loop(run())
