"""A worker that runs for long: its memory and its open files over a million messages, on a directory and on a Redis."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import Child
from harness.process import memory_mb
from harness.running import running, write_app
from harness.server import redis_server

ASKED_MB = 5.0
# Connections that are opened when they are first needed, and directories in which results are removed at the moment.
ASKED_FILES = 4
# The share of the messages after which the first measurement is taken.
_WARM = 20
# So many messages wait at most: it is the worker that is looked at, and no backlog.
_WAITING = 10_000


def measure(bench: Bench) -> list[Figure]:
    """What grew between a part of the messages and all of them; both times the worker has nothing to do."""
    found: list[Figure] = []
    for features in (True, False):
        more = " with results, a schedule and hooks," if features else ""
        folder = bench.fresh()
        found += _grown(folder, bench.url(folder), bench, f"file:{more}", features)
        bench.discard(folder)
        folder = bench.fresh()
        with redis_server(folder) as server:
            found += _grown(folder, server.url, bench, f"redis:{more}", features)
    return found


def _grown(folder: Path, url: str, bench: Bench, name: str, features: bool) -> list[Figure]:
    count = bench.size(1_000_000, 20_000)
    write_app(folder, features=features)
    with (
        running(folder, url) as worker,
        Child(feed, {"url": url, "count": count}) as feeding,
    ):
        assert feeding.read() == "idle"
        before, files_before = memory_mb(worker.pid), _open_files(worker.pid)
        highest = before
        feeding.tell()
        while feeding.read() != "idle":
            highest = max(highest, memory_mb(worker.pid))
        after, files_after = memory_mb(worker.pid), _open_files(worker.pid)
        feeding.tell()
        feeding.result()
        worker.drain()
    return [
        Figure(
            figure="memory",
            what=f"{name} growth of a worker's memory over {count:,} messages",
            asked=ASKED_MB,
            measured=after - before,
            unit="MB",
            note=f"{before:.1f} MB after {count // _WARM:,}, {highest:.1f} at most, {after:.1f} at the end",
        ),
        Figure(
            figure="memory",
            what=f"{name} growth of its open files",
            asked=ASKED_FILES,
            measured=files_after - files_before,
            unit="",
            note=f"{files_before} after {count // _WARM:,}",
        ),
    ]


def _open_files(pid: int) -> int:
    """How many files a process has open, the least of a second: what it does each second opens some for a moment."""
    counts: list[int] = []
    for _ in range(10):
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.1)
    return min(counts)


def feed(given: dict[str, Any]) -> None:
    """Publish calls of `noop` as they are run. Print their number, and `idle` after some of them and after all."""
    from harness.work import QUEUE, run_loop, say
    from qworker import Draft
    from qworker.backend import Backend
    from qworker.backend.registry import open_backend

    async def wait_until(backend: Backend, most: int) -> None:
        while True:
            stats = await backend.stats(QUEUE)
            if stats.ready + stats.leased + stats.delayed <= most:
                return
            await asyncio.sleep(0.02)

    async def run() -> None:
        backend = open_backend(given["url"])
        made = [Draft(body=b'{"task":"noop","args":[%d]}' % number) for number in range(1000)]
        first = given["count"] // _WARM
        for done in range(0, given["count"], 1000):
            if done == first:
                await wait_until(backend, 0)
                say("idle")
                sys.stdin.readline()
            await wait_until(backend, _WAITING)
            await backend.publish(QUEUE, made)
            if done % 20_000 == 0 and done > first:
                say(done)
        await wait_until(backend, 0)
        say("idle")
        sys.stdin.readline()
        await backend.aclose()

    run_loop(run())
