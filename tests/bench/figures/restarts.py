"""Rolling restarts under load, on a directory and on Redis: workers are replaced one after another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.running import Ledger, Running, until, write_app
from harness.server import redis_server

# Seconds that handlers get when their worker is told to end: in every other restart too few for many of them.
_GRACES = (30.0, 0.05)
# Seconds that a handler takes: so long that the last worker is replaced while messages still run.
_SHORTEST, _LONGEST = 0.02, 0.5


def measure(bench: Bench) -> list[Figure]:
    """What was lost, and what ran more than once, in so many restarts."""
    count = bench.size(10_000, 300)
    folder = bench.fresh()
    found = _restarts(folder, bench.url(folder), bench, count, bench.size(20, 2), "file:")
    folder = bench.fresh()
    with redis_server(folder) as server:
        found += _restarts(folder, server.url, bench, count, bench.size(4, 2), "redis:")
    return found


def _restarts(folder: Path, url: str, bench: Bench, count: int, times: int, name: str) -> list[Figure]:
    write_app(folder)
    ledger = Ledger(folder)
    concurrency = bench.size(100, 10)
    workers = [_started(folder, url, concurrency, _GRACES[0]) for _ in range(bench.size(4, 2))]
    statuses: list[int] = []
    try:
        for turn in range(times):
            for place in range(len(workers)):
                fresh = _started(folder, url, concurrency, _GRACES[(turn + 1) % len(_GRACES)])
                if place == 0:
                    # No sooner: a worker may take longer to start than the others to work all of it off.
                    bench.call(publish, url=url, first=turn * count, count=count, seed=turn)
                old, workers[place] = workers[place], fresh
                statuses.append(old.drain())
            _all_done(ledger, (turn + 1) * count, workers)
        for worker in workers:
            worker.drain()
    finally:
        for worker in workers:
            worker.kill()
    left = bench.call(stored, url=url)
    ledger.read()
    what = f"{name} {times} rolling restarts of {len(workers)} workers, {count:,} messages each"
    return [
        Figure(
            figure="restarts",
            what=f"{what}: lost",
            asked=0,
            measured=count * times - len(ledger.done) + left,
            unit="",
            note=f"{sum(ledger.done.values()):,} done; {statuses.count(4)} of {len(statuses)} workers ran out of grace",
        ),
        Figure(
            figure="restarts",
            what=f"{what}: begun while an earlier run lived",
            asked=0,
            measured=ledger.overlapped,
            unit="",
            note=f"{ledger.cut:,} runs were cut short, and begun again after their end",
        ),
        Figure(figure="restarts", what=f"{what}: begun after one was done", asked=0, measured=ledger.repeated, unit=""),
    ]


def _started(folder: Path, url: str, concurrency: int, grace: float) -> Running:
    worker = Running(folder, url, "-c", str(concurrency), "--shutdown-timeout", str(grace))
    try:
        worker.event("worker_started")
    except BaseException:
        worker.kill()
        raise
    return worker


def _all_done(ledger: Ledger, wanted: int, workers: Sequence[Running]) -> None:
    def done() -> bool:
        ledger.read()
        return len(ledger.done) >= wanted

    def check() -> None:
        if not all(worker.alive for worker in workers):
            raise RuntimeError("a worker has ended by itself")

    until(done, f"{wanted} messages done", check)


def publish(given: dict[str, Any]) -> None:
    """Publish numbered calls of `step`, each with the time that it takes."""
    from harness.work import QUEUE, run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend

    draw = random.Random(given["seed"])

    async def run() -> None:
        backend = open_backend(given["url"])
        made = [
            Draft(body=b'{"task":"step","args":[%d,%.3f]}' % (number, draw.uniform(_SHORTEST, _LONGEST)))
            for number in range(given["first"], given["first"] + given["count"])
        ]
        for first in range(0, len(made), 1000):
            await backend.publish(QUEUE, made[first : first + 1000])
        await backend.aclose()

    run_loop(run())


def stored(given: dict[str, Any]) -> int:
    """How many messages are left in any state but done."""
    from harness.work import QUEUE, run_loop
    from qworker.backend.registry import open_backend

    async def run() -> int:
        backend = open_backend(given["url"])
        stats = await backend.stats(QUEUE)
        await backend.aclose()
        return stats.ready + stats.leased + stats.delayed + stats.failed

    return run_loop(run())
