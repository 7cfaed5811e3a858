"""Two worker processes on one queue beside one, with handlers that need a processor."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness import Bench, Figure
from harness.bench import Child
from harness.report import median, spread
from harness.server import RedisServer, redis_server

ASKED_RATIO = 1.7
ASKED_LOST = 5.0
_HANDLER_NS = 200_000


def measure(bench: Bench) -> list[Figure]:
    """The ratio of the rates, and how often a worker tried to lease what another had taken."""
    lost: list[float] = []
    on_files = _figures("file:", bench.turns([(n, partial(_rate, bench, int(n), None, lost)) for n in ("1", "2")]))
    with redis_server(bench.fresh()) as server:
        on_redis = _figures("redis:", bench.turns([(n, partial(_rate, bench, int(n), server, [])) for n in ("1", "2")]))
    return [
        *on_files,
        *on_redis,
        Figure(
            figure="scaling",
            what="file: lease attempts lost to the other worker",
            asked=ASKED_LOST,
            measured=median(lost),
            unit="%",
            rounds=lost,
            note="of all attempts to claim a message",
        ),
    ]


def _figures(name: str, rates: dict[str, list[float]]) -> list[Figure]:
    ratios = [two / one for two, one in zip(rates["2"], rates["1"], strict=True)]
    return [
        Figure(
            figure="scaling",
            what=f"{name} 2 workers / 1 worker, handlers of 200 us of CPU",
            asked=ASKED_RATIO,
            at_most=False,
            measured=median(ratios),
            unit="x",
            rounds=ratios,
            note=f"{median(rates['2']):,.0f}/s and {median(rates['1']):,.0f}/s"
            f" on {os.cpu_count()} processors; {spread(ratios)}",
        ),
        Figure(
            figure="scaling",
            what=f"{name} messages/s of 2 workers",
            at_most=False,
            measured=median(rates["2"]),
            unit="/s",
            rounds=rates["2"],
        ),
    ]


def _rate(bench: Bench, workers: int, server: RedisServer | None, lost: list[float]) -> float:
    folder = bench.fresh()
    count = bench.size(20_000, 2_000)
    if server is not None:
        server.ask("FLUSHALL")
    url = bench.url(folder) if server is None else server.url
    bench.call(fill, url=url, count=count)
    with ExitStack() as stack:
        working = [stack.enter_context(Child(work, {"url": url})) for _ in range(workers)]
        for child in working:
            child.read()
        for child in working:
            child.tell()
        ends = [child.result() for child in working]
    if sum(end["done"] for end in ends) < count:
        raise RuntimeError(f"{ends} are less than {count} messages")
    if workers > 1 and server is None:
        attempts = sum(end["attempts"] for end in ends)
        if attempts < count:
            raise RuntimeError(f"{attempts} attempts for {count} messages: the backend claims in another way now")
        lost.append(sum(end["lost"] for end in ends) / attempts * 100)
    bench.discard(folder)
    first, last = min(end["first_ns"] for end in ends), max(end["last_ns"] for end in ends)
    return float(count / ((last - first) / 1e9))


def fill(given: dict[str, Any]) -> None:
    """Publish what the workers will do."""
    from harness.work import noop_app, publish, run_loop

    run_loop(publish(noop_app(given["url"]), given["count"], 1000))


def work(given: dict[str, Any]) -> dict[str, int]:
    """Work until nothing is left, from the moment that the bench says so."""
    from harness.work import QUEUE, Finished, run_loop, say
    from qworker import Tasks
    from qworker.worker import Worker, WorkerOptions

    tasks = Tasks(given["url"])

    @tasks.task(queue=QUEUE)
    async def noop(text: str) -> None:
        end = time.thread_time_ns() + _HANDLER_NS
        while time.thread_time_ns() < end:
            pass

    async def run() -> dict[str, int]:
        await tasks.backend()
        say("ready")
        sys.stdin.readline()
        claims = _Claims()
        watch = _Last(1 << 60)
        worker = Worker(tasks, WorkerOptions(burst=True))
        worker.observers.append(watch)
        await worker.run()
        return {
            "done": watch.count,
            "first_ns": watch.first_ns,
            "last_ns": watch.latest_ns,
            "attempts": claims.attempts,
            "lost": claims.lost,
        }

    class _Last(Finished):
        latest_ns = 0

        def message_settled(self, *args: Any) -> None:
            super().message_settled(*args)
            self.latest_ns = time.monotonic_ns()

    return run_loop(run())


class _Claims:
    """Count the claims of messages and those that came too late, by replacing the three calls of a claim.

    A claim opens the file, locks it and renames it into lease/; each of these may find that it comes too late. A
    backend that claims otherwise shows no attempts at all, which is an error and no good result.
    """

    def __init__(self) -> None:
        import fcntl

        self.attempts = 0
        self.lost = 0
        self._open, self._rename, self._flock = os.open, os.rename, fcntl.flock
        vars(os).update(open=self._counted_open, rename=self._counted_rename)
        vars(fcntl).update(flock=self._counted_flock)

    def _counted_open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        try:
            return self._open(path, flags, *rest, **options)
        except FileNotFoundError:
            if str(path).startswith("_") and not flags & os.O_CREAT:
                self._too_late()
            raise

    def _counted_rename(self, source: Any, target: Any, **options: Any) -> None:
        # A lease's name is its message's, and two parts more.
        claiming = str(target).startswith(f"{source}.")
        try:
            self._rename(source, target, **options)
        except FileNotFoundError:
            if claiming:
                self._too_late()
            raise
        self.attempts += claiming

    def _counted_flock(self, file: int, operation: int) -> None:
        try:
            self._flock(file, operation)
        except BlockingIOError:
            self._too_late()
            raise

    def _too_late(self) -> None:
        self.attempts += 1
        self.lost += 1
