"""`load` of a Parquet table into a directory and into Redis, compared with awaited enqueues, and with killed tasks."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.report import median, spread
from harness.server import redis_server
from harness.stopwatch import Stopwatch

ROOT = Path(__file__).parents[3]
_TASKS = 2
MASTER = f"local[{_TASKS},4]"
# Bodies have 100 bytes, envelope and all.
TEXT = "rpad(cast(id as string), 45, 'x')"
KILLS = 20


def measure(bench: Bench) -> list[Figure]:
    """Rows per second into both stores, and what 20 killed task processes lose and double."""
    rows, rounds = bench.size(1_000_000, 2_000), bench.few
    into_files, bare = [], []
    for _ in range(rounds):
        into_files.append(_into_files(bench, load_rows, rows))
        bare.append(_into_files(bench, bare_rows, rows))
    awaited = [bench.call(enqueue, url=bench.url(bench.fresh(), "full"), count=bench.size(3_000, 50)) for _ in range(3)]
    with redis_server(bench.fresh()) as server:
        into_redis = [_into_redis(bench, server, rows) for _ in range(rounds)]
    folder = bench.fresh()
    kills = KILLS if not bench.quick else 2
    killed = bench.call(
        kill, url=bench.url(folder, "full"), source=str(folder / "rows"), rows=bench.size(20_000, 1_000), kills=kills
    )
    bench.discard(folder)
    shares = [ours / calls for ours, calls in zip(into_files, bare, strict=True)]
    return [
        _figure(f"load {rows:,} rows into file:, sync=full", 20_000, into_files, "/s"),
        Figure(
            figure="spark_load",
            what="the last / its bare system calls",
            at_most=False,
            measured=median(shares),
            unit="x",
            rounds=shares,
            note=f"{median(bare):,.0f}/s",
        ),
        _figure(
            "load into file: / a loop of awaited enqueues",
            8,
            [rate / median(awaited) for rate in into_files],
            "x",
            f"{median(awaited):,.0f}/s awaited",
        ),
        _figure(f"load {rows:,} rows into Redis", 60_000, into_redis, "/s"),
        _none(f"rows lost, {killed['killed']} task processes killed", killed["lost"], killed["aborted"]),
        _none(f"rows doubled, {killed['killed']} task processes killed", killed["doubled"], killed["aborted"]),
    ]


def _figure(what: str, asked: float, rates: list[float], unit: str, note: str = "") -> Figure:
    return Figure(
        figure="spark_load",
        what=what,
        asked=asked,
        at_most=False,
        measured=median(rates),
        unit=unit,
        rounds=rates,
        note=note or spread(rates),
    )


def _none(what: str, count: int, aborted: int) -> Figure:
    note = f"{aborted} loads were aborted, and run again"
    return Figure(figure="spark_load", what=what, asked=0, measured=count, unit="", note=note)


def _into_files(bench: Bench, function: Callable[[dict[str, Any]], float], rows: int) -> float:
    folder = bench.fresh()
    rate: float = bench.call(
        function, folder=str(folder), url=bench.url(folder, "full"), source=str(folder / "rows"), rows=rows
    )
    bench.discard(folder)
    return rate


def _into_redis(bench: Bench, server: Any, rows: int) -> float:
    server.ask("FLUSHALL")
    folder = bench.fresh()
    rate: float = bench.call(load_rows, url=server.url, source=str(folder / "rows"), rows=rows)
    bench.discard(folder)
    return rate


# -- in processes of their own -----------------------------------------------------------------------------------------


def enqueue(given: dict[str, Any]) -> float:
    """Calls per second, each awaited before the next."""
    from harness.work import noop_app, run_loop

    async def run() -> float:
        noop = noop_app(given["url"])["noop"]
        for _ in range(20):
            await noop.enqueue("x" * 45)
        timer = Stopwatch()
        for _ in range(given["count"]):
            await noop.enqueue("x" * 45)
        return float(given["count"] / timer.seconds)

    return run_loop(run())


def load_rows(given: dict[str, Any]) -> float:
    """Rows per second of one load, in a session that has loaded before."""
    from harness.work import QUEUE, noop_app, run_loop
    from qworker.backend.registry import open_backend
    from qworker.pipeline.jobs.load import load
    from qworker.pipeline.session import start_session

    spark = start_session(MASTER)
    rows = given["rows"]
    _write_source(spark, given["source"], rows)
    app = noop_app(given["url"])
    load(spark, spark.read.parquet(given["source"]).limit(2_000), given["url"], "warm", "noop", app=app, name="warm")
    source = spark.read.parquet(given["source"])
    timer = Stopwatch()
    found = load(spark, source, given["url"], QUEUE, "noop", app=app, name="bench")
    taken = timer.seconds

    async def count() -> int:
        backend = open_backend(given["url"])
        ready = (await backend.stats(QUEUE)).ready
        await backend.aclose()
        return ready

    if not found.enqueued == run_loop(count()) == rows:
        raise RuntimeError(f"{found.enqueued} of {rows} rows were enqueued")
    spark.stop()
    return float(rows / taken)


def bare_rows(given: dict[str, Any]) -> float:
    """Rows per second of nothing but the system calls of such a load, by as many processes."""
    from multiprocessing import Process

    from harness.bare import BareBulk

    share = given["rows"] // _TASKS
    timer = Stopwatch()
    bulk = BareBulk(Path(given["folder"]))
    writers = [Process(target=bulk.write, args=(part, share, b"x" * 100)) for part in range(_TASKS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"a writer ended with {writer.exitcode}")
    bulk.move()
    return float(_TASKS * share / timer.seconds)


def kill(given: dict[str, Any]) -> dict[str, int]:
    """Load again and again, each time with one task process killed at a random moment; then count what is there."""
    from harness.work import QUEUE, noop_app, run_loop
    from qworker.backend.registry import open_backend
    from qworker.errors import QworkerError
    from qworker.message import Query, State
    from qworker.pipeline.jobs.load import load
    from qworker.pipeline.session import start_session

    sys.path.insert(0, str(ROOT))
    from tests.spark.killing import Killer, jvm

    spark = start_session(MASTER)
    _write_source(spark, given["source"], given["rows"])
    source, app, url = spark.read.parquet(given["source"]), noop_app(given["url"]), given["url"]
    load(spark, source.limit(1_000), url, "warm", "noop", app=app, name="warm")
    timer = Stopwatch()
    load(spark, source, url, "warm", "noop", app=app, name="timed")
    usual = timer.seconds
    draw, process, done = random.Random(7), jvm(spark), {"killed": 0, "aborted": 0, "jobs": 0}
    while done["killed"] < given["kills"] and done["jobs"] < 8 * given["kills"]:
        job = f"job-{done['jobs']}"
        done["jobs"] += 1
        with Killer(process, draw, within=usual) as killer:
            try:
                load(spark, source, url, QUEUE, "noop", app=app, name=job)
            except QworkerError:
                done["aborted"] += 1
                load(spark, source, url, QUEUE, "noop", app=app, name=job)
        done["killed"] += killer.killed
    spark.stop()

    async def look() -> Counter[bytes]:
        backend = open_backend(url)
        pages = backend.browse(QUEUE, Query(State.READY))
        found = Counter([stored.message.body async for page in pages for stored in page])
        await backend.aclose()
        return found

    found = run_loop(look())
    lost = (given["rows"] - len(found)) * done["jobs"] + sum(max(0, done["jobs"] - count) for count in found.values())
    doubled = sum(max(0, count - done["jobs"]) for count in found.values())
    return {**done, "lost": lost, "doubled": doubled}


def _write_source(spark: Any, path: str, rows: int) -> None:
    spark.range(0, rows, 1, 8).selectExpr(f"{TEXT} as text").write.parquet(path)
