"""From an enqueue to the start of the handler in an idle worker, over Redis, beside the peers."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack

from figures import latency
from figures.redis import AT_LEAST_ONCE, command, run_peer, told, usable
from harness import Bench, Figure
from harness.bench import Child, child_environment
from harness.report import percentile
from harness.server import RedisServer, redis_server

ASKED = 0.7


def measure(bench: Bench) -> list[Figure]:
    """The ratio of the medians to the best at-least-once peer's, with short and with long pauses, and everybody's."""
    with redis_server(bench.fresh()) as server:
        peers = usable(server)
        return [
            *_latency(bench, server, peers, latency.SHORT, ASKED),
            *_latency(bench, server, peers, latency.LONG, None),
        ]


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    found: list[Figure] = []
    with redis_server(bench.fresh()) as server:
        for pause in (latency.SHORT, latency.LONG):
            count, warm = _counts(bench)
            delays = _ours(bench, server, count + warm, _seconds(pause))[warm:]
            found += [
                Figure(
                    figure="redis",
                    what=f"enqueue to handler start, idle, {_apart(pause)}, p{share * 100:.0f}",
                    measured=percentile(delays, share),
                    unit="ms",
                )
                for share in (0.5, 0.99)
            ]
    return found


def _counts(bench: Bench) -> tuple[int, int]:
    """How many count, and how many find everything cold before them."""
    return bench.size(300, 20), 10


def _seconds(pause: tuple[int, int]) -> list[float]:
    return [ms / 1000 for ms in pause]


def _apart(pause: tuple[int, int]) -> str:
    return f"{pause[0]} to {pause[1]} ms apart"


def _latency(
    bench: Bench, server: RedisServer, peers: list[str], pause: tuple[int, int], asked: float | None
) -> list[Figure]:
    count, warm = _counts(bench)
    apart, seconds = _apart(pause), _seconds(pause)
    ours = _ours(bench, server, count + warm, seconds)[warm:]
    theirs = {name: _peer_latency(server, name, count + warm, seconds)[warm:] for name in peers}
    best = min((name for name in theirs if name in AT_LEAST_ONCE), key=lambda name: percentile(theirs[name], 0.5))
    return [
        Figure(
            figure="redis",
            what=f"enqueue to handler start, idle, {apart}, p50 / best at-least-once peer's",
            asked=asked,
            measured=percentile(ours, 0.5) / percentile(theirs[best], 0.5),
            unit="x",
            note=f"p50 {percentile(ours, 0.5):.2f} ms, p99 {percentile(ours, 0.99):.2f};"
            f" {best}: {percentile(theirs[best], 0.5):.2f} ms",
        ),
        *told(
            f"enqueue to start, {apart}, p50",
            {name: [percentile(values, 0.5)] for name, values in theirs.items()},
            "ms",
        ),
    ]


def _ours(bench: Bench, server: RedisServer, count: int, pause: list[float]) -> list[float]:
    server.ask("FLUSHALL")
    with Child(latency.worker, {"url": server.url, "count": count}) as working:
        working.read()
        bench.call(latency.enqueue, url=server.url, count=count, pause=pause)
        found: list[float] = working.result()
        return found


def _peer_latency(server: RedisServer, name: str, count: int, pause: list[float]) -> list[float]:
    server.ask("FLUSHALL")
    with ExitStack() as stack:
        listening = stack.enter_context(
            subprocess.Popen(
                command(name, "listen", server, count),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=child_environment(),
            )
        )
        stack.callback(listening.kill)
        assert listening.stdout is not None
        assert listening.stdout.readline().strip() == '"ready"'
        run_peer(server, name, "send", count, *map(str, pause))
        found: list[float] = json.loads(listening.stdout.readline())
        return found
