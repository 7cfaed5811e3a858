"""One awaited publish at sync=full, beside the bare system calls that a durable publish needs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.report import median, percentile

ASKED = 1.2


def measure(bench: Bench) -> list[Figure]:
    """The ratio of the medians, and both of them."""
    folder = bench.fresh()
    rounds = [
        bench.call(work, url=bench.url(folder, "full"), bare=str(bench.fresh()), count=bench.size(300, 50))
        for _ in range(bench.rounds)
    ]
    ratios = [ours / bare for ours, bare in rounds]
    return [
        Figure(
            figure="publish",
            what="single publish, sync=full / create, write, fsync, rename, fsync of the directory",
            asked=ASKED,
            measured=median(ratios),
            unit="x",
            rounds=ratios,
            note=f"{median([ours for ours, _ in rounds]):.0f} us, bare {median([bare for _, bare in rounds]):.0f} us",
        )
    ]


def work(given: dict[str, Any]) -> tuple[float, float]:
    """Medians in us of `count` publishes and as many bare sequences, in turns of ten, after a warm-up."""
    from harness.work import QUEUE, drafts, noop_app, run_loop

    async def run() -> tuple[float, float]:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        bare = _Bare(Path(given["bare"]))
        draft = drafts(tasks, 1)
        ours: list[float] = []
        theirs: list[float] = []
        for turn in range(given["count"] // 10 + 1):
            for _ in range(10):
                began = time.perf_counter()
                await backend.publish(QUEUE, draft)
                took = time.perf_counter() - began
                if turn:
                    ours.append(took * 1e6)
            for _ in range(10):
                took = bare.publish(draft[0].body)
                if turn:
                    theirs.append(took * 1e6)
        return percentile(ours, 0.5), percentile(theirs, 0.5)

    return run_loop(run())


class _Bare:
    """The sequence, with directories opened beforehand, and nothing else."""

    def __init__(self, folder: Path) -> None:
        for name in ("tmp", "queue"):
            (folder / name).mkdir()
        self._tmp = os.open(folder / "tmp", os.O_RDONLY)
        self._queue = os.open(folder / "queue", os.O_RDONLY)
        self._count = 0

    def publish(self, body: bytes) -> float:
        """Seconds that one took."""
        self._count += 1
        name = f"_20261121071038_{self._count:09d}_4242_host-7f3a0000_0_noop"
        began = time.perf_counter()
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._tmp)
        os.write(file, body)
        os.fsync(file)
        os.rename(name, name, src_dir_fd=self._tmp, dst_dir_fd=self._queue)
        os.close(file)
        os.fsync(self._queue)
        return time.perf_counter() - began
