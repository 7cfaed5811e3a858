"""A deep vsqs queue, drained by a worker and by the vsqs package, which lists the directory for each message."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from figures.peers import REQUIREMENTS
from harness import Bench, Figure
from harness.bench import child_environment
from harness.report import median
from peers import environment

ASKED = 500
_SCRIPT = Path(__file__).parents[1] / "peers" / "queues.py"


def measure(bench: Bench) -> list[Figure]:
    """Microseconds per message of both: ours drains it all, the package takes as many as it can in some seconds."""
    depth = bench.size(50_000, 500)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(bench.few):
        ours.append(_drained(bench, depth))
        theirs.append(_package(bench, depth))
    ratio = median(theirs) / median(ours)
    return [
        Figure(
            figure="vsqs",
            what=f"drain at {depth:,} waiting, the vsqs package / qworker",
            asked=ASKED,
            at_most=False,
            measured=ratio,
            unit="x",
            rounds=[package / own for package, own in zip(theirs, ours, strict=True)],
            note=f"{median(theirs) / 1000:.0f} ms and {median(ours):.0f} us a message",
        )
    ]


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    depth = bench.size(50_000, 500)
    return [Figure(figure="vsqs", what=f"drain at {depth:,} waiting", measured=_drained(bench, depth), unit="us")]


def _drained(bench: Bench, depth: int) -> float:
    folder = bench.fresh()
    taken: float = bench.call(drain, folder=str(folder), depth=depth)
    bench.discard(folder)
    return taken


def _package(bench: Bench, depth: int) -> float:
    folder = bench.fresh()
    python = str(environment("queues", REQUIREMENTS))
    command = [python, str(_SCRIPT), "vsqs", str(folder), str(depth), "100", str(bench.size(8, 2))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=sys.stderr, check=True, env=child_environment())
    bench.discard(folder)
    return float(json.loads(done.stdout.splitlines()[-1])["take_us"])


def drain(given: dict[str, Any]) -> float:
    """Microseconds per message: lease + run + ack of the whole backlog."""
    from harness.work import QUEUE, calls, noop_app, run_loop, work_off

    async def run() -> float:
        folder, depth = Path(given["folder"], QUEUE), given["depth"]
        tasks = noop_app(f"vsqs://{given['folder']}")
        await (await tasks.backend()).create(QUEUE)
        body = calls(tasks, 1)[0].draft.body
        first = time.time_ns() // 1000 - depth - 1_000_000
        for number in range(first, first + depth):
            (folder / str(number)).write_bytes(body)
        took, _ = await work_off(tasks, depth, 100)
        return float(took / depth * 1e6)

    return run_loop(run())
