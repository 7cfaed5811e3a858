"""`rfq:` beside the rfq package itself, on one Redis in one run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import child_environment
from harness.report import median, spread
from harness.server import RedisServer, redis_server
from harness.stopwatch import Stopwatch
from peers import environment

ASKED = 4.0
# The package needs an old client, and that one needs distutils.
REQUIREMENTS = ["rfq==1.4.0", "redis>=3.5.3,<4", "setuptools<81"]
BATCH = 100
_SCRIPT = Path(__file__).parents[1] / "peers" / "rfq_queue.py"

Times = dict[str, float]


def measure(bench: Bench) -> list[Figure]:
    """How many times as long the package takes per message, each at its own best and one by one."""
    with redis_server(bench.fresh()) as server:
        found: dict[str, list[Times]] = {"qworker": [], "qworker, one by one": [], "rfq": [], "rfq, batches": []}
        for turn in range(bench.rounds + 1):
            sides: dict[str, Any] = {
                "qworker": lambda: _ours(bench, server, BATCH),
                "rfq": lambda: _theirs(bench, server, 1),
                "rfq, batches": lambda: _theirs(bench, server, BATCH),
                "qworker, one by one": lambda: _ours(bench, server, 1),
            }
            for name, side in sides.items():
                server.ask("FLUSHALL")
                taken = side()
                # The first pass does not count.
                if turn or bench.quick:
                    found[name].append(taken)
    return [
        _ratio("publish", found, "rfq", "qworker", ASKED, f"rfq's publish / batches of {BATCH}"),
        _ratio("consume", found, "rfq", "qworker", ASKED, f"rfq's consume and done / lease and ack, {BATCH} at once"),
        _ratio("publish", found, "rfq", "qworker, one by one", None, "rfq's publish / awaited one by one"),
        _ratio("consume", found, "rfq", "qworker, one by one", None, "rfq's consume and done / one by one"),
        _ratio("publish", found, "rfq, batches", "qworker", None, f"both in batches of {BATCH}"),
    ]


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    with redis_server(bench.fresh()) as server:
        return [
            Figure(
                figure="rfq",
                what=f"{'consume + commit' if what == 'consume' else what} of qworker, {how}",
                measured=taken,
                unit="us",
            )
            for how, batch in ((f"batches of {BATCH}", BATCH), ("one by one", 1))
            for what, taken in _ours(bench, server, batch).items()
        ]


def _ratio(what: str, found: dict[str, list[Times]], theirs: str, ours: str, asked: float | None, note: str) -> Figure:
    ratios = [one[what] / other[what] for one, other in zip(found[theirs], found[ours], strict=True)]
    us = {name: median([one[what] for one in found[name]]) for name in (theirs, ours)}
    return Figure(
        figure="rfq",
        what=f"{'consume + commit' if what == 'consume' else what}: {theirs} / {ours}",
        asked=asked,
        at_most=False,
        measured=median(ratios),
        unit="x",
        rounds=ratios,
        note=f"{note}: {us[theirs]:.0f} us and {us[ours]:.1f} us; {spread(ratios)}",
    )


def _theirs(bench: Bench, server: RedisServer, batch: int) -> Times:
    python = environment("rfq", REQUIREMENTS)
    count = bench.size(5_000, 200)
    command = [str(python), "-W", "ignore", str(_SCRIPT), str(server.port), str(count), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
    found: Times = json.loads(done.stdout.splitlines()[-1])
    return found


def _ours(bench: Bench, server: RedisServer, batch: int) -> Times:
    url = server.url.replace("redis:", "rfq:")
    count = bench.size(40_000 if batch > 1 else 5_000, 200)
    found: Times = bench.call(work, url=url, count=count, batch=batch)
    return found


def work(given: dict[str, Any]) -> Times:
    """Microseconds per message of publish, and of lease + ack, through the backend alone as the package's."""
    from harness.work import QUEUE, run_loop
    from qworker.backend.registry import open_backend
    from qworker.message import Draft, SettleAction, Settlement

    count, batch = given["count"], given["batch"]

    async def run() -> Times:
        backend = open_backend(given["url"])
        made = [Draft(body=b"x" * 100) for _ in range(batch)]

        async def publish(messages: int) -> float:
            timer = Stopwatch()
            for _ in range(0, messages, batch):
                await backend.publish(QUEUE, made)
            return timer.seconds / messages * 1e6

        async def consume(messages: int) -> float:
            timer = Stopwatch()
            for _ in range(0, messages, batch):
                leases = await backend.lease(QUEUE, batch, 30.0)
                assert len(leases) == batch
                assert not await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
            return timer.seconds / messages * 1e6

        await publish(batch)
        await consume(batch)
        return {"publish": await publish(count), "consume": await consume(count)}

    return run_loop(run())
