"""How fast finished messages get into Parquet and out of the queue, and what the driver needs for it."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from harness import Bench, Figure
from harness.stopwatch import Stopwatch

ASKED = 30_000
_MASTER = "local[2]"
_QUEUE = "bench"
_HEAP = "1g"


def measure(bench: Bench) -> list[Figure]:
    """A tenth first, then all: the rate is that of all, and the memory is compared."""
    count = bench.size(1_000_000, 2_000)
    few, many = (_archived(bench, number) for number in (count // 10, count))
    return [
        Figure(
            figure="spark_archive",
            what=f"archive {count:,} done messages to Parquet, {_MASTER}",
            asked=ASKED,
            at_most=False,
            measured=count / many["archive_s"],
            unit="/s",
            note=f"the JVM has {_HEAP}, which holds the tasks too; every file is synced before the run ends",
        ),
        Figure(
            figure="spark_archive",
            what=f"the driver's memory, {count:,} messages / {count // 10:,}",
            asked=1.1,
            measured=many["driver_kb"] / few["driver_kb"],
            unit="x",
            note=f"{many['driver_kb'] / 1024:.0f} MiB and {few['driver_kb'] / 1024:.0f} MiB at most",
        ),
        Figure(
            figure="spark_archive",
            what=f"archive again, with --delete: {count:,} found in the table, and removed",
            at_most=False,
            measured=count / many["delete_s"],
            unit="/s",
        ),
    ]


def _archived(bench: Bench, count: int) -> dict[str, float]:
    folder = bench.fresh()
    url = f"file://{folder}/spool"
    bench.call(fill, url=url, count=count)
    found: dict[str, float] = bench.call(archive_all, url=url, target=f"{folder}/archive", count=count)
    bench.discard(folder)
    return found


def fill(given: dict[str, Any]) -> None:
    """Make finished messages, as acks leave them where done messages are kept."""
    import os

    from figures.spark_read import body
    from qworker.backend.registry import open_backend
    from qworker.kit.opening import open_directory
    from qworker.names import new_ids
    from qworker_file.names import item_name

    async def create() -> None:
        backend = open_backend(given["url"])
        await backend.create(_QUEUE)
        await backend.aclose()

    asyncio.run(create())
    path = given["url"].partition("://")[2].partition("?")[0]
    done = open_directory(f"{path}/{_QUEUE}/done")
    for number, stem in enumerate(new_ids(given["count"])):
        fd = os.open(item_name(stem, 0, ("thumbnail",)), os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=done)
        os.write(fd, body(number))
        os.close(fd)
    os.fsync(done)
    os.close(done)


def archive_all(given: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a run and of one that deletes, and the peak memory of this process in the first."""
    from qworker.pipeline.jobs.archive import archive
    from qworker.pipeline.session import start_session

    spark = start_session(_MASTER, options={"spark.driver.memory": _HEAP})
    # The session's first jobs compile what all others use.
    spark.range(1000).repartition(2).write.parquet(f"{given['target']}-warm")
    timer = Stopwatch()
    first = archive(spark, given["url"], given["target"])
    archive_s = timer.seconds
    driver_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timer = Stopwatch()
    second = archive(spark, given["url"], given["target"], delete=True)
    delete_s = timer.seconds
    assert (first.messages, second.messages, second.removed) == (given["count"], 0, given["count"])
    spark.stop()
    return {"archive_s": archive_s, "delete_s": delete_s, "driver_kb": driver_kb}
