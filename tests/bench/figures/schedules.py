"""A tick per second while workers are killed: how many ticks are enqueued twice or never, beside two peers."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness import Bench, Figure
from harness.running import Running, until
from harness.server import RedisServer, redis_server
from peers import environment

_WORKERS = 4
_KILL_EVERY = 2.0
# Seconds until what was enqueued last has run, also what a killed worker held.
_REST = 12.0
_HOUR = 3600
_SCRIPT = Path(__file__).parents[1] / "peers" / "cron_queues.py"
_PEERS = {"arq": ["arq"], "celery": ["celery[redis]"]}

# A line for each run: the tick and the tries before. A tick that is enqueued twice has two lines with no try before.
_APP = """
import os, time
from qworker import Context, Tasks
from qworker.clock import SystemClock

class Stepped(SystemClock):
    def time(self):
        return time.time() + os.stat("step").st_size - HOUR

tasks = Tasks()
tasks.clock = Stepped()
ledger = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

@tasks.every(1)
@tasks.task(queue="bench", max_tries=100)
async def note(ctx: Context) -> None:
    os.write(ledger, f"{int(ctx.tick.timestamp())} {ctx.tries}\\n".encode())
""".replace("HOUR", str(_HOUR))


def measure(bench: Bench) -> list[Figure]:
    """Ticks that are enqueued twice or never; and the same of arq and of two beats of Celery."""
    found = own(bench)
    seconds = bench.size(120, 12)
    with redis_server(bench.fresh()) as server:
        for peer, count in (("arq", 2), ("celery", 2)):
            try:
                counts = _peer(bench, server, peer, seconds)
            except (subprocess.CalledProcessError, OSError) as problem:
                print(f"peers: {peer} does not run here: {problem}", flush=True)
                continue
            what = f"{peer}, {count} {'workers' if peer == 'arq' else 'beats'}, no kills"
            found += _figures(what, counts, seconds, asked=False)
    return found


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    seconds = bench.size(120, 12)
    found: list[Figure] = []
    for redis in (False, True):
        name = "redis:" if redis else "file:"
        found += _figures(f"{name} {_WORKERS} workers, a kill every 2 s", _own(bench, seconds, redis), seconds)
        stepped = _own(bench, seconds, redis, steps=True)
        found.append(_twice(f"{name} the same with steps of the clock by an hour", stepped, asked=True))
    return found


def _figures(what: str, counts: Counter[int], seconds: int, *, asked: bool = True) -> list[Figure]:
    first = min(counts, default=0)
    never = sum(tick not in counts for tick in range(first, first + seconds))
    missing = Figure(
        figure="schedules",
        what=f"{what}: ticks of {seconds} that were never enqueued",
        asked=0 if asked else None,
        measured=never,
        unit="",
    )
    return [_twice(what, counts, asked=asked), missing]


def _twice(what: str, counts: Counter[int], *, asked: bool) -> Figure:
    return Figure(
        figure="schedules",
        what=f"{what}: enqueues beyond the first of a tick",
        asked=0 if asked else None,
        measured=sum(count - 1 for count in counts.values()),
        unit="",
        note=f"{len(counts)} ticks",
    )


def _own(bench: Bench, seconds: int, redis: bool, *, steps: bool = False) -> Counter[int]:
    folder = bench.fresh()
    (folder / "app.py").write_text(_APP)
    _step(folder, 0)
    with ExitStack() as stack:
        url = stack.enter_context(redis_server(folder)).url if redis else bench.url(folder)
        workers: list[Running] = []
        stack.callback(_kill_all, workers)
        workers += [Running(folder, url, "-c", "10") for _ in range(_WORKERS)]
        for worker in workers:
            worker.event("worker_started")
        ledger = folder / "ledger"
        until(lambda: ledger.exists() and ledger.stat().st_size > 0, "the first tick")
        _kill_for(seconds + 2, workers, lambda: Running(folder, url, "-c", "10"), folder if steps else None)
        _step(folder, 0)
        time.sleep(_REST)
        counts = _counted(ledger)
    bench.discard(folder)
    return counts


def _kill_all(workers: Sequence[Running]) -> None:
    for worker in workers:
        worker.kill()


def _step(folder: Path, seconds: int) -> None:
    """Set the clock of the workers: the size of a file says it, which is read in one call."""
    with (folder / "step").open("wb") as file:
        file.truncate(_HOUR + seconds)


def _kill_for(seconds: float, workers: list[Running], start: Callable[[], Running], stepped: Path | None) -> None:
    end, turn = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        if stepped is not None:
            _step(stepped, (0, _HOUR, 0, -_HOUR)[turn % 4])
        time.sleep(_KILL_EVERY)
        place = turn % len(workers)
        workers[place].kill()
        workers[place] = start()
        turn += 1


def _counted(ledger: Path) -> Counter[int]:
    """How often each tick was enqueued: it ran, or it began for the first time several times."""
    runs: Counter[int] = Counter()
    begun: Counter[int] = Counter()
    for line in ledger.read_text().splitlines():
        tick, tries = map(int, line.split())
        runs[tick] += 1
        begun[tick] += tries == 0
    return Counter({tick: max(1, begun[tick]) for tick in runs})


def _peer(bench: Bench, server: RedisServer, peer: str, seconds: int) -> Counter[int]:
    folder = bench.fresh()
    python = environment(f"cron-{peer}", _PEERS[peer])
    processes: list[subprocess.Popen[bytes]] = []
    roles: Sequence[str] = ("worker", "worker") if peer == "arq" else ("worker", "beat", "beat")
    try:
        for number, role in enumerate(roles):
            command = [str(python), "-W", "ignore", str(_SCRIPT), peer, role, server.url, str(folder), str(number)]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        ledger = folder / "ledger"
        until(lambda: ledger.exists() and ledger.stat().st_size > 0, f"the first tick of {peer}")
        time.sleep(seconds + 2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    counts = Counter(int(json.loads(line)) for line in ledger.read_text().splitlines())
    bench.discard(folder)
    return counts
