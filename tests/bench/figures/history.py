"""What the history costs: CPU of a worker per message with it and without it, in turns within one process."""

from __future__ import annotations

import gc
from typing import Any

from harness import Bench, Figure
from harness.report import median
from harness.server import redis_server

# At most this share of the worker's CPU.
ASKED = 1.05


def measure(bench: Bench) -> list[Figure]:
    """The ratio on `file:` and on `redis:`."""
    folder = bench.fresh()
    sizes = {"count": bench.size(5_000, 500), "turns": bench.size(24, 2)}
    found = [_figure("file", bench.call(work, url=f"file://{folder}/spool?sync=off", **sizes))]
    bench.discard(folder)
    with redis_server(bench.fresh()) as server:
        found.append(_figure("redis", bench.call(work, url=f"{server.url}?", **sizes)))
    return found


def _figure(scheme: str, cpu: dict[str, list[float]]) -> Figure:
    ratios = [on / off for on, off in zip(cpu["1"], cpu["0"], strict=True)]
    return Figure(
        figure="history",
        what=f"CPU of the worker per message on {scheme}:, with a history / without",
        asked=ASKED,
        measured=median(cpu["1"]) / median(cpu["0"]),
        unit="x",
        rounds=ratios,
        note=f"{median(cpu['1']):.1f} us and {median(cpu['0']):.1f} us; no-op, concurrency 100",
    )


def work(given: dict[str, Any]) -> dict[str, list[float]]:
    """Microseconds of CPU per message of each turn, by `?history=`."""
    from harness.work import noop_app, publish, run_loop, work_off

    async def run() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"1": [], "0": []}
        apps = {history: noop_app(f"{given['url']}&history={history}") for history in found}
        count = given["count"]
        # The first turn warms up.
        for turn in range(given["turns"] + 1):
            for history in ("1", "0") if turn % 2 else ("0", "1"):
                await publish(apps[history], count, 1000)
                gc.collect()
                _, cpu = await work_off(apps[history], count, 100)
                if turn:
                    found[history].append(cpu / count * 1e6)
        return found

    return run_loop(run())
