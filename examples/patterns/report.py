"""A report: a handler that enqueues the parts, waits for their results, and adds them up."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from qworker import Context, Tasks

HOUR = timedelta(hours=1)

tasks = Tasks("file://./spool/report")


@tasks.task(result=HOUR)
def count_words(path: str) -> int:
    """Count the words of a file: one part of the report."""
    return len(Path(path).read_text().split())


@tasks.task(result=HOUR)
async def report(ctx: Context, paths: list[str]) -> dict[str, int]:
    """Count the words of files. While it waits, its worker runs the parts, even with `-c 1`.

    The ids of the parts are reserved for an hour. If the worker is killed, the next attempt finds the parts of the
    first one, with their results, and does not enqueue them again.
    """
    calls = [
        count_words.using(id=f"{ctx.message.id}.{number}", hold=HOUR).call(path) for number, path in enumerate(paths)
    ]
    counts: dict[str, int] = {}
    for path, job in zip(paths, await tasks.enqueue_many(calls), strict=True):
        counts[path] = await job.result()
        ctx.progress(len(counts), len(paths), path)
    return counts


if __name__ == "__main__":
    job = report.enqueue_sync(sys.argv[1:])
    for progress in job.progress_sync():
        print(f"{progress.done:g} of {progress.total:g}", flush=True)
    print(job.result_sync(), flush=True)
