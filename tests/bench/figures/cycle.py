"""The full cycle on a directory, with and without syncs: publish in batches, lease, run and ack with the real worker.

Messages go the way that they go in service: one process publishes while one worker, in another, takes them. What it
costs when a single process first publishes everything and then works it off is told beside that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import Child
from harness.report import median, spread
from harness.stopwatch import Stopwatch

ASKED_RATE = 12_000
# Who: microseconds of CPU per message, a value a round.
Costs = dict[str, list[float]]
# Batch: the least share of the rate without syncs.
ASKED_SHARES = {100: 0.60, 1000: 0.75}


def measure(bench: Bench) -> list[Figure]:
    """Messages per second, and the share of it that is left with syncs; batches are both published and run at once."""
    found: list[Figure] = []
    for batch, asked in ASKED_SHARES.items():
        costs: Costs = {}
        rates = bench.turns([(sync, partial(_at_once, bench, sync, batch, costs)) for sync in ("off", "full")])
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
                note=spread(shares),
            ),
            Figure(
                figure="cycle",
                what=f"messages/s, sync=full, batches of {batch}",
                at_most=False,
                measured=median(rates["full"]),
                unit="/s",
                rounds=rates["full"],
                note=spread(rates["full"]),
            ),
            *(_cost(f"of the {who} per message, sync=off, batches of {batch}", costs[who]) for who in sorted(costs)),
        ]
    return [*found, *_beside(bench)]


def _cost(what: str, costs: list[float]) -> Figure:
    return Figure(
        figure="cycle", what=f"CPU {what}", measured=median(costs), unit="us", rounds=costs, note=spread(costs)
    )


def _beside(bench: Bench) -> list[Figure]:
    """The same in one process, and what that consists of in this hour: the kernel's part, and the history's."""
    costs: list[float] = []
    rates = bench.turns(
        [
            ("all", lambda: _in_turn(bench, in_turn, costs, sync="off")),
            ("silent", lambda: _in_turn(bench, in_turn, [], sync="off&history=0")),
            ("bare", lambda: _in_turn(bench, bare, [])),
        ]
    )
    return [
        Figure(
            figure="cycle",
            what="messages/s, published and then worked off by one process, sync=off, batches of 100",
            at_most=False,
            measured=median(rates["all"]),
            unit="/s",
            rounds=rates["all"],
            note=spread(rates["all"]),
        ),
        _cost("per message, published and then worked off by one process, sync=off, batches of 100", costs),
        *(
            Figure(
                figure="cycle",
                what=what,
                at_most=False,
                measured=median([all_ / other for all_, other in zip(rates["all"], rates[name], strict=True)]),
                unit="x",
                note=f"{median(rates['all']):,.0f}/s and {median(rates[name]):,.0f}/s",
            )
            for name, what in (
                ("silent", "the last / the same without history"),
                ("bare", "the last / its bare system calls"),
            )
        ),
    ]


def _at_once(bench: Bench, sync: str, batch: int, costs: Costs) -> float:
    """Messages per second, from the first publish in one process to the last ack in another.

    Args:
        bench: where.
        sync: the option of the queue.
        batch: messages of one publish, and handlers at once.
        costs: takes the microseconds of CPU per message of both, without syncs.
    """
    folder = bench.fresh()
    given = {"url": bench.url(folder, sync), "count": bench.size(20_000, 1_000), "batch": batch}
    with Child(publish_all, given) as publisher, Child(work_all, given) as worker:
        publisher.read()
        worker.read()
        publisher.tell()
        (first_ns, publishing), (last_ns, working) = publisher.result(), worker.result()
    bench.discard(folder)
    if sync == "off":
        costs.setdefault("publisher", []).append(publishing / given["count"] * 1e6)
        costs.setdefault("worker", []).append(working / given["count"] * 1e6)
    return float(given["count"] / ((last_ns - first_ns) / 1e9))


def _in_turn(
    bench: Bench, function: Callable[[dict[str, Any]], tuple[float, float]], costs: list[float], sync: str = "off"
) -> float:
    folder = bench.fresh()
    seconds, cpu = bench.call(
        function,
        folder=str(folder),
        url=bench.url(folder, sync),
        count=(count := bench.size(20_000, 1_000)),
        batch=100,
    )
    bench.discard(folder)
    costs.append(cpu / count * 1e6)
    return float(count / seconds)


def publish_all(given: dict[str, Any]) -> tuple[int, float]:
    """Publish when told to; the moment of the first, and the seconds of CPU."""
    from harness.work import noop_app, publish, run_loop, say

    async def run() -> tuple[int, float]:
        tasks = noop_app(given["url"])
        await publish(tasks, given["batch"], given["batch"])
        say("ready")
        sys.stdin.readline()
        first_ns, timer = time.monotonic_ns(), Stopwatch()
        await publish(tasks, given["count"], given["batch"])
        return first_ns, timer.cpu_seconds

    return run_loop(run())


def work_all(given: dict[str, Any]) -> tuple[int, float]:
    """Work until everything is settled; the moment of the last, and the seconds of CPU."""
    from harness.work import noop_app, run_loop, say, work_off

    async def run() -> tuple[int, float]:
        tasks = noop_app(given["url"])
        await work_off(tasks, given["batch"], given["batch"])
        say("ready")
        started_ns = time.monotonic_ns()
        working, cpu = await work_off(tasks, given["count"], given["batch"])
        return started_ns + round(working * 1e9), cpu

    return run_loop(run())


def in_turn(given: dict[str, Any]) -> tuple[float, float]:
    """Seconds, and of CPU, in which all messages are published and then worked off, by this process."""
    from harness.work import noop_app, publish, run_loop, work_off

    async def run() -> tuple[float, float]:
        tasks = noop_app(given["url"])
        # The same once in small: the queue, the imports and the caches are there when it counts.
        await publish(tasks, given["batch"], given["batch"])
        await work_off(tasks, given["batch"], given["batch"])
        timer = Stopwatch()
        publishing = await publish(tasks, given["count"], given["batch"])
        working, _ = await work_off(tasks, given["count"], given["batch"])
        return publishing + working, timer.cpu_seconds

    return run_loop(run())


def bare(given: dict[str, Any]) -> tuple[float, float]:
    """The same by system calls alone."""
    from harness.bare import BareQueue

    queue = BareQueue(Path(given["folder"]))
    body = b"x" * 100
    timer = Stopwatch()
    names = [queue.publish(body, durable=False) for _ in range(given["count"])]
    for first in range(0, len(names), given["batch"]):
        held = [queue.lease(name, len(body)) for name in names[first : first + given["batch"]]]
        for file, name in held:
            queue.ack(file, name)
    return timer.seconds, timer.cpu_seconds
