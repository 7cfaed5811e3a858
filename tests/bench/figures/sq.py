"""The log: durable writes with idle channels beside them, appends and reads without syncs; bodies of 4 KiB."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from harness import Bench, Figure
from harness.report import median
from harness.stopwatch import Stopwatch

_BODY = 4096
_CHANNELS = (0, 5, 10)
_TOPIC = "bench"


def measure(bench: Bench) -> list[Figure]:
    """Batches and single writers with idle channels; then bare appends and reads of a channel."""
    count = bench.size(5_000, 500)
    found = _durable(bench, count)
    folder = bench.fresh()
    rates = [bench.call(bare, url=_url(folder, "off"), count=bench.size(50_000, 1_000)) for _ in range(bench.rounds)]
    bench.discard(folder)
    for number, (what, asked) in enumerate(
        ((f"appends, {_BODY} bytes, sync=off", 100_000), ("reads by a channel", 200_000))
    ):
        rounds = [rate[number] for rate in rates]
        found.append(
            Figure(
                figure="sq", what=what, asked=asked, at_most=False, measured=median(rounds), unit="/s", rounds=rounds
            )
        )
    return found


def _durable(bench: Bench, count: int) -> list[Figure]:
    folders = {channels: bench.fresh() for channels in _CHANNELS}
    for channels, folder in folders.items():
        bench.call(register, url=_url(folder, "full"), channels=channels)

    def took(how: Any, channels: int) -> float:
        return float(bench.call(how, url=_url(folders[channels], "full"), count=count))

    found: list[Figure] = []
    for how, what, most in ((batches, "in batches of 100", None), (writers, "by 100 writers, each awaited", 0.25)):
        times = bench.turns([(str(n), partial(took, how, n)) for n in _CHANNELS])
        ten, none = times[str(_CHANNELS[-1])], times["0"]
        found.append(
            Figure(
                figure="sq",
                what=f"{count:,} durable messages {what}, {_CHANNELS[-1]} idle channels",
                # The batches' bound supposes that a sync takes 0.1 ms: here it is told beside it.
                asked=most,
                measured=median(ten),
                unit="s",
                rounds=ten,
                note=", ".join(f"{n} channels {median(times[str(n)]):.3f} s" for n in _CHANNELS[:-1])
                + f"; one fdatasync {_sync_ms(folders[0]):.2f} ms",
            )
        )
        ratios = [one / other for one, other in zip(ten, none, strict=True)]
        found.append(
            Figure(
                figure="sq",
                what=f"the same, {_CHANNELS[-1]} channels / none",
                asked=1.05 if how is batches else None,
                measured=median(ratios),
                unit="x",
                rounds=ratios,
            )
        )
    return found


def _url(folder: Any, sync: str) -> str:
    return f"sq://{folder}/log?sync={sync}"


def _sync_ms(folder: Any) -> float:
    """The median of a hundred writes of 4 KiB in place, each synced."""
    fd = os.open(f"{folder}/probe", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.pwrite(fd, bytes(_BODY), 0)
    os.fsync(fd)
    taken: list[float] = []
    for _ in range(100):
        os.pwrite(fd, os.urandom(_BODY), 0)
        timer = Stopwatch()
        os.fdatasync(fd)
        taken.append(timer.seconds * 1000)
    os.close(fd)
    return median(taken)


def register(given: dict[str, Any]) -> None:
    """Make the topic and its idle channels."""
    from harness.work import run_loop
    from qworker.backend.registry import open_backend

    async def run() -> None:
        for number in range(given["channels"]):
            backend = open_backend(f"{given['url']}&channel=idle{number}")
            await backend.open()
            await backend.create(_TOPIC)
            await backend.aclose()

    run_loop(run())


def batches(given: dict[str, Any]) -> float:
    """Seconds for `count` messages in batches of 100."""
    from harness.work import run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend

    async def run() -> float:
        backend = open_backend(given["url"])
        await backend.open()
        made = [Draft(body=os.urandom(_BODY)) for _ in range(100)]
        await backend.publish(_TOPIC, made)
        timer = Stopwatch()
        for _ in range(given["count"] // 100):
            await backend.publish(_TOPIC, made)
        took = timer.seconds
        await backend.aclose()
        return took

    return run_loop(run())


def writers(given: dict[str, Any]) -> float:
    """Seconds for `count` messages from a hundred writers that each wait for theirs."""
    from harness.work import run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend

    async def run() -> float:
        backend = open_backend(given["url"])
        await backend.open()
        made = [Draft(body=os.urandom(_BODY))]

        async def write(messages: int) -> None:
            for _ in range(messages):
                await backend.publish(_TOPIC, made)

        await asyncio.gather(*[write(1) for _ in range(100)])
        timer = Stopwatch()
        await asyncio.gather(*[write(given["count"] // 100) for _ in range(100)])
        took = timer.seconds
        await backend.aclose()
        return took

    return run_loop(run())


def bare(given: dict[str, Any]) -> tuple[float, float]:
    """Appends a second in batches of 1,000, and reads a second of what was appended."""
    from harness.work import run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend
    from qworker.clock import SYSTEM_CLOCK
    from qworker.url import BackendURL
    from qworker_sq.options import SqOptions
    from qworker_sq.store import SqStore

    async def run() -> tuple[float, float]:
        backend, url = open_backend(given["url"]), BackendURL.parse(given["url"])
        await backend.open()
        made = [Draft(body=os.urandom(_BODY)) for _ in range(1_000)]
        await backend.create(_TOPIC)
        store = SqStore(url.directory, SqOptions.from_url(url), SYSTEM_CLOCK)
        async with store.channel_section(_TOPIC) as channel:
            log, place = channel.topic.log, channel.end()
        timer = Stopwatch()
        for _ in range(given["count"] // 1_000):
            await backend.publish(_TOPIC, made)
        appended = given["count"] / timer.seconds
        end = channel.end()
        timer, count = Stopwatch(), 0
        while place < end:
            found, place = log.read(place, 1_000, end)
            count += len(found)
        assert count == given["count"]
        read = count / timer.seconds
        await store.aclose()
        await backend.aclose()
        return appended, read

    return run_loop(run())
