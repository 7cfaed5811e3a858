"""What a worker costs that has nothing to do."""

from __future__ import annotations

import asyncio
from typing import Any

from harness import Bench, Figure
from harness.stopwatch import Stopwatch


def measure(bench: Bench) -> list[Figure]:
    """The share of one core that an idle worker takes, on a directory."""
    folder = bench.fresh()
    share = bench.call(work, url=bench.url(folder, "full"), seconds=bench.size(30, 3))
    return [
        Figure(
            figure="idle",
            what="CPU of an idle worker, in % of a core",
            asked=1.0,
            measured=share,
            unit="%",
            note="file:",
        )
    ]


def work(given: dict[str, Any]) -> float:
    """Percent of a core, after a worker has been busy and then idle for a second."""
    from harness.work import Finished, noop_app, publish, run_loop
    from qworker.worker import Worker

    async def run() -> float:
        tasks = noop_app(given["url"])
        watch = Finished(100)
        worker = Worker(tasks)
        worker.observers.append(watch)
        await publish(tasks, 100, 100)
        running = asyncio.create_task(worker.run())
        await watch.all.wait()
        await asyncio.sleep(1.0)
        timer = Stopwatch()
        await asyncio.sleep(given["seconds"])
        share = timer.cpu_seconds / timer.seconds * 100
        worker.drain()
        await running
        return share

    return run_loop(run())
