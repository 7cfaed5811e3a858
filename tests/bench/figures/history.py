"""What the history costs: the throughput of a worker with it and without it, in turns within one process."""

from __future__ import annotations

import gc
from typing import Any

from harness import Bench, Figure
from harness.report import median
from harness.server import redis_server

# At least this share of the throughput.
ASKED = 0.95


def measure(bench: Bench) -> list[Figure]:
    """The ratio on `file:` and on `redis:`."""
    folder = bench.fresh()
    sizes = {"count": bench.size(5_000, 500), "turns": bench.size(24, 2)}
    found = _figures("file", bench.call(work, url=f"file://{folder}/spool?sync=off", **sizes))
    bench.discard(folder)
    with redis_server(bench.fresh()) as server:
        found += _figures("redis", bench.call(work, url=f"{server.url}?", **sizes))
    return found


def _figures(scheme: str, found: dict[str, dict[str, list[float]]]) -> list[Figure]:
    shares = [on / off for on, off in zip(found["1"]["rate"], found["0"]["rate"], strict=True)]
    cpu = {history: median(sides["cpu_us"]) for history, sides in found.items()}
    return [
        Figure(
            figure="history",
            what=f"messages/s on {scheme}:, with a history / without",
            asked=ASKED,
            at_most=False,
            measured=median(found["1"]["rate"]) / median(found["0"]["rate"]),
            unit="x",
            rounds=shares,
            note=f"CPU {cpu['1']:.1f} us and {cpu['0']:.1f} us; no-op, concurrency 100",
        ),
        Figure(
            figure="history",
            what=f"CPU per message on {scheme}:, with a history",
            measured=cpu["1"],
            unit="us",
            rounds=found["1"]["cpu_us"],
        ),
    ]


def work(given: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Messages per second and microseconds of CPU per message of each turn, by `?history=`."""
    from harness.work import noop_app, publish, run_loop, work_off

    async def run() -> dict[str, dict[str, list[float]]]:
        found: dict[str, dict[str, list[float]]] = {"1": {"rate": [], "cpu_us": []}, "0": {"rate": [], "cpu_us": []}}
        apps = {history: noop_app(f"{given['url']}&history={history}") for history in found}
        count = given["count"]
        # The first turn warms up.
        for turn in range(given["turns"] + 1):
            for history in ("1", "0") if turn % 2 else ("0", "1"):
                await publish(apps[history], count, 1000)
                gc.collect()
                wall, cpu = await work_off(apps[history], count, 100)
                if turn:
                    found[history]["rate"].append(count / wall)
                    found[history]["cpu_us"].append(cpu / count * 1e6)
        return found

    return run_loop(run())
