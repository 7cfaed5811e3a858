"""Bulk writing dies at each step, workers take and ack what is visible by then, and the same job is run again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from qworker import bulk
from qworker.backend.registry import open_backend
from qworker.bulk import IncompleteLoad
from qworker.message import SettleAction, Settlement
from tests.fault.harness import COMMANDS, KILL, LOSE, MOVES, QUEUE, Books, Launcher, fault, stored, strays
from tests.support.depth import DEPTH, WITH_SYNC
from tests.support.servers import RedisServer
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

PARTS, ROWS = 3, 4 * DEPTH
EVERY_ROW = sorted(f"{part}.{row}" for part in range(PARTS) for row in range(ROWS))
STEPS = range(1, 80 * DEPTH)


async def _take(url: str) -> list[str]:
    """Lease and ack what is visible."""
    backend = open_backend(url)
    taken: list[str] = []
    try:
        while QUEUE in await backend.queues():
            leases = await backend.lease(QUEUE, 100, 600.0)
            taken += [lease.message.body.decode() for lease in leases]
            assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
            stats = await backend.stats(QUEUE)
            if not (stats.ready or stats.leased or stats.delayed):
                break
    finally:
        await backend.aclose()
    return taken


async def _incomplete_loads(url: str) -> list[IncompleteLoad]:
    backend = open_backend(url)
    try:
        return [half for queue in await backend.queues() for half in await bulk.incomplete_loads(backend, queue)]
    finally:
        await backend.aclose()


def _grow_old(root: Path) -> None:
    """What a dead run staged was staged long ago."""
    long_ago = time.time() - 40 * 3600
    for path in (root / QUEUE / "tmp").rglob("*"):
        os.utime(path, (long_ago, long_ago))


def _die_and_resume(launcher: Launcher, url: str, ledger: Path, *, die: list[int]) -> tuple[int, list[str]]:
    """Return the status of a run that may die, and all bodies that were visible until the end of the second run."""
    arguments = ("bulk", url, ledger, PARTS, ROWS)
    status = launcher.run(*arguments, fault=die)
    taken = asyncio.run(_take(url))
    if taken and len(taken) < len(EVERY_ROW):
        assert asyncio.run(_incomplete_loads(url)), "messages wait, and nobody can tell"
    assert launcher.run(*arguments) == 0, launcher.errors()
    assert asyncio.run(_incomplete_loads(url)) == []
    return status, taken + asyncio.run(_take(url))


@pytest.mark.parametrize("sync", [*WITH_SYNC, "off&fsq=1"])
def test_a_bulk_write_that_dies_at_any_step_is_completed_by_the_same_job_and_doubles_nothing(
    tmp_path: Path, launcher: Launcher, sync: str
) -> None:
    statuses = []
    for step in STEPS:
        root = tmp_path / str(step)
        url = f"file://{root}/spool?sync={sync}"
        status, taken = _die_and_resume(launcher, url, root / "ledger", die=fault(KILL, step))
        assert sorted(taken) == EVERY_ROW, step
        # The tests' own reaper removes what a dead run staged: nobody else will.
        _grow_old(root / "spool")
        left = [path for path in strays(root / "spool") if not path.startswith("names/job-")]
        assert left == [], step
        statuses.append(status)
        if status == 0:
            break
    assert statuses.count(-signal.SIGKILL) > 20
    assert statuses[-1] == 0, f"a bulk write has more than {len(STEPS)} steps: {launcher.errors()}"


def test_a_bulk_write_whose_renames_and_links_lie_doubles_nothing(tmp_path: Path, launcher: Launcher) -> None:
    for every in (2, 3, 5):
        root = tmp_path / str(every)
        url = f"file://{root}/spool?sync=off"
        # Each such call is carried out, and reports an error.
        _, taken = _die_and_resume(launcher, url, root / "ledger", die=fault(LOSE, 1, number=5, every=every))
        assert sorted(taken) == EVERY_ROW, every


def test_a_bulk_write_into_redis_that_dies_at_any_call_is_completed_and_doubles_nothing(
    tmp_path: Path, launcher: Launcher
) -> None:
    statuses = []
    with RedisServer() as server:
        for call in range(1, 200 * DEPTH):
            with server.client() as client:
                client.flushall()
            status, taken = _die_and_resume(
                launcher, server.url, tmp_path / "ledger", die=fault(KILL, call, kinds=COMMANDS)
            )
            assert sorted(taken) == EVERY_ROW, call
            statuses.append(status)
            if status == 0:
                break
        with server.client() as client:
            staged = [key for key in client.scan_iter() if b":stage:" in key and client.ttl(key) < 0]
    assert staged == [], "these would stay for ever"
    assert statuses.count(-signal.SIGKILL) > 15
    assert statuses[-1] == 0


# -- a sealed load is consumed -----------------------------------------------------------------------------------------


def _load(launcher: Launcher, root: Path, options: str = "") -> str:
    url = f"file://{root}/spool?sync=off{options}"
    assert launcher.run("bulk", url, root / "bulk", PARTS, ROWS) == 0, launcher.errors()
    assert list((root / "spool" / QUEUE).glob("load-*")), "nothing is sealed"
    return url


def _check_taken(launcher: Launcher, url: str, root: Path, step: int) -> None:
    """Let a worker take the rest. Each row was acked once, and nothing is left."""
    settled = Books(root / "ledger").read("settled")
    left = stored(url)
    assert not set(settled) & left, f"acked, and still there: step {step}"
    asyncio.run(_reap(url))
    assert launcher.run("take", url, root / "ledger") == 0, launcher.errors()
    books = Books(root / "ledger")
    settled = books.read("settled")
    assert len(settled) == len(set(settled)), f"acked twice: step {step}"
    assert left <= set(settled), f"lost: step {step}"
    assert sorted(books.finished) == EVERY_ROW, f"never run: step {step}"
    assert stored(url) == set()
    # A worker that finds nothing removes the empty directories, and a reaper what a dead worker has hidden.
    assert asyncio.run(_take(url)) == []
    asyncio.run(_reap(url))
    queue = root / "spool" / QUEUE
    assert [*queue.glob("load-*"), *queue.glob(".gone-*")] == [], step


async def _reap(url: str) -> None:
    backend = open_backend(url)
    await backend.reap(QUEUE)
    await backend.aclose()


def test_a_worker_that_dies_at_any_step_of_taking_a_sealed_load_loses_and_doubles_nothing(
    tmp_path: Path, launcher: Launcher
) -> None:
    statuses = []
    for step in range(1, 200 * DEPTH):
        root = tmp_path / str(step)
        url = _load(launcher, root)
        statuses.append(launcher.run("take", url, root / "ledger", fault=fault(KILL, step)))
        _check_taken(launcher, url, root, step)
        if statuses[-1] == 0:
            break
    assert statuses.count(-signal.SIGKILL) > 2 * PARTS * ROWS
    assert statuses[-1] == 0


def test_a_worker_whose_renames_lie_while_it_takes_a_sealed_load_loses_and_doubles_nothing(
    tmp_path: Path, launcher: Launcher
) -> None:
    for every in (2, 3, 5):
        root = tmp_path / str(every)
        url = _load(launcher, root)
        launcher.run("take", url, root / "ledger", fault=fault(LOSE, 1, number=5, every=every, kinds=MOVES))
        _check_taken(launcher, url, root, every)


def test_a_mover_that_dies_at_any_step_between_workers_loses_and_doubles_nothing(
    tmp_path: Path, launcher: Launcher
) -> None:
    statuses = []
    for step in range(1, 200 * DEPTH):
        root = tmp_path / str(step)
        url = _load(launcher, root)
        statuses.append(launcher.run("move", f"{url}&fsq=1", root / "ledger", fault=fault(KILL, step)))
        if step % 2:
            # Another mover continues.
            assert launcher.run("move", f"{url}&fsq=1", root / "ledger") == 0, launcher.errors()
        _check_taken(launcher, url, root, step)
        if statuses[-1] == 0:
            break
    assert statuses.count(-signal.SIGKILL) > PARTS * ROWS
    assert statuses[-1] == 0


def test_twenty_workers_killed_while_they_share_a_sealed_load_lose_and_double_nothing(
    tmp_path: Path, launcher: Launcher
) -> None:
    draw, killed = random.Random(3), 0
    # On a busy machine a load can be taken before all are killed: then there is another one.
    for number in range(10):
        killed += _kill_workers_that_share_a_load(launcher, tmp_path / str(number), draw, 20 - killed)
        if killed == 20:
            break
    assert killed == 20


def _kill_workers_that_share_a_load(launcher: Launcher, root: Path, draw: random.Random, most: int) -> int:
    """Return how many were killed while they took the load. All of it is run, and nothing is acked twice."""
    rows = 2_000 * DEPTH
    url, ledger = f"file://{root}/spool?sync=off", root / "ledger"
    assert launcher.run("bulk", url, root / "bulk", 2, rows // 2) == 0, launcher.errors()
    workers = [launcher.start("take", url, ledger) for _ in range(2)]
    killed = 0
    while killed < most and _count(url, "ready"):
        goal = len(Books(ledger).read("settled")) + draw.randrange(1, 100)
        wait_for(
            lambda goal=goal: len(Books(ledger).read("settled")) >= goal or not _count(url, "ready"),
            f"{goal} rows are acked",
        )
        killed += launcher.kill(workers.pop(draw.randrange(2))) == -signal.SIGKILL
        workers.append(launcher.start("take", url, ledger))
    while _count(url, "ready", "leased", "delayed"):
        asyncio.run(_reap(url))
        assert launcher.run("take", url, ledger) == 0
    for worker in workers:
        launcher.kill(worker)
    books = Books(ledger)
    settled = books.read("settled")
    assert len(settled) == len(set(settled))
    assert len(books.finished) == rows
    return killed


def _count(url: str, *states: str) -> int:
    async def count() -> int:
        backend = open_backend(url)
        stats = await backend.stats(QUEUE)
        await backend.aclose()
        return sum(getattr(stats, state) for state in states)

    return asyncio.run(count())
