"""What being watched costs a worker: counts, looks at the queues, a scrape a second, and the history, together."""

from __future__ import annotations

import asyncio
import http.client
import threading
from functools import partial
from typing import Any

from harness import Bench, Figure
from harness.bench import Child
from harness.report import median, spread
from harness.server import RedisServer, redis_server
from harness.stopwatch import Stopwatch

# At least this share of the throughput.
ASKED_SHARE = 0.95
_SCRAPE_EVERY_S = 1.0


def measure(bench: Bench) -> list[Figure]:
    """Throughput with everything on, and with the health port alone, relative to nothing on."""
    history = bool(bench.call(knows_history))
    found = _ratios(bench, "file:", history, None)
    with redis_server(bench.fresh()) as server:
        return found + _ratios(bench, "redis:", history, server)


def _ratios(bench: Bench, name: str, history: bool, server: RedisServer | None) -> list[Figure]:
    count = bench.size(100_000 if server is not None else 20_000, 2_000)

    costs: dict[str, list[float]] = {}

    def rate(side: str, watched: bool, told: bool) -> float:
        found = _work(bench, server, count, watched=watched, history=told if history else None)
        costs.setdefault(side, []).append(found["cpu_us"])
        return found["rate"]

    sides = {"off": (False, False), "health": (True, False), **({"all": (True, True)} if history else {})}
    rates = bench.turns([(side, partial(rate, side, *on)) for side, on in sides.items()])
    everything = "all" if history else "health"
    found: list[Figure] = []
    for side in reversed(sides):
        if side == "off":
            continue
        shares = [on / off for on, off in zip(rates[side], rates["off"], strict=True)]
        found.append(
            Figure(
                figure="metrics",
                what=f"{name} messages/s with --health, scraped every second"
                f"{', and history' if side == 'all' else ''} / without",
                asked=ASKED_SHARE if side == everything else None,
                at_most=False,
                measured=median(shares),
                unit="x",
                rounds=shares,
                note=f"{median(rates[side]):,.0f}/s and {median(rates['off']):,.0f}/s; {spread(shares)}; "
                f"CPU {median(costs[side]):.1f} us and {median(costs['off']):.1f} us",
            )
        )
    found.append(
        Figure(
            figure="metrics",
            what=f"{name} messages/s with everything on",
            at_most=False,
            measured=median(rates[everything]),
            unit="/s",
            rounds=rates[everything],
        )
    )
    return found


def _work(
    bench: Bench, server: RedisServer | None, count: int, *, watched: bool, history: bool | None
) -> dict[str, float]:
    folder = bench.fresh()
    if server is None:
        url = bench.url(folder)
    else:
        server.ask("FLUSHALL")
        url = server.url
    if history is not None:
        url += f"{'&' if '?' in url else '?'}history={int(history)}"
    with Child(work, {"url": url, "count": count, "watched": watched}) as working:
        port = working.read()
        ended = threading.Event()
        scraper = threading.Thread(target=_scrape, args=(port, ended)) if watched else None
        if scraper is not None:
            scraper.start()
        try:
            found: dict[str, float] = working.result()
        finally:
            ended.set()
            if scraper is not None:
                scraper.join()
    bench.discard(folder)
    return found


def _scrape(port: int, ended: threading.Event) -> None:
    while not ended.wait(_SCRAPE_EVERY_S):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            connection.getresponse().read()
        except OSError:
            # The worker has ended meanwhile.
            return
        finally:
            connection.close()


def knows_history(_: dict[str, Any]) -> bool:
    """Whether backends keep a history yet."""
    from qworker.backend.registry import open_backend
    from qworker.errors import InvalidURL

    try:
        open_backend("file:///nowhere?history=1")
    except InvalidURL:
        return False
    return True


def work(given: dict[str, Any]) -> dict[str, float]:
    """Print a health port. Then measure messages/s and CPU microseconds per message of a worker with a full queue."""
    from harness.work import Finished, noop_app, publish, run_loop, say
    from qworker.health.address import listen
    from qworker.health.answers import HealthAnswers
    from qworker.health.monitor import Monitor
    from qworker.health.server import HealthServer
    from qworker.worker import Worker

    async def run() -> dict[str, float]:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        watch = Monitor(100)
        server: HealthServer | None = None
        if given["watched"]:
            server = HealthServer(listen(("127.0.0.1", 0)), HealthAnswers(lambda: [watch.report()], stall_timeout=60.0))
        say(0 if server is None else server.port)

        async def rounds(count: int) -> dict[str, float]:
            worker = Worker(tasks)
            finished = Finished(count)
            worker.observers.append(finished)
            chores: list[asyncio.Task[None]] = []
            if given["watched"]:
                watch.attach(worker)
                chores.append(asyncio.create_task(watch.pulse.beat()))
                chores.append(asyncio.create_task(watch.sample(backend, worker.queues)))
            await publish(tasks, count, 1000)
            timer = Stopwatch()
            working = asyncio.create_task(worker.run())
            await finished.all.wait()
            taken, cpu = timer.seconds, timer.cpu_seconds
            worker.drain()
            await working
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            if finished.failed:
                raise RuntimeError(f"{finished.failed} messages failed")
            return {"rate": count / taken, "cpu_us": cpu / count * 1e6}

        await rounds(given["count"] // 10)
        found = await rounds(given["count"])
        if server is not None:
            server.close()
        return found

    return run_loop(run())
