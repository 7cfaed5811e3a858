"""The CPU that a worker needs for a message besides the handler, on the memory backend."""

from __future__ import annotations

from typing import Any

from harness import Bench, Figure
from harness.report import median, spread

ASKED_US = 18.0


def measure(bench: Bench) -> list[Figure]:
    """CPU per message in one worker process at concurrency 100."""
    count = bench.size(100_000, 5_000)
    rounds = [bench.call(work, count=count, concurrency=100) for _ in range(bench.rounds)]
    return [
        Figure(
            figure="overhead",
            what="CPU per message on memory:, no-op async handler, concurrency 100",
            asked=ASKED_US,
            measured=median(rounds),
            unit="us",
            rounds=rounds,
            note=spread(rounds),
        )
    ]


def work(given: dict[str, Any]) -> float:
    """Microseconds of CPU per message, after a warm-up."""
    from harness.work import noop_app, publish, run_loop, work_off

    async def run() -> float:
        tasks = noop_app("memory://bench")
        warm = given["count"] // 10
        await publish(tasks, warm, 1000)
        await work_off(tasks, warm, given["concurrency"])
        await publish(tasks, given["count"], 1000)
        _, cpu = await work_off(tasks, given["count"], given["concurrency"])
        return float(cpu / given["count"] * 1e6)

    return run_loop(run())
