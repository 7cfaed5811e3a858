"""What a caller of a job waits for: its result from an idle worker, and its status and a publish in a deep queue."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.bench import Child, child_environment
from harness.report import median
from harness.server import RedisServer, redis_server
from peers import environment

ASKED_RESULT = 3.0
ASKED_PEER = 20.0
ASKED_DEEP = 1.3
# A wait looks once a second; every five seconds the caller also looks for the message.
ASKED_LOOKS = 2.0
_ARQ = Path(__file__).parents[1] / "peers" / "arq_results.py"
_WAITED = 20.0


def measure(bench: Bench) -> list[Figure]:
    """Ours, and the same wait with arq on the same Redis."""
    with redis_server(bench.fresh()) as server:
        ours, found = _results(bench, server)
        try:
            times = _arq(server, bench.size(40, 3))
        except (subprocess.CalledProcessError, OSError) as problem:
            print(f"peers: arq does not run here: {problem}", flush=True)
        else:
            found.append(
                Figure(
                    figure="jobs",
                    what="redis: enqueue to result(), idle worker, p50: arq's / ours",
                    asked=ASKED_PEER,
                    at_most=False,
                    measured=median(times) / ours,
                    unit="x",
                    note=f"{median(times):,.0f} ms and {ours:.2f} ms",
                )
            )
        return [*found, *_waits(bench, server), *_depth(bench)]


def own(bench: Bench) -> list[Figure]:
    """Ours alone."""
    with redis_server(bench.fresh()) as server:
        return [*_results(bench, server)[1], *_depth(bench)]


def _results(bench: Bench, server: RedisServer) -> tuple[float, list[Figure]]:
    """The median on Redis, and the figures."""
    count = bench.size(500, 50)
    folder = bench.fresh()
    found: list[Figure] = []
    middle = 0.0
    for name, url in (("", bench.url(folder, "off")), ("redis: ", server.url)):
        times = [bench.call(results, url=url, count=count) for _ in range(bench.few)]
        middle = median(times)
        found.append(
            Figure(
                figure="jobs",
                what=f"{name}enqueue to result(), idle worker, p50",
                asked=ASKED_RESULT,
                measured=middle,
                unit="ms",
                rounds=times,
            )
        )
    bench.discard(folder)
    return middle, found


def _arq(server: RedisServer, count: int) -> list[float]:
    server.ask("FLUSHALL")
    python = environment("cron-arq", ["arq"])
    done = subprocess.run(
        [str(python), "-W", "ignore", str(_ARQ), server.url, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
        env=child_environment(),
    )
    server.ask("FLUSHALL")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


# -- looks while waiting -----------------------------------------------------------------------------------------------


def _waits(bench: Bench, server: RedisServer) -> list[Figure]:
    """What a caller costs that waits for a job which no worker runs."""
    seconds = _WAITED if bench.warms_up else 3.0
    folder = bench.fresh()
    with Child(wait, {"url": server.url}) as waiting:
        waiting.read()
        with server.monitored() as commands:
            time.sleep(seconds)
        waiting.tell()
        waiting.result()
    found = [
        Figure(
            figure="jobs",
            what="redis: commands a second of a caller that waits for a result",
            asked=ASKED_LOOKS,
            measured=commands[0] / seconds,
            unit="/s",
            note="by MONITOR, without those of scripts",
        )
    ]
    if shutil.which("strace") is None:
        print("no strace: the system calls of a caller that waits are not counted", flush=True)
        return found
    with Child(wait, {"url": bench.url(folder)}) as waiting:
        name = waiting.read()
        calls = _file_calls(waiting.pid, folder, seconds)
        waiting.tell()
        waiting.result()
    bench.discard(folder)
    looks = sum(f'/results>, "{name}"' in line for line in calls)
    return [
        *found,
        Figure(
            figure="jobs",
            what="opens a second of its result by a caller that waits",
            asked=ASKED_LOOKS,
            measured=looks / seconds,
            unit="/s",
            note=f"{len(calls) / seconds:.1f} system calls a second that name a file",
        ),
    ]


def _file_calls(pid: int, folder: Path, seconds: float) -> list[str]:
    """The system calls of a process that name a file, a line each."""
    target = folder / "calls"
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-y", "-e", "trace=%file", "-o", str(target), "-p", str(pid)])
    time.sleep(seconds)
    tracer.send_signal(signal.SIGINT)
    tracer.wait()
    return target.read_text().splitlines()


def wait(given: dict[str, Any]) -> None:
    """Wait for a result that does not come, until told to stop."""
    from harness.work import run_loop, say
    from qworker import Tasks
    from qworker.jobs.records import StoredResult, put_result

    async def run() -> None:
        tasks = Tasks(given["url"])
        job = await tasks.task(result=60)(work).enqueue(0)
        # As in a queue in use: there is another result.
        backend = await tasks.backend()
        await backend.cells(job.queue, [put_result("another", 1, StoredResult("done"), 600)])
        waiting = asyncio.create_task(job.result())
        # Its first looks are those of a call that does not wait.
        await asyncio.sleep(1.0)
        say(job.id)
        await asyncio.to_thread(sys.stdin.readline)
        waiting.cancel()
        await tasks.aclose()

    run_loop(run())


# -- depth -------------------------------------------------------------------------------------------------------------


def _depth(bench: Bench) -> list[Figure]:
    """A status, and a publish with an id, with many and with few waiting messages."""
    deep = bench.size(1_000_000, 5_000)
    found: list[Figure] = []
    with ExitStack() as stack:
        folders = [bench.fresh(), bench.fresh()]
        servers = [stack.enter_context(redis_server(folder)) for folder in folders]
        found += _deep("", [bench.url(folder, "off") for folder in folders], bench, deep)
        found += _deep("redis: ", [server.url for server in servers], bench, deep)
    for folder in folders:
        bench.discard(folder)
    return found


def _deep(name: str, urls: list[str], bench: Bench, deep: int) -> list[Figure]:
    count = bench.size(2_000, 50)
    for url, depth in zip(urls, (deep, 1_000), strict=True):
        bench.call(fill, url=url, depth=depth)
    times: list[list[dict[str, float]]] = [[], []]
    for turn in range(bench.few + bench.warms_up):
        for side in (0, 1) if turn % 2 else (1, 0):
            found = bench.call(look, url=urls[side], count=count, turn=turn)
            if turn or not bench.warms_up:
                times[side].append(found)
    return [
        Figure(
            figure="jobs",
            what=f"{name}{what}, {deep:,} waiting / 1,000 waiting",
            asked=ASKED_DEEP,
            measured=median([one[what] for one in times[0]]) / median([one[what] for one in times[1]]),
            unit="x",
            rounds=[one[what] / two[what] for one, two in zip(*times, strict=True)],
            note=" and ".join(f"{median([one[what] for one in side]):.0f} us" for side in times),
        )
        for what in times[0][0]
    ]


def results(given: dict[str, Any]) -> float:
    """Milliseconds from the enqueue to the value, the median, with a worker in the same process."""
    from harness.work import run_loop
    from qworker import Tasks
    from qworker.worker import Worker, WorkerOptions

    async def run() -> float:
        tasks = Tasks(given["url"])

        @tasks.task(result=60)
        async def add(number: int) -> int:
            return number + 1

        worker = Worker(tasks, WorkerOptions(concurrency=10))
        running = asyncio.create_task(worker.run())
        await (await add.enqueue(0)).result(timeout=30)
        taken: list[float] = []
        for number in range(given["count"]):
            started = time.perf_counter()
            await (await add.enqueue(number)).result(timeout=30)
            taken.append((time.perf_counter() - started) * 1e3)
        worker.drain()
        await running
        await tasks.aclose()
        return median(taken)

    return run_loop(run())


def fill(given: dict[str, Any]) -> None:
    """Publish calls that nothing takes."""
    from harness.work import run_loop
    from qworker import Tasks

    async def run() -> None:
        tasks = Tasks(given["url"])
        backend = await tasks.backend()
        batch = [tasks.task(work).call(0).draft] * 1_000
        for _ in range(0, given["depth"], len(batch)):
            await backend.publish("default", batch)
        await tasks.aclose()

    run_loop(run())


def look(given: dict[str, Any]) -> dict[str, float]:
    """Microseconds for one look at the status of a ready job, and for one publish with an id."""
    from harness.work import run_loop
    from qworker import Draft, Tasks

    async def time_each(call: Callable[[int], Awaitable[object]]) -> float:
        # The first calls open the store and fill the caches.
        await asyncio.gather(*map(call, range(given["count"], given["count"] + 10)))
        started = time.perf_counter()
        for number in range(given["count"]):
            await call(number)
        return (time.perf_counter() - started) / float(given["count"]) * 1e6

    async def run() -> dict[str, float]:
        tasks = Tasks(given["url"])
        backend = await tasks.backend()
        job = await tasks.task(work).enqueue(0)

        async def publish(number: int) -> None:
            await backend.publish("default", [Draft(body=b"x", id=f"{given['turn']}-{number}")])

        found = {"status": await time_each(lambda _: job.status()), "publish(id=)": await time_each(publish)}
        await tasks.aclose()
        return found

    return run_loop(run())


async def work(number: int) -> None:
    """Do nothing."""
