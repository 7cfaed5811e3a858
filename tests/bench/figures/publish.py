"""One awaited publish at sync=full, beside the bare system calls that a durable publish needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.report import median, percentile
from harness.stopwatch import Stopwatch

ASKED = 1.2


def measure(bench: Bench) -> list[Figure]:
    """The ratio of the medians, and both of them."""
    folder = bench.fresh()
    rounds = [
        bench.call(work, url=bench.url(folder, "full"), bare=str(bench.fresh()), count=bench.size(300, 50))
        for _ in range(bench.rounds)
    ]
    ratios = [ours / bare for ours, bare, _ in rounds]
    own, costs = [ours for ours, *_ in rounds], [cpu for *_, cpu in rounds]
    return [
        Figure(
            figure="publish",
            what="single publish, sync=full / create, write, fsync, rename, fsync of the directory",
            asked=ASKED,
            measured=median(ratios),
            unit="x",
            rounds=ratios,
            note=f"{median(own):.0f} us, bare {median([bare for _, bare, _ in rounds]):.0f} us",
        ),
        Figure(
            figure="publish",
            what="single publish, sync=full",
            measured=median(own),
            unit="us",
            rounds=own,
        ),
        Figure(
            figure="publish", what="CPU of a single publish, sync=full", measured=median(costs), unit="us", rounds=costs
        ),
    ]


def work(given: dict[str, Any]) -> tuple[float, float, float]:
    """Medians in us of `count` publishes and as many bare sequences, in turns of ten, after a warm-up.

    The third is the CPU of a publish in us.
    """
    from harness.bare import BareQueue
    from harness.work import QUEUE, drafts, noop_app, run_loop

    async def run() -> tuple[float, float, float]:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        bare = BareQueue(Path(given["bare"]))
        draft = drafts(tasks, 1)
        ours: list[float] = []
        theirs: list[float] = []
        cpu = 0.0
        for turn in range(given["count"] // 10 + 1):
            ten = Stopwatch()
            for _ in range(10):
                timer = Stopwatch()
                await backend.publish(QUEUE, draft)
                took = timer.seconds
                if turn:
                    ours.append(took * 1e6)
            cpu += ten.cpu_seconds if turn else 0
            for _ in range(10):
                timer = Stopwatch()
                bare.publish(draft[0].body, durable=True)
                took = timer.seconds
                if turn:
                    theirs.append(took * 1e6)
        return percentile(ours, 0.5), percentile(theirs, 0.5), cpu / len(ours) * 1e6

    return run_loop(run())
