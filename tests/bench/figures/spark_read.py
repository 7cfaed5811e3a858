"""How fast Spark reads a log: a million records as rows with all columns, which nothing then keeps."""

from __future__ import annotations

import asyncio
from typing import Any

from harness import Bench, Figure
from harness.report import median
from harness.stopwatch import Stopwatch

ASKED = 150_000
_MASTER = "local[2]"
_QUEUE = "bench"


def measure(bench: Bench) -> list[Figure]:
    """Rows per second, planning included, in a session that has read before."""
    count = bench.size(1_000_000, 5_000)
    folder = bench.fresh()
    url = f"sq://{folder}/store?sync=off"
    bench.call(fill, url=url, count=count)
    rounds: list[float] = bench.call(read, url=url, count=count, rounds=bench.rounds)
    bench.discard(folder)
    return [
        Figure(
            figure="spark_read",
            what=f"read of {count:,} sq records, {_MASTER}",
            asked=ASKED,
            at_most=False,
            measured=median(rounds),
            unit="rows/s",
            rounds=rounds,
        )
    ]


def fill(given: dict[str, Any]) -> None:
    """Append task calls of about 100 bytes."""
    from qworker.backend.registry import open_backend
    from qworker.message import Draft

    async def run() -> None:
        backend = open_backend(given["url"])
        for first in range(0, given["count"], 5_000):
            numbers = range(first, min(first + 5_000, given["count"]))
            await backend.publish(_QUEUE, [Draft(body=body(number)) for number in numbers])
        await backend.aclose()

    asyncio.run(run())


def body(number: int) -> bytes:
    """An envelope as a task of some arguments makes it."""
    return b'{"task":"thumbnail","args":["images/%09d.png"],"kwargs":{"width":640,"height":480},"headers":{}}' % number


def read(given: dict[str, Any]) -> list[float]:
    """Rows per second of each round, after one that does not count."""
    from pyspark.sql import DataFrame

    from qworker.pipeline.session import start_session

    spark = start_session(_MASTER, options={"spark.driver.memory": "1g"})
    found: list[float] = []

    def load() -> DataFrame:
        return spark.read.format("qworker").options(url=given["url"], queue=_QUEUE, state="ready").load()

    for number in range(given["rounds"] + 1):
        timer = Stopwatch()
        load().write.format("noop").mode("overwrite").save()
        if number:
            found.append(given["count"] / timer.seconds)
    assert load().count() == given["count"]
    spark.stop()
    return found
