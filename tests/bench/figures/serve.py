"""`qworker serve`: its memory while large bodies arrive or are leased, and its requests with 10,000 queues."""

from __future__ import annotations

import http.client
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.process import cpu_seconds, memory_mb
from harness.server import redis_server

_MIB = 1 << 20
ASKED_MB = 200.0
_IN_USE = 100


class _Server:
    """A process of `qworker serve`."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    def unread(self) -> int:
        """Bytes that have arrived for it, and which it has not read."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        here = f":{self.port:04X}"
        return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(here) and row[3] == "01")


def measure(bench: Bench) -> list[Figure]:
    """The memory of three loads, and the requests to many queues on a directory and on a Redis."""
    found = [
        _arriving(bench, bench.size(300, 30), _MIB),
        _arriving(bench, bench.size(40, 4), 16 * _MIB),
        _leased(bench),
    ]
    folder = bench.fresh()
    found += _many_queues(bench, bench.url(folder), "file:")
    bench.discard(folder)
    folder = bench.fresh()
    with redis_server(folder) as redis:
        found += _many_queues(bench, redis.url, "redis:")
    return found


@contextmanager
def _serving(url: str, *options: str) -> Generator[_Server]:
    command = [sys.executable, "-m", "qworker", "serve", url, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stderr.readline())
        assert found is not None, "the server does not start"
        yield _Server(process.pid, int(found[1]))
    finally:
        process.kill()
        process.communicate()


def _arriving(bench: Bench, count: int, size: int) -> Figure:
    folder = bench.fresh()
    with _serving(bench.url(folder), "--max-body-size", str(size)) as server, ExitStack() as opened:
        for _ in range(count):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"POST /q/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size)
            client.sendall(bytes(size - 1))
        while server.unread():
            time.sleep(0.01)
        peak = memory_mb(server.pid, peak=True)
    bench.discard(folder)
    return _memory(f"{count} unfinished bodies of {size // _MIB} MiB", peak)


def _leased(bench: Bench) -> Figure:
    count = bench.size(300, 30)
    folder = bench.fresh()
    with _serving(bench.url(folder)) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port)
        for method, body in (("POST", bytes(_MIB)), ("GET", None)):
            for _ in range(count):
                client.request(method, "/q/messages?visibility_timeout=600", body)
                client.getresponse().read()
        client.close()
        peak = memory_mb(server.pid, peak=True)
    bench.discard(folder)
    return _memory(f"{count} leased messages of 1 MiB", peak)


def _memory(what: str, peak: float) -> Figure:
    return Figure(figure="serve", what=f"memory with {what}", asked=ASKED_MB, measured=peak, unit="MB", note="peak")


def _many_queues(bench: Bench, url: str, name: str) -> list[Figure]:
    count = bench.size(10_000, 300)
    bench.call(fill, url=url, count=count)
    with _serving(url) as server:
        taken = _requests(server, [f"q{number * count // _IN_USE:05d}" for number in range(_IN_USE)])
        before, seconds = cpu_seconds(server.pid), bench.size(30, 2)
        time.sleep(seconds)
        share = (cpu_seconds(server.pid) - before) / seconds * 100
        peak = memory_mb(server.pid, peak=True)
    with_queues = f"{name} {count:,} queues, {_IN_USE} in use"
    return [
        Figure(
            figure="serve",
            what=f"{with_queues}: p99 of requests",
            asked=1000.0,
            measured=sorted(taken)[len(taken) * 99 // 100] * 1000,
            unit="ms",
            note=f"{len(taken):,} requests",
        ),
        Figure(figure="serve", what=f"{with_queues}: memory", asked=ASKED_MB, measured=peak, unit="MB", note="peak"),
        Figure(figure="serve", what=f"{with_queues}: CPU when idle", asked=3.0, measured=share, unit="%", note=""),
    ]


def _requests(server: _Server, queues: list[str]) -> list[float]:
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    chosen = random.Random(7)
    taken: list[float] = []
    for number in range(2000):
        began = time.perf_counter()
        method = ("POST", "GET")[number % 2]
        client.request(method, f"/{chosen.choice(queues)}/messages", b"x" if method == "POST" else None)
        response = client.getresponse()
        response.read()
        taken.append(time.perf_counter() - began)
        if response.status not in {200, 201, 204}:
            raise RuntimeError(f"{method} got status {response.status}")
    client.close()
    return taken


def fill(given: dict[str, Any]) -> None:
    """Create the queues."""
    from harness.work import run_loop
    from qworker.backend.registry import open_backend

    async def run() -> None:
        backend = open_backend(given["url"])
        for number in range(given["count"]):
            await backend.create(f"q{number:05d}")
        await backend.aclose()

    run_loop(run())
