"""What others notice of a dashboard: the application that it is mounted in, workers, and who else counts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import Child, child_environment
from harness.dashboard import Browser, dashboard, viewers
from harness.report import median, spread
from harness.running import running, write_app

__all__ = ["QUEUE", "beside_worker", "figure", "publishing", "stall", "three_processes"]

QUEUE = "bench"
# The queue of a worker beside the deep one.
_OTHER = "work"


def figure(what: str, measured: float, unit: str, asked: float | None = None, **more: Any) -> Figure:
    """A figure of the dashboard."""
    return Figure(figure="ui", what=what, measured=measured, unit=unit, asked=asked, **more)


@contextmanager
def publishing(url: str) -> Generator[None]:
    """One message per second, until the end of the block."""
    with Child(publish, {"url": url}) as child:
        child.read()
        yield


def publish(given: dict[str, Any]) -> None:
    """Publish until killed."""
    from harness.work import noop_app, publish, run_loop, say

    async def run() -> None:
        tasks = noop_app(given["url"])
        say("begins")
        while True:
            await publish(tasks, 1, 1)
            await asyncio.sleep(1.0)

    run_loop(run())


# -- in an application -------------------------------------------------------------------------------------------------


def stall(bench: Bench, url: str, paths: list[str]) -> list[Figure]:
    """How long the loop of an application stands still in which a dashboard is mounted, by its own work."""
    seconds = bench.size(40, 5)
    with publishing(url), Child(host, {"url": url}) as application:
        browser = Browser(application.read(), {})
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for path in paths:
                browser.get(f"/queues{path}")
                time.sleep(0.02)
        browser.close()
        application.tell()
        found = application.result()
    return [
        figure(
            "longest stall of an application's loop, from the first page on",
            found["cpu_ms"],
            "ms",
            20,
            note="CPU of its thread between two beats; on the wall, with waits for a processor, "
            f"{found['wall_ms']:.0f} ms, p99.9 {found['p999_ms']:.1f} ms",
        )
    ]


def host(given: dict[str, Any]) -> dict[str, float]:
    """Serve an application with a dashboard, and measure its loop: a beat each millisecond."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from harness.report import percentile
    from harness.work import noop_app, run_loop, say
    from qworker.asgi.limits import limited_protocol
    from qworker.asgi.server import Server, bind
    from qworker.kit.gc_freeze import freeze_loaded_modules
    from qworker.ui import Access
    from qworker.ui import dashboard as mounted

    async def run() -> dict[str, float]:
        tasks = noop_app(given["url"])
        shown = mounted(tasks, authorize=lambda _request: Access("bench", "admin"))
        listener, ended = bind("127.0.0.1", 0), asyncio.Event()
        app = Starlette(routes=[Mount("/queues", shown)])
        serving = asyncio.create_task(Server(app, limited_protocol()).serve_until(ended, listener))
        await asyncio.sleep(0.5)
        # As the page about the dashboard advises.
        freeze_loaded_modules()
        say(listener.getsockname()[1])
        told, walls, most = asyncio.Event(), list[float](), 0.0
        asyncio.get_running_loop().add_reader(sys.stdin, told.set)
        while not told.is_set():
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            walls.append(time.perf_counter() - wall - 0.001)
            most = max(most, time.thread_time() - cpu)
        asyncio.get_running_loop().remove_reader(sys.stdin)
        ended.set()
        await serving
        await shown.aclose()
        await tasks.aclose()
        return {"cpu_ms": most * 1e3, "wall_ms": max(walls) * 1e3, "p999_ms": percentile(walls, 0.999) * 1e3}

    return run_loop(run())


# -- beside a worker ---------------------------------------------------------------------------------------------------


def beside_worker(bench: Bench, url: str, folder: Path) -> list[Figure]:
    """Throughput of a worker on another queue of the store, while the dashboard runs, and while it is stopped."""
    count = bench.size(40_000, 1_000)
    with publishing(url), dashboard(url, folder) as shown, viewers(shown, 1, ["/"]):
        shown.counted(QUEUE)

        def rate(stopped: bool) -> float:
            shown.signal(signal.SIGSTOP if stopped else signal.SIGCONT)
            try:
                return float(bench.call(work, url=url, count=count))
            finally:
                shown.signal(signal.SIGCONT)

        rates = bench.turns([("on", partial(rate, False)), ("off", partial(rate, True))], rounds=5)
    shares = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return [
        figure(
            "worker's messages/s beside it / beside it stopped",
            median(shares),
            "x",
            0.98,
            at_most=False,
            rounds=shares,
            note=f"{median(rates['on']):,.0f}/s and {median(rates['off']):,.0f}/s; {spread(shares)}",
        )
    ]


def work(given: dict[str, Any]) -> float:
    """Messages per second of a worker on a queue of its own."""
    from harness.work import run_loop, work_off
    from qworker import Tasks

    count: int = given["count"]

    async def run() -> float:
        tasks = Tasks(given["url"])

        @tasks.task(queue=_OTHER)
        async def noop(text: str) -> None:
            pass

        await tasks.enqueue_many(noop.call("x" * 60) for _ in range(count))
        seconds, _ = await work_off(tasks, count, 100)
        await tasks.aclose()
        return count / seconds

    return run_loop(run())


# -- beside others that count ------------------------------------------------------------------------------------------


def three_processes(bench: Bench, url: str, folder: Path) -> list[Figure]:
    """Counts of the deep queue by a dashboard, `top` and a worker with a health port, for each time it is due."""
    subprocess.run([sys.executable, "-m", "qworker", "pause", url, QUEUE], check=True, env=child_environment())
    write_app(folder)
    try:
        with publishing(url), ExitStack() as stack:
            shown = stack.enter_context(dashboard(url, folder))
            stack.enter_context(viewers(shown, 1, ["/"]))
            worker = stack.enter_context(running(folder, url, "--health", "127.0.0.1:0"))
            top = stack.enter_context(Child(sample, {"url": url}))
            pids = [shown.pid, worker.pid, top.pid]
            found = bench.call(counts, url=url, pids=pids, seconds=bench.size(100, 10))
    finally:
        subprocess.run([sys.executable, "-m", "qworker", "resume", url, QUEUE], check=True, env=child_environment())
    return [
        figure(
            "counts by a dashboard, top and a worker's health port together, for each that is due",
            found["made"] / max(1, found["shared"]),
            "",
            1,
            note=f"{found['made']} counts; the shortest pause was {found['shortest']:.2f} of the one that is due",
        )
    ]


def sample(given: dict[str, Any]) -> None:
    """Sample as `top` does, until killed."""
    from contextlib import aclosing

    from harness.work import run_loop
    from qworker.backend.registry import open_backend
    from qworker.cli.top.sampler import Sampler

    async def run() -> None:
        backend = open_backend(given["url"])
        async with aclosing(Sampler(backend, None, (), url=given["url"])) as sampler:
            while True:
                await sampler.sample()
                await asyncio.sleep(2.0)

    run_loop(run())


def counts(given: dict[str, Any]) -> dict[str, float]:
    """Look for the processes that count, which some processes start, and for the counts that they share."""
    from harness.work import run_loop
    from qworker.backend.offers import samples_of
    from qworker.backend.registry import open_backend
    from qworker.sampling.counting import Budget, SharedCount, decode_shared
    from qworker.sampling.ring import RING_SIZE

    async def run() -> dict[str, float]:
        backend = open_backend(given["url"])
        store = samples_of(backend)
        assert store is not None
        made: set[str] = set()
        shared: dict[float, SharedCount] = {}
        ends = time.monotonic() + given["seconds"]
        while time.monotonic() < ends:
            for pid in given["pids"]:
                made.update(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            found = decode_shared(await store.read(QUEUE, RING_SIZE, 1 << 17))
            if found is not None:
                shared[found.at] = found
            await asyncio.sleep(0.05)
        await backend.aclose()
        in_order = [shared[at] for at in sorted(shared)]
        pauses = [(after.at - before.at) / Budget(2.0).pause(before.cpu_s) for before, after in pairwise(in_order)]
        return {"made": len(made), "shared": len(shared), "shortest": min(pauses, default=1.0)}

    return run_loop(run())
