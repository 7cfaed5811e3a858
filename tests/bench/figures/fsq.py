"""An fsq queue: drained and filled by qworker, and by fsq 0.2.5 itself, on the same disk in the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import child_environment
from harness.report import median
from harness.running import until
from harness.stopwatch import Stopwatch
from peers import fsq as released

ASKED = 3
_SCRIPT = Path(__file__).parents[1] / "peers" / "fsq_peer.py"
_BATCH = 100


def measure(bench: Bench) -> list[Figure]:
    """Microseconds an item, and how many times as long fsq takes."""
    depth = bench.size(50_000, 3_000)
    found = _rounds(bench, depth, peer=True)

    def ratio(what: str, theirs: str, ours: str, note: str, asked: float | None = ASKED) -> Figure:
        rounds = [one / other for one, other in zip(found[theirs], found[ours], strict=True)]
        times = f"{median(found[theirs]):,.0f} and {median(found[ours]):,.0f} us an item"
        return Figure(
            figure="fsq",
            what=f"{what}, fsq 0.2.5 / qworker",
            asked=asked,
            at_most=False,
            measured=median(rounds),
            unit="x",
            rounds=rounds,
            note=f"{times}; {note}",
        )

    waiting = f"{depth:,} waiting"
    return [
        ratio(
            f"drain at {waiting}",
            "programs",
            "worker",
            "`fsq scan` of a program that does nothing, a worker of such a task",
        ),
        ratio(
            f"the library alone, {waiting}",
            "drain",
            "unsynced",
            "scan() and leases of 100, read and done; no syncs",
            None,
        ),
        ratio(f"the library, durable, {waiting}", "drain", "synced", "the same; qworker syncs, fsq does not", None),
        ratio(f"scan of a program, {waiting}", "programs", "scans", "`fsq scan` and `qworker scan`", None),
        ratio("enqueue, batches of 100", "enqueue", "batches", "both synced; fsq has no batches"),
        ratio("enqueue, one by one", "enqueue", "singles", "both synced; qworker the directory too", None),
    ]


def own(bench: Bench) -> list[Figure]:
    """Microseconds an item, ours alone."""
    depth = bench.size(50_000, 3_000)
    named = {
        "worker": f"drain at {depth:,} waiting, a worker",
        "unsynced": f"the library alone, {depth:,} waiting, no syncs",
        "synced": f"the library, durable, {depth:,} waiting",
        "scans": f"scan of a program, {depth:,} waiting",
        "batches": "enqueue, batches of 100",
        "singles": "enqueue, one by one",
    }
    found = _rounds(bench, depth, peer=False)
    return [
        Figure(figure="fsq", what=what, measured=median(found[name]), unit="us", rounds=found[name])
        for name, what in named.items()
    ]


def _rounds(bench: Bench, depth: int, *, peer: bool) -> dict[str, list[float]]:
    """Microseconds an item of each side, and fsq's among them or not."""
    count, seconds = bench.size(2_000, 100), bench.size(3, 1)
    found: dict[str, list[float]] = {}
    for _ in range(bench.few):
        taken = _deep(bench, depth, 4 * count, seconds, peer=peer) | _enqueued(bench, count, peer=peer)
        for name, us in taken.items():
            found.setdefault(name, []).append(us)
    return found


def _deep(bench: Bench, depth: int, count: int, seconds: float, *, peer: bool) -> dict[str, float]:
    """Microseconds an item, of some thousands that each side takes from one deep queue; every side lists it once."""
    folder = bench.fresh()
    given = {"folder": str(folder), "count": count}
    bench.call(fill, folder=str(folder), depth=depth)
    found: dict[str, float] = {}
    if peer:
        found["drain"] = _theirs("drain", folder, count)
    found |= {
        "unsynced": bench.call(drain, sync="off", **given),
        "synced": bench.call(drain, sync="full", **given),
        "worker": bench.call(work, **given),
    }
    if peer:
        found["programs"] = _scan(_fsq("scan"), folder, seconds, {**released()[1], "FSQ_ROOT": str(folder)})
    ours = [sys.executable, "-m", "qworker", "scan", f"fsq://{folder}"]
    found["scans"] = _scan(ours, folder, seconds, child_environment())
    bench.discard(folder)
    return found


def _enqueued(bench: Bench, count: int, *, peer: bool) -> dict[str, float]:
    folder = bench.fresh()
    given = {"folder": str(folder), "count": count}
    found = {"enqueue": _theirs("enqueue", folder, count)} if peer else {}
    found |= {"batches": bench.call(enqueue, batch=_BATCH, **given), "singles": bench.call(enqueue, batch=1, **given)}
    bench.discard(folder)
    return found


def _theirs(what: str, folder: Path, count: int) -> float:
    python, variables = released()
    command = [python, str(_SCRIPT), what, str(folder), str(count)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=variables).stdout)


def _fsq(program: str) -> list[str]:
    python, variables = released()
    return [python, str(Path(variables["PYTHONPATH"]) / "libexec" / "fsq" / f"{program}.py")]


def _scan(command: list[str], folder: Path, seconds: float, variables: dict[str, str]) -> float:
    """Microseconds a program, of as many as a scan runs in some seconds."""
    done = folder / "bench" / "done"
    before = len(os.listdir(done))
    timer = Stopwatch()
    scan = subprocess.Popen([*command, "bench", "/bin/true"], env=variables, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    # On a busy machine it may have begun none.
    until(lambda: len(os.listdir(done)) > before, "a program that a scan has run")
    scan.terminate()
    scan.wait()
    return timer.seconds / (len(os.listdir(done)) - before) * 1e6


def fill(given: dict[str, Any]) -> None:
    """Make the queue deep."""
    _work(given, "off", lambda backend, draft: _publish(backend, draft, given["depth"], 1000))


def enqueue(given: dict[str, Any]) -> float:
    """Microseconds an item."""
    return _work(given, "full", lambda backend, draft: _publish(backend, draft, given["count"], given["batch"]))


def work(given: dict[str, Any]) -> float:
    """Microseconds an item: a worker leases, runs and acks tasks that do nothing, synced."""
    from harness.work import noop_app, run_loop, work_off

    async def run() -> float:
        took, _ = await work_off(noop_app(f"fsq://{given['folder']}"), given["count"], 100)
        return float(took / given["count"] * 1e6)

    return run_loop(run())


def drain(given: dict[str, Any]) -> float:
    """Microseconds an item: lease, which reads it, and ack."""
    return _work(given, given["sync"], lambda backend, _: _drain(backend, given["count"]))


def _work(given: dict[str, Any], sync: str, step: Any) -> float:
    from harness.work import calls, noop_app, run_loop
    from qworker.backend.registry import open_backend

    async def run() -> float:
        backend = open_backend(f"fsq://{given['folder']}?sync={sync}")
        try:
            await backend.create("bench")
            taken: float = await step(backend, calls(noop_app("memory:"), 1)[0].draft)
            return taken
        finally:
            await backend.aclose()

    return run_loop(run())


async def _publish(backend: Any, draft: Any, count: int, batch: int) -> float:
    timer = Stopwatch()
    for first in range(0, count, batch):
        await backend.publish("bench", [draft] * min(batch, count - first))
    return timer.seconds / count * 1e6


async def _drain(backend: Any, count: int) -> float:
    from qworker.message import SettleAction, Settlement

    timer = Stopwatch()
    done = 0
    while done < count:
        leases = await backend.lease("bench", _BATCH, 30.0)
        assert leases
        refused = await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
        assert not refused
        done += len(leases)
    return timer.seconds / count * 1e6
