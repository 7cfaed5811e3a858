"""How fast finished messages get into Parquet and out of the queue, and what the driver needs for it."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

from harness import Bench, Figure
from harness.report import median
from harness.stopwatch import Stopwatch

ASKED = 30_000
_MASTER = "local[2]"
_QUEUE = "bench"
_HEAP = "1g"
# As many as the tasks of a removal have together.
_THREADS = 16


def measure(bench: Bench) -> list[Figure]:
    """A tenth first, then all: the rate is that of all, and the memory is compared."""
    count = bench.size(1_000_000, 2_000)
    few, many = (_archived(bench, number) for number in (count // 10, count))
    turns = _turns(bench, bench.size(300_000, 1_000), bench.few)
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
        *_turn_figures(bench.size(300_000, 1_000), turns),
    ]


def _turn_figures(count: int, turns: dict[str, list[float]]) -> list[Figure]:
    shares, bare = (
        [delete / other for delete, other in zip(turns["delete_s"], turns[than], strict=True)]
        for than in ("archive_s", "bare_s")
    )
    return [
        Figure(
            figure="spark_archive",
            what=f"removal of {count:,} archived messages / their archive, in turns",
            asked=1.0,
            measured=median(shares),
            unit="x",
            rounds=shares,
            note=f"{median(turns['delete_s']):.1f} s and {median(turns['archive_s']):.1f} s",
        ),
        Figure(
            figure="spark_archive",
            what=f"removal of {count:,} archived messages / bare unlinks of as many files in {_THREADS} threads",
            measured=median(bare),
            unit="x",
            rounds=bare,
            note=f"{median(turns['bare_s']):.1f} s",
        ),
        Figure(
            figure="spark_archive",
            what=f"archive with nothing new, {count:,} kept messages",
            asked=2.0,
            measured=median(turns["idle_s"]),
            unit="s",
            rounds=turns["idle_s"],
        ),
    ]


def _turns(bench: Bench, count: int, rounds: int) -> dict[str, list[float]]:
    folder = bench.fresh()
    found: dict[str, list[float]] = bench.call(
        archive_and_remove_in_turns, folder=str(folder), count=count, rounds=rounds, settle=not bench.quick
    )
    bench.discard(folder)
    return found


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


def archive_and_remove_in_turns(given: dict[str, Any]) -> dict[str, list[float]]:
    """Archive a store, archive it again with nothing new, and remove what is archived, round after round.

    In each round, the files of a store of the same size are also removed by bare system calls.
    """
    import os

    from qworker.pipeline.jobs.archive import archive
    from qworker.pipeline.session import start_session

    spark = start_session(_MASTER, options={"spark.driver.memory": _HEAP})
    taken: dict[str, list[float]] = {"archive_s": [], "idle_s": [], "delete_s": [], "bare_s": []}
    # The first round compiles what all others use, and is not counted.
    for number in range(given["rounds"] + 1):
        url, target = f"file://{given['folder']}/{number}/spool", f"{given['folder']}/{number}/archive"
        fill({"url": url, "count": given["count"]})
        # What filled the store is on the disk before anything is measured.
        os.sync()
        for what, delete in (("archive_s", False), ("idle_s", False), ("delete_s", True)):
            if what == "idle_s" and given["settle"]:
                # A directory that has just changed is listed once more.
                time.sleep(3.0)
                archive(spark, url, target)
            timer = Stopwatch()
            found = archive(spark, url, target, delete=delete)
            taken[what].append(timer.seconds)
            assert (found.messages, found.removed) == (
                given["count"] if what == "archive_s" else 0,
                given["count"] if delete else 0,
            )
        bare = f"{given['folder']}/{number}/bare"
        fill({"url": f"file://{bare}", "count": given["count"]})
        os.sync()
        timer = Stopwatch()
        unlink_all(f"{bare}/{_QUEUE}/done")
        taken["bare_s"].append(timer.seconds)
    spark.stop()
    return {what: seconds[1:] for what, seconds in taken.items()}


def unlink_all(directory: str) -> None:
    """Remove all files of a directory, in threads."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    def unlink(names: list[str]) -> None:
        for name in names:
            os.unlink(f"{directory}/{name}")

    names = os.listdir(directory)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(unlink, [names[start::_THREADS] for start in range(_THREADS)]))
