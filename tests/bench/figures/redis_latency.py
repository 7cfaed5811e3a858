"""From an enqueue to the start of the handler in an idle worker, over Redis, beside the peers."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from functools import partial

from figures import latency
from figures.redis import AT_LEAST_ONCE, command, run_peer, told, usable
from harness import Bench, Figure
from harness.bench import Child, child_environment
from harness.report import median, percentile
from harness.server import RedisServer, redis_server

ASKED = 0.8
_OURS = "qworker"
_ROUNDS = 9
# The machine's speed changes by the minute, so the peers that come close are measured in turns with us.
_CLOSE_PEERS = 2
_LONGEST = (200, 200)
# Milliseconds between two messages, and the messages of one round.
_PAUSES = ((latency.SHORT, 150), (latency.LONG, 80), (_LONGEST, 15))
# The first messages find everything cold.
_WARM = 10


def measure(bench: Bench) -> list[Figure]:
    """The ratio to the best at-least-once peer after pauses of three lengths, and the medians of all."""
    with redis_server(bench.fresh()) as server:
        peers = usable(server)
        return [figure for pause, count in _PAUSES for figure in _compare(bench, server, peers, pause, count)]


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    found: list[Figure] = []
    with redis_server(bench.fresh()) as server:
        for pause, _ in _PAUSES[:2]:
            delays = _ours(bench, server, bench.size(300, 20), pause)
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


def _apart(pause: tuple[int, int]) -> str:
    return f"{pause[0]} ms apart" if pause[0] == pause[1] else f"{pause[0]} to {pause[1]} ms apart"


def _compare(bench: Bench, server: RedisServer, peers: list[str], pause: tuple[int, int], full: int) -> list[Figure]:
    count, apart = bench.size(full, 10), _apart(pause)
    once = {name: percentile(_theirs(server, name, count, pause), 0.5) for name in peers}
    close = sorted((name for name in once if name in AT_LEAST_ONCE), key=lambda name: once[name])[:_CLOSE_PEERS]

    def ours() -> float:
        return percentile(_ours(bench, server, count, pause), 0.5)

    def theirs(name: str) -> float:
        return percentile(_theirs(server, name, count, pause), 0.5)

    rounds = bench.turns([(_OURS, ours), *[(name, partial(theirs, name)) for name in close]], rounds=_ROUNDS)
    medians = {name: median(values) for name, values in rounds.items()}
    best = min(close, key=lambda name: medians[name])
    return [
        Figure(
            figure="redis",
            what=f"enqueue to handler start, idle, {apart}, p50 / best at-least-once peer's",
            asked=ASKED,
            measured=medians[_OURS] / medians[best],
            unit="x",
            note=f"{medians[_OURS]:.2f} ms; {best}: {medians[best]:.2f} ms; {len(rounds[best])} rounds in turns",
        ),
        *told(f"enqueue to start, {apart}, p50", {**{name: [once[name]] for name in once}, **rounds}, "ms"),
    ]


def _ours(bench: Bench, server: RedisServer, count: int, pause: tuple[int, int]) -> list[float]:
    server.ask("FLUSHALL")
    sent = count + _WARM
    with Child(latency.worker, {"url": server.url, "count": sent}) as working:
        working.read()
        bench.call(latency.enqueue, url=server.url, count=sent, pause=_seconds(pause))
        found: list[float] = working.result()[0]
        return found[_WARM:]


def _theirs(server: RedisServer, name: str, count: int, pause: tuple[int, int]) -> list[float]:
    server.ask("FLUSHALL")
    sent = count + _WARM
    with ExitStack() as stack:
        listening = stack.enter_context(
            subprocess.Popen(
                command(name, "listen", server, sent),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=child_environment(),
            )
        )
        stack.callback(listening.kill)
        assert listening.stdout is not None
        assert listening.stdout.readline().strip() == '"ready"'
        run_peer(server, name, "send", sent, *map(str, _seconds(pause)))
        found: list[float] = json.loads(listening.stdout.readline())
        return found[_WARM:]


def _seconds(pause: tuple[int, int]) -> list[float]:
    return [ms / 1000 for ms in pause]
