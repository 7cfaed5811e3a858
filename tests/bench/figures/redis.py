"""The Redis backend beside other task queues, on one server, in one run."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from figures import depth
from harness import Bench, Figure
from harness.bench import child_environment
from harness.report import median, spread
from harness.server import RedisServer, redis_server
from harness.stopwatch import Stopwatch
from peers import environment

# Each with what it needs; in environments of their own, since they do not agree on one redis-py.
PEERS = {
    "repid": ["repid[redis]", "typing_extensions", "hiredis", "uvloop"],
    "arq": ["arq", "hiredis", "uvloop"],
    "saq": ["saq[redis,hiredis]", "typing_extensions", "uvloop"],
    "taskiq": ["taskiq-redis", "hiredis", "uvloop"],
    "streaq": ["streaq", "uvloop"],
    "dramatiq": ["dramatiq[redis]", "hiredis", "uvloop"],
    "huey": ["huey", "redis", "hiredis", "uvloop"],
}
ASYNCIO = ("repid", "arq", "saq", "taskiq", "streaq")
# huey loses what a crash interrupts.
AT_LEAST_ONCE = (*ASYNCIO, "dramatiq")
_SCRIPT = Path(__file__).parents[1] / "peers" / "redis_queues.py"

Times = dict[str, list[float]]


def measure(bench: Bench) -> list[Figure]:
    """Processing and enqueueing, beside the peers; and what they cost the server."""
    with redis_server(bench.fresh()) as server:
        peers = usable(server)
        return [
            *_processing(bench, server, peers),
            *_enqueueing(bench, server, peers),
            *_cost_in_redis(bench, server),
            *_depth(bench, server),
        ]


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    with redis_server(bench.fresh()) as server:
        return [
            *_own_processing([_worked(bench, server)]),
            *_own_enqueueing([_enqueued(bench, server)]),
            *_cost_in_redis(bench, server),
            *_depth(bench, server),
        ]


def usable(server: RedisServer) -> list[str]:
    """The peers that run here; the others are told."""
    found = []
    for name in PEERS:
        try:
            run_peer(server, name, "enqueue", 10)
            found.append(name)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            print(f"peers: {name} does not run here: {problem}", flush=True)
    return found


def command(name: str, action: str, server: RedisServer, count: int, *more: str) -> list[str]:
    """How a peer is run: see `peers/redis_queues.py`."""
    python = environment(f"redis-{name}", PEERS[name])
    return [str(python), "-W", "ignore", str(_SCRIPT), name, action, server.url, str(count), *more]


def run_peer(server: RedisServer, name: str, action: str, count: int, *more: str) -> Any:
    """What a peer says."""
    done = subprocess.run(
        command(name, action, server, count, *more),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=child_environment(),
    )
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None


# -- processing --------------------------------------------------------------------------------------------------------


def _processing(bench: Bench, server: RedisServer, peers: list[str]) -> list[Figure]:
    ours: list[dict[str, float]] = []
    rates: Times = {}
    for turn in range(bench.rounds + 1):
        found = _worked(bench, server)
        if turn:
            ours.append(found)
        for name in peers:
            server.ask("FLUSHALL")
            count = bench.size(5_000, 200)
            run_peer(server, name, "bulk", count + 1)
            taken = run_peer(server, name, "work", count)
            if turn:
                rates.setdefault(name, []).append(count / taken["seconds"])
    best = max((name for name in rates if name in AT_LEAST_ONCE), key=lambda name: median(rates[name]))
    processed, cpu = _own_processing(ours)
    return [
        processed,
        Figure(
            figure="redis",
            what="tasks/s / best at-least-once peer",
            asked=6.0,
            at_most=False,
            measured=processed.measured / median(rates[best]),
            unit="x",
            note=f"{best}: {median(rates[best]):,.0f}/s",
        ),
        cpu,
        *told("tasks/s", rates, "/s"),
    ]


def _worked(bench: Bench, server: RedisServer) -> dict[str, float]:
    server.ask("FLUSHALL")
    found: dict[str, float] = bench.call(work, url=server.url, count=bench.size(100_000, 2_000))
    return found


def _own_processing(ours: list[dict[str, float]]) -> tuple[Figure, Figure]:
    rates, cpu = ([one[name] for one in ours] for name in ("rate", "cpu_us"))
    return (
        Figure(
            figure="redis",
            what="tasks/s, no-op, concurrency 100, leases and acks on",
            asked=35_000,
            at_most=False,
            measured=median(rates),
            unit="/s",
            rounds=rates,
            note="this or the next",
        ),
        Figure(
            figure="redis",
            what="CPU of the worker per task",
            asked=26.0,
            measured=median(cpu),
            unit="us",
            rounds=cpu,
            note=spread(cpu),
        ),
    )


def work(given: dict[str, Any]) -> dict[str, float]:
    """Tasks per second and CPU of a worker that finds everything waiting."""
    from harness.work import noop_app, publish, run_loop, work_off

    async def run() -> dict[str, float]:
        tasks = noop_app(given["url"])
        await publish(tasks, 1_000, 1_000)
        await work_off(tasks, 1_000, 100)
        await publish(tasks, given["count"], 1_000)
        wall, cpu = await work_off(tasks, given["count"], 100)
        return {"rate": given["count"] / wall, "cpu_us": cpu / given["count"] * 1e6}

    return run_loop(run())


# -- enqueueing --------------------------------------------------------------------------------------------------------


def _enqueueing(bench: Bench, server: RedisServer, peers: list[str]) -> list[Figure]:
    ours: list[dict[str, float]] = []
    theirs: Times = {}
    for turn in range(bench.rounds + 1):
        found = _enqueued(bench, server)
        if turn:
            ours.append(found)
        for name in peers:
            server.ask("FLUSHALL")
            rate = 1 / run_peer(server, name, "enqueue", bench.size(3_000, 200))
            if turn:
                theirs.setdefault(name, []).append(rate)
    best = max((name for name in theirs if name in ASYNCIO), key=lambda name: median(theirs[name]))
    one_by_one, *rest = _own_enqueueing(ours)
    return [
        Figure(
            figure="redis",
            what="enqueue one by one / best asyncio peer",
            asked=1.2,
            at_most=False,
            measured=one_by_one.measured / median(theirs[best]),
            unit="x",
            note=f"{best}: {median(theirs[best]):,.0f}/s",
        ),
        one_by_one,
        *rest,
        *told("enqueue one by one", theirs, "/s"),
    ]


def _enqueued(bench: Bench, server: RedisServer) -> dict[str, float]:
    server.ask("FLUSHALL")
    sizes = {"one": bench.size(5_000, 200), "many": bench.size(100_000, 2_000)}
    found: dict[str, float] = bench.call(enqueue, url=server.url, **sizes)
    return found


def _own_enqueueing(ours: list[dict[str, float]]) -> tuple[Figure, ...]:
    one_by_one, many, cpu = ([one[name] for one in ours] for name in ("one", "many", "cpu_us"))
    return (
        Figure(
            figure="redis",
            what="enqueue one by one",
            at_most=False,
            measured=median(one_by_one),
            unit="/s",
            rounds=one_by_one,
            note=spread(one_by_one),
        ),
        Figure(
            figure="redis",
            what="enqueue_many",
            asked=70_000,
            at_most=False,
            measured=median(many),
            unit="/s",
            rounds=many,
            note=spread(many),
        ),
        Figure(
            figure="redis",
            what="CPU of the publisher per task, enqueue one by one",
            measured=median(cpu),
            unit="us",
            rounds=cpu,
            note=spread(cpu),
        ),
    )


def enqueue(given: dict[str, Any]) -> dict[str, float]:
    """Calls per second, one by one and in one `enqueue_many`; the making of the calls counts."""
    from harness.work import noop_app, run_loop

    async def run() -> dict[str, float]:
        tasks = noop_app(given["url"])
        noop = tasks["noop"]
        for _ in range(100):
            await noop.enqueue("x" * 60)
        timer = Stopwatch()
        for _ in range(given["one"]):
            await noop.enqueue("x" * 60)
        one, cpu_us = given["one"] / timer.seconds, timer.cpu_seconds / given["one"] * 1e6
        timer = Stopwatch()
        await tasks.enqueue_many(noop.call("x" * 60) for _ in range(given["many"]))
        return {"one": one, "cpu_us": cpu_us, "many": given["many"] / timer.seconds}

    return run_loop(run())


# -- what it costs the server ------------------------------------------------------------------------------------------


def _cost_in_redis(bench: Bench, server: RedisServer) -> list[Figure]:
    server.ask("FLUSHALL")
    count = bench.size(20_000, 2_000)
    bench.call(depth.fill, url=server.url, depth=count)
    with server.monitored() as commands:
        bench.call(drain, url=server.url, count=count)
    server.ask("FLUSHALL")
    waiting = bench.size(1_000_000, 5_000)
    before = int(server.info("memory")["used_memory"])
    bench.call(depth.fill, url=server.url, depth=waiting)
    held = int(server.info("memory")["used_memory"]) - before
    return [
        Figure(
            figure="redis",
            what="commands of clients per task at load",
            asked=0.1,
            measured=commands[0] / count,
            unit="",
            note="by MONITOR, without those of scripts",
        ),
        Figure(
            figure="redis",
            what=f"memory per waiting 100-byte task, {waiting:,} waiting",
            asked=350,
            measured=held / waiting,
            unit="bytes",
        ),
    ]


def drain(given: dict[str, Any]) -> None:
    """Work off what waits."""
    from harness.work import noop_app, run_loop, work_off

    run_loop(work_off(noop_app(given["url"]), given["count"], 100))


def _depth(bench: Bench, server: RedisServer) -> list[Figure]:
    deep, count = bench.size(1_000_000, 5_000), bench.size(50_000, 1_000)
    with redis_server(bench.fresh()) as other:
        servers = {"shallow": other, "deep": server}
        server.ask("FLUSHALL")
        for one, waiting in ((other, 1_000), (server, deep)):
            bench.call(depth.fill, url=one.url, depth=waiting)
        times = bench.turns(
            [(name, partial(bench.call, depth.work, url=one.url, count=count)) for name, one in servers.items()]
        )
    ratios = [one / other for one, other in zip(times["deep"], times["shallow"], strict=True)]
    return [
        Figure(
            figure="redis",
            what=f"cost per task, {deep:,} waiting / 1,000 waiting",
            asked=1.1,
            measured=median(ratios),
            unit="x",
            rounds=ratios,
            note=f"{median(times['deep']):.0f} us and {median(times['shallow']):.0f} us, publish included",
        ),
        Figure(
            figure="redis",
            what=f"cost per task, {deep:,} waiting",
            measured=median(times["deep"]),
            unit="us",
            rounds=times["deep"],
        ),
    ]


def told(what: str, values: Times, unit: str) -> list[Figure]:
    """Everybody's, for information."""
    return [
        Figure(figure="redis", what=f"{what}: {name}", measured=median(found), unit=unit, rounds=found)
        for name, found in values.items()
    ]
