"""The dashboard of a deep queue: its pages, what it costs with and without viewers, and what it costs others."""

from __future__ import annotations

import re
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from figures import depth
from figures.ui_beside import QUEUE, beside_worker, figure, publishing, stall, three_processes
from harness import Bench, Figure
from harness.dashboard import Browser, Dashboard, bare_server, dashboard, viewers
from harness.process import cpu_seconds, memory_mb
from harness.report import percentile
from harness.running import until
from harness.server import redis_server

_GROUPS = 40


def measure(bench: Bench) -> list[Figure]:
    """The same on a directory and on a Redis; and a store with many queues."""
    found: list[Figure] = []
    folder = bench.fresh()
    found += _of_store(bench, "file:", bench.url(folder), folder)
    bench.discard(folder)
    folder = bench.fresh()
    with redis_server(folder) as server:
        found += _of_store(bench, "redis:", server.url, folder)
    return found + _many_queues(bench)


def _of_store(bench: Bench, name: str, url: str, folder: Path) -> list[Figure]:
    waiting, failed = bench.size(1_000_000, 60_000), bench.size(100_000, 1_000)
    bench.call(fail, url=url, count=failed)
    bench.call(depth.fill, url=url, depth=waiting)
    found: list[Figure] = []
    with dashboard(url, folder) as shown:
        shown.counted(QUEUE)
        paths = _pages(shown, bench.call(ids, url=url))
        found += _listings(bench, shown, paths)
        _settle(bench, shown)
        found += _viewers(bench, shown)
        found += _cost(bench, shown, "idle", 0.3)
        with publishing(url):
            found += _times(bench, shown, paths)
            found += _cost(bench, shown, "one publish per second", 2.5)
            found += _age(bench, shown, waiting)
        found += _memory(bench, shown, paths)
    found += stall(bench, url, paths)
    found += beside_worker(bench, url, folder)
    if name == "file:":
        found += three_processes(bench, url, folder)
    return [
        Figure(**{**vars(one), "figure": "ui", "what": f"{name} {waiting:,} waiting, {failed:,} failed: {one.what}"})
        for one in found
    ]


def _pages(shown: Dashboard, found: dict[str, str]) -> list[str]:
    """The path of every page, each of which was looked at once, when it has what it shows."""
    browser = shown.browser()
    groups: list[str] = until(partial(_groups, browser), "the groups of failures", patience=600)
    paths = [
        "/",
        f"/q/{QUEUE}",
        f"/q/{QUEUE}?state=failed&order=newest",
        f"/q/{QUEUE}?range=7d",
        "/failures",
        *groups[:1],
    ]
    paths += [f"/m/{QUEUE}/{one}" for one in found.values()]
    paths += [f"/find?id={found['ready']}", "/schedules"]
    for path in paths:
        until(lambda path=path: "being read" not in browser.get(path)[1], path)  # type: ignore[misc]
    browser.close()
    return paths


def _groups(browser: Browser) -> list[str]:
    text = browser.get("/failures")[1]
    return [] if "Still reading" in text else re.findall(rf'href="(/failures/{QUEUE}/[^"]+)"', text)


# -- pages -------------------------------------------------------------------------------------------------------------


def _times(bench: Bench, shown: Dashboard, paths: list[str]) -> list[Figure]:
    browser = shown.browser()
    times: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(bench.size(200, 5)):
        for path, taken in times.items():
            taken.append(browser.get(path)[0] * 1e3)
            time.sleep(0.01)
    browser.close()
    slowest = {share: max(paths, key=lambda path: percentile(times[path], share)) for share in (0.5, 0.99)}
    return [
        figure(
            f"p{share * 100:.0f} of the slowest page, one publish per second",
            percentile(times[slowest[share]], share),
            "ms",
            asked,
            note=f"{re.sub('[0-9a-f_-]{10,}', 'ID', slowest[share])}; of all pages "
            f"{percentile([one for some in times.values() for one in some], share):.1f} ms",
        )
        for share, asked in ((0.5, 5.0), (0.99, 30.0))
    ]


def _listings(bench: Bench, shown: Dashboard, paths: list[str]) -> list[Figure]:
    """Listings of directories of messages while nothing changes, so that the sampler has no reason for one."""
    rounds = bench.size(20, 2)
    log = Path(f"/proc/{shown.pid}/cwd").resolve() / f"listings-{shown.pid}"
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-qq", "-e", "trace=getdents64", "-p", str(shown.pid), "-o", str(log)]
    )
    try:
        until(lambda: "TracerPid:\t0" not in Path(f"/proc/{shown.pid}/status").read_text(), "strace")
        browser = shown.browser()
        for _ in range(rounds):
            for path in paths:
                browser.get(path)
            time.sleep(0.5)
        browser.close()
    finally:
        tracer.terminate()
        tracer.wait()
    ended, empty = _ended_listings(log.read_text())
    log.unlink()
    return [
        figure(
            f"listings of directories of messages by {rounds * len(paths)} requests",
            len(ended),
            "",
            0,
            note=f"by strace{''.join(f', {name}' for name in sorted(set(ended)))}; "
            f"{len(empty)} times a directory was read that has no entry",
        )
    ]


def _age(bench: Bench, shown: Dashboard, waiting: int) -> list[Figure]:
    """How much younger a number is shown than it is: one message per second makes each number a moment."""
    browser = shown.browser()
    first: dict[int, float] = {}
    worst, oldest = 0.0, 0.0
    ends = time.monotonic() + bench.size(45, 5)
    while (now := time.monotonic()) < ends:
        text = browser.get(f"/q/{QUEUE}")[1]
        found = re.search(
            r'<dt>Waiting</dt><dd>.*?([0-9,]+)\s*(?:<span class="age"><time[^>]*>([0-9.]+) (s|min) ago)?',
            text,
            re.DOTALL,
        )
        assert found is not None
        count = int(found[1].replace(",", ""))
        first.setdefault(count, now)
        # A second of rounding is not a lie; without an age it is at most 4 s.
        said = 4.0 if found[2] is None else float(found[2]) * (60 if found[3] == "min" else 1) + 1.0
        worst = max(worst, now - first[count] - said)
        oldest = max(oldest, said)
        time.sleep(0.25)
    browser.close()
    return [
        figure(
            "how much younger an age is shown than it is",
            max(0.0, worst),
            "s",
            0,
            note=f"ages of up to {oldest:.0f} s; {len(first)} counts",
        )
    ]


# -- what it costs -----------------------------------------------------------------------------------------------------


def _share(shown: Dashboard, seconds: float) -> float:
    """Percent of a core that it and its children take, while one browser looks now and then."""
    browser = shown.browser()
    browser.get("/")
    began, before = time.monotonic(), cpu_seconds(shown.pid, children=True)
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(left, 20.0))
        browser.get("/")
    browser.close()
    return (cpu_seconds(shown.pid, children=True) - before) / (time.monotonic() - began) * 100


def _settle(bench: Bench, shown: Dashboard) -> None:
    """Wait until the first counts are over, and the second ones that confirm them."""
    _share(shown, bench.size(60, 3))


def _cost(bench: Bench, shown: Dashboard, what: str, asked: float) -> list[Figure]:
    # A count of a million is due every 25 s and more.
    return [
        figure(
            f"CPU of the sampler, {what}",
            _share(shown, bench.size(60, 3)),
            "%",
            asked,
            note="with the process that counts",
        )
    ]


def _ended_listings(trace: str) -> tuple[list[str], list[str]]:
    """Return the directories of messages that were read to their end: those with entries, and those without."""
    has_entries: dict[str, bool] = {}
    found: tuple[list[str], list[str]] = [], []
    for where, name, read in re.findall(
        r"^(.*/(queue|delay|lease|done|fail|names)>), .* = (\d+)$", trace, re.MULTILINE
    ):
        if read != "0":
            # `.` and `..` take 24 bytes each.
            has_entries[where] = has_entries.get(where, False) or int(read) > 48
        else:
            found[not has_entries.pop(where, False)].append(name)
    return found


def _viewers(bench: Bench, shown: Dashboard) -> list[Figure]:
    seconds, count = bench.size(20, 3), bench.size(200, 20)
    alone, before = _share(shown, seconds), memory_mb(shown.pid)
    with viewers(shown, count, ["/", f"/q/{QUEUE}", "/failures"]):
        watched, after = _share(shown, seconds), memory_mb(shown.pid)
    with bare_server() as bare, viewers(bare, count, ["/"]):
        before_bare = cpu_seconds(bare.pid)
        time.sleep(seconds)
        least = (cpu_seconds(bare.pid) - before_bare) / seconds * 100
    note = f"{watched:.2f} % and {alone:.2f} %; the same requests to a bare server that answers 304: {least:.2f} %"
    return [
        figure(f"CPU of {count} viewers", watched - alone, "%", 0.5, note=note),
        figure(f"memory of {count} viewers", after - before, "MB", 15),
    ]


def _memory(bench: Bench, shown: Dashboard, paths: list[str]) -> list[Figure]:
    browser = shown.browser()
    before = memory_mb(shown.pid)
    for _ in range(bench.size(300, 3)):
        for path in paths:
            browser.get(path)
    browser.close()
    return [
        figure("peak of memory", memory_mb(shown.pid, peak=True), "MB", 80),
        figure("growth of memory over 3,000 pages", memory_mb(shown.pid) - before, "MB", 2),
    ]


# -- many queues -------------------------------------------------------------------------------------------------------


def _many_queues(bench: Bench) -> list[Figure]:
    count = bench.size(500, 120)
    found: list[Figure] = []
    folder = bench.fresh()
    with redis_server(folder) as server:
        for name, url in (("file:", bench.url(folder)), ("redis:", server.url)):
            bench.call(fill_rings, url=url, count=count)
            with dashboard(url, folder) as shown:
                shown.counted("q000")
                browser = shown.browser()
                # The first look at a queue's past is not waited for.
                size = max(len(browser.get("/")[1]) for _ in range(2))
                browser.close()
                _settle(bench, shown)
                share = _share(shown, bench.size(60, 3))
            found += [
                figure(f"{name} size of a page of 100 queues", size / 1e3, "KB", 80),
                figure(f"{name} CPU with {count} idle queues", share, "%", 2),
            ]
    bench.discard(folder)
    return found


# -- in processes of their own -----------------------------------------------------------------------------------------


def fail(given: dict[str, Any]) -> None:
    """Store failed messages, with errors of some groups."""
    from harness.work import noop_app, publish, run_loop
    from qworker.message import SettleAction, Settlement

    async def run() -> None:
        tasks = noop_app(given["url"])
        backend = await tasks.backend()
        for first in range(0, given["count"], 1_000):
            await publish(tasks, 1_000, 1_000)
            leases = await backend.lease(QUEUE, 1_000, 600)
            await backend.settle(
                [
                    Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=_error(first + number))
                    for number, lease in enumerate(leases)
                ]
            )
        await backend.aclose()

    run_loop(run())


def _error(number: int) -> str:
    frames = "".join(f'  File "/app/tasks.py", line {line}, in step\n    call(host)\n' for line in range(10, 14))
    kind = f"{chr(65 + number % _GROUPS % 26) * (1 + number % _GROUPS // 26)}Error"
    return f"Traceback (most recent call last):\n{frames}{kind}: host {number} refused\n"


def ids(given: dict[str, Any]) -> dict[str, str]:
    """The id of a message in each state."""
    from harness.work import run_loop
    from qworker.backend.registry import open_backend
    from qworker.message import Query, State

    async def run() -> dict[str, str]:
        backend = open_backend(given["url"])
        found: dict[str, str] = {}
        for state in (State.READY, State.FAILED):
            async for page in backend.browse(QUEUE, Query(state, limit=1)):
                found[state.word] = page[0].message.id
        await backend.aclose()
        return found

    return run_loop(run())


def fill_rings(given: dict[str, Any]) -> None:
    """Create queues with an hour of samples each."""
    from harness.work import run_loop
    from qworker.backend.offers import samples_of
    from qworker.backend.registry import open_backend
    from qworker.sampling.ring import HEADER, LEVELS, RingSample, encode_sample

    async def run() -> None:
        backend = open_backend(given["url"])
        store = samples_of(backend)
        assert store is not None
        level, now = LEVELS[0], time.time()
        for number in range(given["count"]):
            await backend.create(f"q{number:03d}")
            await store.write(f"q{number:03d}", 0, HEADER)
            # A place in the block follows from the time.
            samples = [
                RingSample(at=level.start(now - back * level.step), ready=back * 37 % 1000) for back in range(360)
            ]
            block = b"".join(encode_sample(one) for one in sorted(samples, key=lambda one: level.place(one.at)))
            await store.write(f"q{number:03d}", level.offset, block)
        await backend.aclose()

    run_loop(run())
