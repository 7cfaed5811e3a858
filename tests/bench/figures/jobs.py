"""What a caller of a job waits for: its result from an idle worker, and its status in a deep queue."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from harness import Bench, Figure
from harness.report import median

ASKED_RESULT = 3.0
ASKED_DEEP = 1.3


def measure(bench: Bench) -> list[Figure]:
    """Wait for results one by one, and look at a status with many and with few waiting messages."""
    count = bench.size(500, 50)
    folder = bench.fresh()
    times = [bench.call(results, url=bench.url(folder, "off"), count=count) for _ in range(bench.few)]
    bench.discard(folder)
    deep = bench.size(1_000_000, 5_000)
    under, other = bench.fresh(), bench.fresh()
    bench.call(fill, url=bench.url(under, "off"), depth=deep)
    bench.call(fill, url=bench.url(other, "off"), depth=1_000)
    shallow: list[float] = []
    beneath: list[float] = []
    for _ in range(bench.few):
        shallow.append(bench.call(look, url=bench.url(other, "off"), count=count))
        beneath.append(bench.call(look, url=bench.url(under, "off"), count=count))
    bench.discard(under)
    bench.discard(other)
    return [
        Figure(
            figure="jobs",
            what="enqueue to result(), idle worker, p50",
            asked=ASKED_RESULT,
            measured=median(times),
            unit="ms",
            rounds=times,
        ),
        Figure(
            figure="jobs",
            what=f"status, {deep:,} waiting / 1,000 waiting",
            asked=ASKED_DEEP,
            measured=median(beneath) / median(shallow),
            unit="x",
            rounds=[one / two for one, two in zip(beneath, shallow, strict=True)],
            note=f"{median(beneath):.0f} us and {median(shallow):.0f} us",
        ),
    ]


def results(given: dict[str, Any]) -> float:
    """Milliseconds from the enqueue to the value, the median, with a worker in the same process."""
    from harness.work import run_loop
    from qworker import Tasks
    from qworker.worker import Worker, WorkerOptions

    async def run() -> float:
        tasks = Tasks(given["url"])

        @tasks.task(result=60)
        async def add(number: int) -> int:
            return number + 1

        worker = Worker(tasks, WorkerOptions(concurrency=10))
        running = asyncio.create_task(worker.run())
        await (await add.enqueue(0)).result(timeout=30)
        taken: list[float] = []
        for number in range(given["count"]):
            started = time.perf_counter()
            await (await add.enqueue(number)).result(timeout=30)
            taken.append((time.perf_counter() - started) * 1e3)
        worker.drain()
        await running
        await tasks.aclose()
        return median(taken)

    return run_loop(run())


def fill(given: dict[str, Any]) -> None:
    """Enqueue calls that nothing takes."""
    from harness.work import run_loop
    from qworker import Tasks

    async def run() -> None:
        tasks = Tasks(given["url"])
        task = tasks.task(work)
        await tasks.enqueue_many(task.call(number) for number in range(given["depth"]))
        await tasks.aclose()

    run_loop(run())


def look(given: dict[str, Any]) -> float:
    """Microseconds for one look at the status of a ready job."""
    from harness.work import run_loop
    from qworker import Tasks

    async def run() -> float:
        tasks = Tasks(given["url"])
        job = await tasks.task(work).enqueue(0)
        await job.status()
        started = time.perf_counter()
        for _ in range(given["count"]):
            await job.status()
        taken = time.perf_counter() - started
        await tasks.aclose()
        each: float = taken / given["count"] * 1e6
        return each

    return run_loop(run())


async def work(number: int) -> None:
    """Do nothing."""
