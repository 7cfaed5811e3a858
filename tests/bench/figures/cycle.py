"""The full cycle on a directory: publish in batches, lease, run and ack through the real worker, with and without syncs."""

from __future__ import annotations

from typing import Any

from harness import Bench, Figure
from harness.report import median, spread

ASKED_RATE = 12_000
# Batch: the least share of the rate without syncs.
ASKED_SHARES = {100: 0.60, 1000: 0.75}


def measure(bench: Bench) -> list[Figure]:
    """Messages per second, and the share of it that is left with syncs; batches are both published and run at once."""
    found: list[Figure] = []
    for batch, asked in ASKED_SHARES.items():
        sides = [(sync, lambda sync=sync, batch=batch: _cycle(bench, sync, batch)) for sync in ("off", "full")]
        rates = bench.turns(sides)
        shares = [full / off for full, off in zip(rates["full"], rates["off"], strict=True)]
        found += [
            Figure(
                figure="cycle",
                what=f"messages/s, sync=off, batches of {batch}",
                asked=ASKED_RATE if batch == 100 else None,
                at_most=False,
                measured=median(rates["off"]),
                unit="/s",
                rounds=rates["off"],
                note=spread(rates["off"]),
            ),
            Figure(
                figure="cycle",
                what=f"sync=full / sync=off, batches of {batch}",
                asked=asked,
                at_most=False,
                measured=median(shares),
                unit="x",
                rounds=shares,
                note=f"{median(rates['full']):,.0f}/s; {spread(shares)}",
            ),
        ]
    return found


def _cycle(bench: Bench, sync: str, batch: int) -> float:
    folder = bench.fresh()
    rate: float = bench.call(work, url=bench.url(folder, sync), count=bench.size(20_000, 1_000), batch=batch)
    bench.discard(folder)
    return rate


def work(given: dict[str, Any]) -> float:
    """Messages per second, from the first publish to the last ack."""
    from harness.work import noop_app, publish, run_loop, work_off

    async def run() -> float:
        tasks = noop_app(given["url"])
        # The same once in small: the queue, the imports and the caches are there when it counts.
        await publish(tasks, given["batch"], given["batch"])
        await work_off(tasks, given["batch"], given["batch"])
        publishing = await publish(tasks, given["count"], given["batch"])
        working, _ = await work_off(tasks, given["count"], given["batch"])
        return float(given["count"] / (publishing + working))

    return run_loop(run())
