"""A cancel of a running handler: how long until it has ended, and whether any other message's handler was stopped."""

from __future__ import annotations

import asyncio
import os
import random
import select
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Bench, Figure
from harness.report import median
from harness.running import Running
from harness.server import redis_server

ASKED_S = 1.5
# Kind: messages that are cancelled while their handler runs, and those of one batch. A worker has a process for each
# processor, and each that is killed is started again.
_KINDS = {"async": (450, 30), "thread": (450, 30), "process": (100, 1)}
_CONCURRENCY = 50
_LONG = 3600.0

_APP = """
import asyncio, os, time
from qworker import Context, Tasks

tasks = Tasks()
ledger = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

def note(what, number):
    os.write(ledger, f"{what} {number} {time.monotonic_ns()} {os.getpid()}\\n".encode())

@tasks.task(name="async", queue="bench")
async def hold_async(number: int, seconds: float) -> None:
    note("begin", number)
    how = "cut"
    try:
        await asyncio.sleep(seconds)
        how = "done"
    finally:
        note(how, number)

@tasks.task(name="thread", queue="bench")
def hold_thread(context: Context, number: int, seconds: float) -> None:
    note("begin", number)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if context.cancelled():
            note("cut", number)
            return
        time.sleep(0.01)
    note("done", number)

@tasks.task(name="process", queue="bench", process=True)
def hold_process(number: int, seconds: float) -> None:
    note("begin", number)
    time.sleep(seconds)
    note("done", number)
"""


def measure(bench: Bench) -> list[Figure]:
    """Cancel handlers of each kind beside others, on a directory and on a Redis."""
    found: list[Figure] = []
    for redis in (False, True):
        folder = bench.fresh()
        (folder / "app.py").write_text(_APP)
        with ExitStack() as stack:
            url = stack.enter_context(redis_server(folder)).url if redis else bench.url(folder)
            worker = Running(folder, url, "-c", str(_CONCURRENCY))
            stack.callback(worker.kill)
            worker.event("worker_started")
            counts = {kind: (bench.size(count, 2 * batch), batch) for kind, (count, batch) in _KINDS.items()}
            result = bench.call(cancel_all, url=url, folder=str(folder), kinds=counts)
            worker.drain()
        found += _figures("redis:" if redis else "file:", result)
        bench.discard(folder)
    return found


def _figures(name: str, result: dict[str, Any]) -> list[Figure]:
    times: dict[str, list[float]] = result["times"]
    every = [one for kind in times.values() for one in kind]
    return [
        *(
            Figure(
                figure="cancel",
                what=f"{name} from cancel() to the end of a running handler ({kind}), the slowest",
                asked=ASKED_S,
                measured=max(found),
                unit="s",
                note=f"median {median(found):.2f} s",
            )
            for kind, found in times.items()
        ),
        Figure(
            figure="cancel",
            what=f"{name} cancelled handlers of {len(every):,} that ran longer",
            asked=0,
            measured=sum(one > ASKED_S for one in every),
            unit="",
        ),
        Figure(
            figure="cancel",
            what=f"{name} handlers of other messages that did not begin once and end by themselves",
            asked=0,
            measured=result["disturbed"],
            unit="",
            note=f"of {result['others']:,}",
        ),
    ]


class _Ledger:
    """What handlers have written: who began when and where, and who ended how and when."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger"
        self._at = 0
        self.begun: dict[int, list[int]] = {}
        self.ended: dict[int, list[tuple[str, int]]] = {}

    async def until(self, numbers: set[int], where: dict[int, Any]) -> None:
        """Wait until all of some messages are there."""
        deadline = time.monotonic() + 120
        while not numbers <= where.keys():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within 120 s: {sorted(numbers - where.keys())[:10]}")
            await asyncio.sleep(0.005)
            self._read()

    def _read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._at)
            lines = file.read()
        self._at += len(lines)
        # One write each, so a line is there or not.
        for what, number, at, process in map(str.split, lines.decode().splitlines()):
            if what == "begin":
                self.begun.setdefault(int(number), []).append(int(process))
            else:
                self.ended.setdefault(int(number), []).append((what, int(at)))


def cancel_all(given: dict[str, Any]) -> dict[str, Any]:
    """Cancel handlers in batches, each beside others that end by themselves or are about to."""
    from harness.work import run_loop

    sys.path.insert(0, given["folder"])
    os.chdir(given["folder"])
    return run_loop(_cancel_all(given))


async def _cancel_all(given: dict[str, Any]) -> dict[str, Any]:
    from app import tasks  # type: ignore[import-not-found]

    tasks._replace_url(given["url"])
    ledger, draw = _Ledger(Path(given["folder"])), random.Random(7)
    times: dict[str, list[float]] = {}
    others: set[int] = set()
    number = 0
    for kind, (count, batch) in given["kinds"].items():
        times[kind] = []
        while len(times[kind]) < count:
            # The second group takes the places of those that end or are cancelled. Its first half is cancelled too, at
            # about the time at which it ends: such a cancel must not reach the next handler of its place.
            first = range(number, number + batch)
            racing = range(first.stop, first.stop + batch // 2)
            beside = range(racing.stop, racing.stop + max(1, batch))
            number = beside.stop
            lengths = dict.fromkeys(first, _LONG)
            lengths |= {one: draw.uniform(0.0, 0.5) for one in (*racing, *beside)}
            calls = [tasks[kind].call(one, seconds) for one, seconds in lengths.items()]
            jobs = dict(zip(lengths, await tasks.enqueue_many(calls), strict=True))
            others |= set(beside)
            await ledger.until(set(first), ledger.begun)
            ends = [asyncio.create_task(_end(ledger, one, kind, jobs[one], draw.random())) for one in first]
            for one in racing:
                await asyncio.sleep(draw.uniform(0.0, 0.02))
                await jobs[one].cancel()
            times[kind] += [await end for end in ends]
            await ledger.until(set(beside), ledger.ended)
    await tasks.aclose()
    good = sum(len(ledger.begun[one]) == 1 and [how for how, _ in ledger.ended[one]] == ["done"] for one in others)
    return {"times": times, "others": len(others), "disturbed": len(others) - good}


async def _end(ledger: _Ledger, number: int, kind: str, job: Any, pause: float) -> float:
    """Seconds from the call of `cancel` to the end of the handler; of a process, to the process's own end."""
    # A worker looks about once a second: the cancels come at any time between two looks.
    await asyncio.sleep(pause)
    descriptor = os.pidfd_open(ledger.begun[number][0]) if kind == "process" else None
    started = time.monotonic_ns()
    was = await job.cancel()
    if was != "running":
        raise RuntimeError(f"a handler that runs for an hour was {was}")
    if descriptor is None:
        await ledger.until({number}, ledger.ended)
        return (ledger.ended[number][0][1] - started) / 1e9
    await asyncio.to_thread(select.select, [descriptor], [], [], 120)
    taken = time.monotonic_ns() - started
    os.close(descriptor)
    return taken / 1e9
