"""Messages that kill their worker, among many that do not: what is left of the throughput, and who runs how often."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.memory_group import memory_group
from harness.report import median, spread
from harness.running import Running, until
from harness.server import redis_server

ASKED_RATE = 0.8
_TRIES = 3
_CONCURRENCY = "50"
# Bytes that the two workers and their children may have before the kernel kills the largest: a third of it is in use.
_MEMORY = 768 << 20

_APP = """
import asyncio, os, signal, time
from qworker import Tasks

tasks = Tasks()
starts = os.open("starts", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
# Only suspects run in a process of their own: messages that a worker held when it died.
with open("/proc/self/cmdline") as command:
    begin = "suspect" if "isolated_main" in command.read() else "begin"

def note(what, number):
    # One write: the lines of several processes do not mix.
    os.write(starts, f"{what} {number} {time.monotonic_ns()}\\n".encode())

@tasks.task(queue="bench", max_tries=TRIES)
async def step(number: int, seconds: float) -> None:
    note(begin, number)
    await asyncio.sleep(seconds)
    note("done", number)

@tasks.task(queue="bench", max_tries=TRIES)
async def killed(number: int) -> None:
    note("poison", number)
    os.kill(os.getpid(), signal.SIGKILL)

@tasks.task(queue="bench", max_tries=TRIES)
async def memory(number: int) -> None:
    note("poison", number)
    kept = []
    while True:
        kept.append(b"x" * 10_000_000)
        note("dying", number)
""".replace("TRIES", str(_TRIES))


@dataclass(frozen=True)
class _Load:
    """Messages of one length, and how they are worked off."""

    count: int
    seconds: float
    # One supervisor with two workers, or two workers that are started again by nobody but the bench.
    supervised: bool = True
    redis: bool = False

    @property
    def name(self) -> str:
        workers = "-w 2" if self.supervised else "two of -w 1"
        return f"{'redis:' if self.redis else 'file:'} {self.count:,} of {self.seconds:g} s, {workers}"


@dataclass(frozen=True)
class _Run:
    rate: float
    # Poison that did not start exactly `max_tries` times and fail; starts of others that no death explains.
    wrong_poison: int
    extra_starts: int
    lost: int


def measure(bench: Bench) -> list[Figure]:
    """The rate after the first death, relative to a run without poison; and starts that should not be."""
    short, long = bench.size(20_000, 1_000), bench.size(4_000, 200)
    with memory_group(_MEMORY) as starter:
        if starter is None:
            print("no memory control group can be made here: death by memory is not measured ...", end=" ", flush=True)
        kinds = ("killed",) if starter is None else ("killed", "memory")
        found = _compared(bench, _Load(short, 0.1), kinds, starter or ())
        found += _compared(bench, _Load(long, 1.0), kinds, starter or ())
    found += _compared(bench, _Load(short, 0.1, supervised=False), ("killed",), ())
    return found + _compared(bench, _Load(short, 0.1, redis=True), ("killed",), ())


def _compared(bench: Bench, load: _Load, kinds: Sequence[str], starter: Sequence[str]) -> list[Figure]:
    runs: dict[str, list[_Run]] = defaultdict(list)
    for seed in range(bench.few):
        runs["no poison"].append(_run(bench, load, "killed", 0, seed, starter))
        for kind in kinds:
            for poison in (1,) if bench.quick else (1, 5):
                runs[f"{poison} poison ({kind})"].append(_run(bench, load, kind, poison, seed, starter))
    plain = [run.rate for run in runs["no poison"]]
    everything = [run for name in runs for run in runs[name]]
    return [
        *(
            _rate_figure(f"{load.name}, {name}", [run.rate for run in runs[name]], plain)
            for name in runs
            if name != "no poison"
        ),
        *(
            Figure(figure="poison", what=f"{load.name}: {what}", asked=0, measured=count, unit="")
            for what, count in (
                (
                    f"poison that did not fail after exactly {_TRIES} starts",
                    sum(run.wrong_poison for run in everything),
                ),
                ("starts of others with no death since their last one", sum(run.extra_starts for run in everything)),
                ("lost", sum(run.lost for run in everything)),
            )
        ),
    ]


def _rate_figure(what: str, rates: list[float], plain: list[float]) -> Figure:
    ratios = [one / other for one, other in zip(rates, plain, strict=True)]
    return Figure(
        figure="poison",
        what=f"{what}: rate after the first death / without poison",
        asked=ASKED_RATE,
        at_most=False,
        measured=median(ratios),
        unit="x",
        rounds=ratios,
        note=f"{median(rates):,.0f}/s and {median(plain):,.0f}/s; {spread(ratios)}",
    )


def _run(bench: Bench, load: _Load, kind: str, poison: int, seed: int, starter: Sequence[str]) -> _Run:
    folder = bench.fresh()
    (folder / "app.py").write_text(_APP)
    with ExitStack() as stack:
        url = stack.enter_context(redis_server(folder)).url if load.redis else bench.url(folder)
        bench.call(publish, url=url, count=load.count, seconds=load.seconds, kind=kind, poison=poison, seed=seed)
        workers = _Workers(folder, url, load.supervised, starter)
        stack.callback(workers.stop)
        _wait_for_silence(folder / "starts", load, workers)
        until(lambda: bench.call(left, url=url) == 0, f"{load.name}: nothing is left", workers.keep)
        failed: list[int] = bench.call(failures, url=url)
        workers.stop()
    run = _counted(_Story(folder), load.count, poison, failed)
    bench.discard(folder)
    return run


class _Workers:
    """Two workers at once, whatever happens to them."""

    def __init__(self, folder: Path, url: str, supervised: bool, starter: Sequence[str]) -> None:
        options = ("-c", _CONCURRENCY, *(("-w", "2") if supervised else ()))
        self._start = partial(Running, folder, url, *options, starter=starter)
        self._running = [self._start() for _ in range(1 if supervised else 2)]
        self._may_die = not supervised

    def keep(self) -> None:
        """Start again what has died, as a service manager does."""
        for place, worker in enumerate(self._running):
            if not worker.alive:
                if not self._may_die:
                    raise RuntimeError("the supervisor has ended")
                self._running[place] = self._start()

    def stop(self) -> None:
        """End them."""
        for worker in self._running:
            if worker.alive:
                worker.drain()


def _wait_for_silence(path: Path, load: _Load, workers: _Workers) -> None:
    """Wait until handlers neither start nor end any more, at little cost: what is left in the store is asked later."""
    size, since = 0, time.monotonic()

    def is_silent() -> bool:
        nonlocal size, since
        workers.keep()
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        return size > 0 and time.monotonic() - since > 3 + 2 * load.seconds

    until(is_silent, f"{load.name}: all done", patience=600.0)


class _Story:
    """What the handlers have written: when messages started, who ended, and who killed its process."""

    def __init__(self, folder: Path) -> None:
        self.starts_ns: dict[int, list[int]] = defaultdict(list)
        self.done_ns: dict[int, int] = {}
        # Messages that a worker held when it died.
        self.suspects: set[int] = set()
        self.poison: Counter[int] = Counter()
        # When each poison message killed a worker: in its first run. Those that follow kill the process of a suspect.
        self.deaths_ns: dict[int, int] = {}
        for line in (folder / "starts").read_text().splitlines():
            what, number, at = line.split()
            self._take(what, int(number), int(at))

    def _take(self, what: str, number: int, at: int) -> None:
        if what == "done":
            self.done_ns[number] = at
        elif what in {"poison", "dying"}:
            self.poison[number] += what == "poison"
            if self.poison[number] == 1:
                self.deaths_ns[number] = at
        else:
            self.starts_ns[number].append(at)
            if what == "suspect":
                self.suspects.add(number)

    def unexplained(self, starts: list[int]) -> int:
        """How many starts of a message follow its last one without a death of a worker between."""
        deaths = self.deaths_ns.values()
        return sum(not any(one < death < next_one for death in deaths) for one, next_one in pairwise(starts))


def _counted(story: _Story, count: int, poison: int, failed: list[int]) -> _Run:
    begun = min(story.deaths_ns.values() or [starts[0] for starts in story.starts_ns.values()])
    untouched = [at for number, at in story.done_ns.items() if at > begun and number not in story.suspects]
    return _Run(
        rate=len(untouched) / ((max(untouched) - begun) / 1e9),
        wrong_poison=poison - sum(story.poison[number] == _TRIES for number in failed),
        extra_starts=sum(map(story.unexplained, story.starts_ns.values())),
        lost=count - len(story.done_ns),
    )


def publish(given: dict[str, Any]) -> None:
    """Publish the messages, with poison at random places of the first three quarters: something must follow it."""
    from harness.work import QUEUE, run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend

    draw = random.Random(given["seed"])
    bodies = [b'{"task":"step","args":[%d,%g]}' % (number, given["seconds"]) for number in range(given["count"])]
    for number in range(given["poison"]):
        body = b'{"task":"%s","args":[%d]}' % (given["kind"].encode(), given["count"] + number)
        bodies.insert(draw.randrange(given["count"] * 3 // 4), body)

    async def run() -> None:
        backend = open_backend(given["url"])
        for first in range(0, len(bodies), 1000):
            await backend.publish(QUEUE, [Draft(body=body) for body in bodies[first : first + 1000]])
        await backend.aclose()

    run_loop(run())


def left(given: dict[str, Any]) -> int:
    """How many messages are neither done nor failed."""
    from harness.work import QUEUE, run_loop
    from qworker.backend.registry import open_backend

    async def run() -> int:
        backend = open_backend(given["url"])
        stats = await backend.stats(QUEUE)
        await backend.aclose()
        return stats.ready + stats.leased + stats.delayed

    return run_loop(run())


def failures(given: dict[str, Any]) -> list[int]:
    """The numbers of the failed messages."""
    import json

    from harness.work import QUEUE, run_loop
    from qworker.backend.registry import open_backend
    from qworker.message import Query, State

    async def run() -> list[int]:
        backend = open_backend(given["url"])
        pages = [page async for page in backend.browse(QUEUE, Query(State.FAILED))]
        await backend.aclose()
        return [json.loads(stored.message.body)["args"][0] for page in pages for stored in page]

    return run_loop(run())
