"""From an enqueue in another process, or a foreign rename, to the start of the handler in an idle worker."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import Child
from harness.report import percentile
from harness.stopwatch import Stopwatch

_FOREIGN = "mv"
# Milliseconds between two messages: the worker waits before each. After the longer pauses the processors' caches are
# somebody else's, all the more on a shared host, and the same code takes two or three times as long; so both are told.
SHORT, LONG = (2, 5), (10, 30)


def measure(bench: Bench) -> list[Figure]:
    """Percentiles over a few hundred single messages, each of them sent to an idle worker."""
    count = bench.size(400, 40)
    found: list[Figure] = []
    for how, pause, asked in (
        ("off", SHORT, (0.5, 5.0)),
        ("off", LONG, (None, None)),
        ("full", SHORT, (None, None)),
        (_FOREIGN, SHORT, (5.0, None)),
        (_FOREIGN, LONG, (None, None)),
    ):
        delays, working, publishing = _delays(bench, how, pause, count)
        label = "a foreign mv into queue/" if how == _FOREIGN else f"enqueue in another process, sync={how},"
        for share, most in zip((0.5, 0.99), asked, strict=True):
            found.append(
                Figure(
                    figure="latency",
                    what=f"{label} to handler start, p{share * 100:.0f}",
                    asked=most,
                    measured=percentile(delays, share),
                    unit="ms",
                    note=f"{len(delays)} messages, {pause[0]} to {pause[1]} ms apart",
                )
            )
        if how == "off" and pause == SHORT:
            found += [
                Figure(figure="latency", what=f"CPU of the {who} per message, idle worker", measured=cost, unit="us")
                for who, cost in (("worker", working), ("publisher", publishing))
            ]
    return found


def _delays(bench: Bench, how: str, pause: tuple[int, int], count: int) -> tuple[list[float], float, float]:
    """Milliseconds, and the microseconds of CPU per message of the worker and of the publisher."""
    folder = bench.fresh()
    url = bench.url(folder, "off" if how == _FOREIGN else how)
    # The first ones find everything cold.
    warm = 20
    with Child(worker, {"url": url, "count": count + warm}) as working:
        working.read()
        send = foreign if how == _FOREIGN else enqueue
        queue = str(folder / "spool" / "bench")
        publishing = bench.call(send, url=url, queue=queue, count=count + warm, pause=[ms / 1000 for ms in pause])
        delays, cpu = working.result()
    return delays[warm:], cpu / (count + warm) * 1e6, publishing / (count + warm) * 1e6


def worker(given: dict[str, Any]) -> tuple[list[float], float]:
    """Milliseconds from the time in each message to the start of its handler; and seconds of CPU in all."""
    from harness.work import QUEUE, Finished, run_loop, say
    from qworker import Tasks
    from qworker.worker import Worker

    delays: list[float] = []
    tasks = Tasks(given["url"])

    @tasks.task(queue=QUEUE)
    async def stamp(sent_ns: int) -> None:
        delays.append((time.monotonic_ns() - sent_ns) / 1e6)

    async def run() -> tuple[list[float], float]:
        watch = Finished(given["count"])
        working = Worker(tasks)
        working.observers.append(watch)
        running = asyncio.create_task(working.run())
        await asyncio.sleep(1.0)
        say("ready")
        timer = Stopwatch()
        await watch.all.wait()
        cpu = timer.cpu_seconds
        working.drain()
        await running
        return delays, cpu

    return run_loop(run())


def enqueue(given: dict[str, Any]) -> float:
    """Enqueue with pauses; the clock is read before the call. Seconds of CPU in all."""
    from harness.work import QUEUE, run_loop
    from qworker import Tasks

    tasks = Tasks(given["url"])

    @tasks.task(queue=QUEUE)
    async def stamp(sent_ns: int) -> None:
        raise NotImplementedError

    async def run() -> float:
        timer = Stopwatch()
        for _ in range(given["count"]):
            await asyncio.sleep(random.uniform(*given["pause"]))
            await stamp.enqueue(time.monotonic_ns())
        return timer.cpu_seconds

    return run_loop(run())


def foreign(given: dict[str, Any]) -> float:
    """Write a file beside the queue and rename it into it, as any program may. Seconds of CPU in all."""
    timer = Stopwatch()
    queue = Path(given["queue"])
    assert "qworker" not in sys.modules
    for number in range(given["count"]):
        time.sleep(random.uniform(*given["pause"]))
        sent = time.monotonic_ns()
        (queue / "tmp" / f"drop-{number}").write_text(f'{{"task":"stamp","args":[{sent}]}}')
        os.rename(queue / "tmp" / f"drop-{number}", queue / "queue" / f"drop-{number}")
    return timer.cpu_seconds
