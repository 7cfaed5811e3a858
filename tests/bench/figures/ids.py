"""What an id costs that its publisher chose, when many messages wait, are delayed and have failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from harness import Bench, Figure
from harness.report import median

ASKED_DEEP = 1.3
ASKED_PLAIN = 4.0
_WORDS = {
    "publish": "publish of a new id",
    "again": "publish of an id that is stored",
    "find": "find of an id",
    "find_ref": "find of a ready message by the id that the store created, and its task",
    "explain": "explain of a failed message by its id",
    "explain_ready": "explain of a ready message by its id",
    "explain_delayed": "explain of a delayed message by its id",
}


def measure(bench: Bench) -> list[Figure]:
    """Publish, find and explain by id in a deep and in a shallow queue, without syncs, which would hide the rest."""
    deep, failed = bench.size(1_000_000, 5_000), bench.size(100_000, 1_000)
    count = bench.size(2_000, 200)
    folder, other = bench.fresh(), bench.fresh()
    bench.call(fill, url=bench.url(folder, "off"), depth=deep, failed=failed)
    bench.call(fill, url=bench.url(other, "off"), depth=1_000, failed=1_000)
    beneath: list[dict[str, float]] = []
    shallow: list[dict[str, float]] = []
    for number in range(bench.few):
        shallow.append(bench.call(ask, url=bench.url(other, "off"), count=count, number=number))
        beneath.append(bench.call(ask, url=bench.url(folder, "off"), count=count, number=number))
    bench.discard(folder)
    bench.discard(other)
    depth = f"{deep:,} waiting, {deep:,} delayed and {failed:,} failed"
    figures = [
        _ratio(f"{what}, {depth} / 1,000 of each", ASKED_DEEP, [r[key] for r in beneath], [r[key] for r in shallow])
        for key, what in _WORDS.items()
    ]
    figures.append(
        _ratio(
            f"{_WORDS['publish']} / of a plain message, {depth}",
            ASKED_PLAIN,
            [each["publish"] for each in beneath],
            [each["plain"] for each in beneath],
        )
    )
    for key, what in _WORDS.items():
        times = [each[key] for each in beneath]
        figures.append(Figure(figure="ids", what=f"{what}, {depth}", measured=median(times), unit="us", rounds=times))
    return figures


def _ratio(what: str, asked: float, ours: list[float], others: list[float]) -> Figure:
    return Figure(
        figure="ids",
        what=what,
        asked=asked,
        measured=median(ours) / median(others),
        unit="x",
        rounds=[one / other for one, other in zip(ours, others, strict=True)],
        note=f"{median(ours):.0f} us and {median(others):.0f} us",
    )


def fill(given: dict[str, Any]) -> None:
    """Make failed, delayed and ready messages; some of each have an id."""
    from harness.work import QUEUE, run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend
    from qworker.message import SettleAction, Settlement

    batch = 1_000

    async def run() -> None:
        backend = open_backend(given["url"])
        await backend.open()

        async def publish(count: int, kind: str, **options: Any) -> None:
            named = [Draft(body=b"x", id=f"{kind}-{n}", **options) for n in range(100)]
            await backend.publish(QUEUE, named)
            for start in range(100, count, batch):
                await backend.publish(QUEUE, [Draft(body=b"x", **options)] * min(batch, count - start))

        await publish(given["failed"], "failed")
        while leases := await backend.lease(QUEUE, batch, 600.0):
            await backend.settle([Settlement(lease=each, action=SettleAction.FAIL_PERM) for each in leases])
        await publish(given["depth"], "delayed", delay=1e6)
        await publish(given["depth"], "ready")
        await backend.aclose()

    run_loop(run())


def ask(given: dict[str, Any]) -> dict[str, float]:
    """Microseconds per call, by the call."""
    from harness.work import QUEUE, run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend
    from qworker.message import MessageRef
    from qworker.tools.explain import explain

    count: int = given["count"]
    number: int = given["number"]

    async def time_each(call: Callable[[int], Awaitable[object]]) -> float:
        started = time.perf_counter_ns()
        for each in range(count):
            await call(each)
        taken: int = time.perf_counter_ns() - started
        return taken / count / 1e3

    async def run() -> dict[str, float]:
        backend = open_backend(given["url"])
        await backend.open()
        kinds = ("ready", "delayed", "failed")
        created = await backend.publish(QUEUE, [Draft(body=b"x", task="resize")] * 100)
        calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "plain": lambda n: backend.publish(QUEUE, [Draft(body=b"x")]),
            "publish": lambda n: backend.publish(QUEUE, [Draft(body=b"x", id=f"new-{number}-{n}")]),
            "again": lambda n: backend.publish(QUEUE, [Draft(body=b"x", id=f"{kinds[n % 3]}-{n % 100}")]),
            "find": lambda n: backend.find(QUEUE, [f"{kinds[n % 3]}-{n % 100}"]),
            "find_ref": lambda n: backend.find(QUEUE, [MessageRef(created[n % 100], "resize")]),
            "explain": lambda n: explain(backend, QUEUE, f"failed-{n % 100}"),
            "explain_ready": lambda n: explain(backend, QUEUE, f"ready-{n % 100}"),
            "explain_delayed": lambda n: explain(backend, QUEUE, f"delayed-{n % 100}"),
        }
        found: dict[str, float] = {}
        for name, call in calls.items():
            # The first calls open the store and fill the caches.
            await asyncio.gather(*map(call, range(count, count + 10)))
            found[name] = await time_each(call)
        await backend.aclose()
        return found

    return run_loop(run())
