"""The full cycle on a directory: publish in batches, lease, run and ack through the real worker, with and without syncs."""

from __future__ import annotations

import time
from pathlib import Path
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
        rates = bench.turns(
            [(sync, lambda sync=sync, batch=batch: _cycle(bench, sync, batch)) for sync in ("off", "full")]
        )
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
    return [*found, *_beside(bench)]


def _beside(bench: Bench) -> list[Figure]:
    """What the rate consists of, in this hour: the kernel's part, and the history's."""
    rates = bench.turns(
        [
            ("all", lambda: _cycle(bench, "off", 100)),
            ("silent", lambda: _cycle(bench, "off&history=0", 100)),
            ("bare", lambda: _bare(bench)),
        ]
    )
    return [
        Figure(
            figure="cycle",
            what=what,
            measured=median([all_ / other for all_, other in zip(rates["all"], rates[name], strict=True)]),
            unit="x",
            note=f"{median(rates['all']):,.0f}/s and {median(rates[name]):,.0f}/s",
        )
        for name, what in (
            ("silent", "messages/s / without history, sync=off, batches of 100"),
            ("bare", "messages/s / by the bare system calls, sync=off, batches of 100"),
        )
    ]


def _cycle(bench: Bench, sync: str, batch: int) -> float:
    folder = bench.fresh()
    rate: float = bench.call(work, url=bench.url(folder, sync), count=bench.size(20_000, 1_000), batch=batch)
    bench.discard(folder)
    return rate


def _bare(bench: Bench) -> float:
    folder = bench.fresh()
    rate: float = bench.call(bare_work, folder=str(folder), count=bench.size(20_000, 1_000), batch=100)
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


def bare_work(given: dict[str, Any]) -> float:
    """The same by system calls alone."""
    from harness.bare import BareQueue

    queue = BareQueue(Path(given["folder"]))
    body = b"x" * 100
    began = time.perf_counter()
    names = [queue.publish(body, durable=False) for _ in range(given["count"])]
    for first in range(0, len(names), given["batch"]):
        held = [queue.lease(name, len(body)) for name in names[first : first + given["batch"]]]
        for file, name in held:
            queue.ack(file, name)
    return float(given["count"] / (time.perf_counter() - began))
