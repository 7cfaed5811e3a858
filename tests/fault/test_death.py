"""C1 and C2: processes die at each step of each transition, and at random."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest

from tests.fault import harness
from tests.fault.harness import MOVES, check_invariant, recover, strays

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/spool"


def _die_publishing_at(root: Path, step: int) -> None:
    url, ledger = f"file://{root}/spool", root / "ledger"
    harness.run("publish", url, ledger, 6, 3, inject=f"{MOVES}:signal=KILL:when={step}")
    check_invariant(url, ledger)
    recover(url, ledger)
    assert strays(root / "spool") == []


def _die_working_at(root: Path, step: int) -> None:
    url, ledger = f"file://{root}/spool", root / "ledger"
    assert harness.run("publish", url, ledger, 6, 6).returncode == 0
    harness.run("work", url, ledger, 4, inject=f"{MOVES}:signal=KILL:when={step}")
    check_invariant(url, ledger)
    books = recover(url, ledger)
    assert books.duplicates <= 4, "a death runs again at most what was running"
    assert strays(root / "spool") == []


@pytest.mark.parametrize("group", range(4))
@pytest.mark.parametrize("dying", [_die_publishing_at, _die_working_at])
def test_a_death_at_any_step_loses_nothing_and_leaves_nothing_behind(tmp_path: Path, dying, group: int) -> None:
    steps = range(group + 1, 41, 4)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(dying, tmp_path / str(step), step) for step in steps]
        for each in runs:
            each.result()


def _child(role: str, url: str, folder: str) -> None:
    from tests.fault.programs import Ledger, publish, work

    ledger = Ledger(Path(folder))
    if role == "publish":
        asyncio.run(publish(url, ledger, 60, 5))
    else:
        asyncio.run(work(url, ledger, 5))


def test_200_random_deaths_lose_nothing_and_run_again_only_what_was_running(tmp_path: Path, url: str) -> None:
    # A fork server starts a process in milliseconds, so that most of a process's life is work and not imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fault.programs"])
    ledger = tmp_path / "ledger"
    draw = random.Random(20)
    kills_of_workers = 0
    for cycle in range(100):
        pair = [context.Process(target=_child, args=(role, url, str(ledger))) for role in ("publish", "work")]
        for process in pair:
            process.start()
        deadline = time.monotonic() + draw.uniform(0.01, 0.12)
        for process in pair:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                kills_of_workers += process is pair[1]
            assert process.exitcode in {0, -signal.SIGKILL}, f"cycle {cycle}: {process.exitcode}"
            process.close()
    books = recover(url, ledger)
    assert len(books.acked) > 100
    assert books.duplicates <= kills_of_workers * 5
    assert strays(tmp_path / "spool") == []
