"""Publish + lease + ack beside other file and SQLite queues, at several depths, on the same disk in the same run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from figures.depth import fill
from harness import Bench, Figure
from harness.bench import child_environment
from harness.report import median
from harness.stopwatch import Stopwatch
from peers import environment, fsq

REQUIREMENTS = ["huey", "persist-queue", "litequeue", "dirq", "vsqs"]
# Synced before a publish returns; the others may lose what they have acknowledged at a power cut.
DURABLE = ("SqliteHuey", "persist-queue SQLiteAckQueue")
OTHERS = ("litequeue", "dirq", "vsqs", "fsq")
_SCRIPT = Path(__file__).parents[1] / "peers" / "queues.py"


def measure(bench: Bench) -> list[Figure]:
    """How many times as long the fastest durable peer takes, and everybody's times for information."""
    found: list[Figure] = []
    for depth in _depths(bench):
        sides = _own_sides(bench, depth)
        sides += [(name, lambda name=name, depth=depth: _peer(bench, name, depth)) for name in (*DURABLE, *OTHERS)]
        times = _rounds(bench, sides)
        fastest = min((name for name in DURABLE if name in times), key=lambda name: median(times[name]))
        ours = median(times["qworker"])
        found.append(
            Figure(
                figure="peers",
                what=f"fastest durable peer / qworker, {depth:,} waiting",
                asked=1.0,
                at_most=False,
                measured=median(times[fastest]) / ours,
                unit="x",
                note=f"{fastest}; qworker sync=full, batches of 100",
            )
        )
        found += _told(depth, times)
    return found


def own(bench: Bench) -> list[Figure]:
    """Our times alone."""
    return [one for depth in _depths(bench) for one in _told(depth, _rounds(bench, _own_sides(bench, depth)))]


def _depths(bench: Bench) -> tuple[int, ...]:
    return (200,) if bench.quick else (1_000, 10_000, 50_000)


def _own_sides(bench: Bench, depth: int) -> list[tuple[str, Any]]:
    return [
        ("qworker", lambda: _ours(bench, depth, 100)),
        ("qworker, one by one", lambda: _ours(bench, depth, 1)),
    ]


def _told(depth: int, times: dict[str, list[float]]) -> list[Figure]:
    return [
        Figure(
            figure="peers",
            what=f"{name}, {depth:,} waiting",
            measured=median(taken),
            unit="us",
            rounds=taken,
            note="durable" if name.startswith("qworker") or name in DURABLE else "not synced, or in part",
        )
        for name, taken in times.items()
    ]


def _rounds(bench: Bench, sides: list[tuple[str, Any]]) -> dict[str, list[float]]:
    """Everyone in turns; a peer that cannot run here is told and left out."""
    times: dict[str, list[float]] = {}
    broken: set[str] = set()
    for _ in range(bench.few):
        for name, side in sides:
            if name in broken:
                continue
            try:
                times.setdefault(name, []).append(side())
            except PeerFailed as problem:
                print(f"peers: {name} does not run here: {problem}", flush=True)
                broken.add(name)
                times.pop(name, None)
    return times


class PeerFailed(Exception):
    """A peer that cannot be measured on this machine."""


def _peer(bench: Bench, name: str, depth: int) -> float:
    python, variables = str(environment("queues", REQUIREMENTS)), child_environment()
    if name == "fsq":
        python, variables = fsq()
    folder = bench.fresh()
    seconds = bench.size(5, 2)
    command = [python, str(_SCRIPT), name, str(folder), str(depth), str(bench.size(2_000, 100)), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    bench.discard(folder)
    if done.returncode != 0:
        raise PeerFailed((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["publish_us"] + found["take_us"])


def _ours(bench: Bench, depth: int, batch: int) -> float:
    folder = bench.fresh()
    bench.call(fill, url=bench.url(folder), depth=depth)
    count = bench.size(2_000 if batch > 1 else 500, 100)
    taken: float = bench.call(work, url=bench.url(folder, "full"), count=count, batch=batch)
    bench.discard(folder)
    return taken


def work(given: dict[str, Any]) -> float:
    """Microseconds per message of publish, and then of lease + ack, through the backend alone as the peers'."""
    from harness.work import QUEUE, drafts, noop_app, run_loop
    from qworker.backend import Backend
    from qworker.message import SettleAction, Settlement

    count, batch = given["count"], given["batch"]

    async def put(backend: Backend, made: list[Any], messages: int) -> float:
        timer = Stopwatch()
        for first in range(0, messages, batch):
            await backend.publish(QUEUE, made[first : first + batch])
        return timer.seconds

    async def take(backend: Backend, messages: int) -> float:
        timer = Stopwatch()
        done = 0
        while done < messages:
            leases = await backend.lease(QUEUE, batch, 30.0)
            assert leases
            refused = await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
            assert not refused
            done += len(leases)
        return timer.seconds / done * messages

    async def run() -> float:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        made = drafts(tasks, max(count, batch))
        await put(backend, made, batch)
        await take(backend, batch)
        return float((await put(backend, made, count) + await take(backend, count)) / count * 1e6)

    return run_loop(run())
