"""C1 and C2: processes die at each step of each transition, and at random."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fault.harness import KILL, Books, Launcher, check_invariant, drain, fault, stored, strays
from tests.support.depth import DEEP, DEPTH, WITH_SYNC
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STEPS = range(1, 41 * DEPTH)
SYNC = pytest.mark.parametrize("sync", WITH_SYNC)


@SYNC
def test_a_publisher_that_dies_at_any_step_loses_nothing(tmp_path: Path, launcher: Launcher, sync: str) -> None:
    statuses = []
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync={sync}", root / "ledger"
        statuses.append(launcher.run("publish", url, ledger, 6 * DEPTH, 3, fault=fault(KILL, step)))
        check_invariant(url, ledger)
        drain(url, ledger)
        assert strays(root / "spool") == [], step
        if statuses[-1] == 0:
            break
    assert -signal.SIGKILL in statuses
    assert statuses[-1] == 0, f"a publisher has more than {len(STEPS)} steps: {launcher.errors()}"


@SYNC
def test_a_worker_that_dies_at_any_step_loses_nothing_and_repeats_only_what_it_ran(
    tmp_path: Path, launcher: Launcher, sync: str
) -> None:
    statuses = []
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync={sync}", root / "ledger"
        assert launcher.run("publish", url, ledger, 6 * DEPTH, 6) == 0, launcher.errors()
        statuses.append(launcher.run("work", url, ledger, 4, fault=fault(KILL, step)))
        check_invariant(url, ledger)
        assert drain(url, ledger).duplicates <= 4, step
        assert strays(root / "spool") == [], step
        if statuses[-1] == 0:
            break
    assert -signal.SIGKILL in statuses
    assert statuses[-1] == 0, f"a worker has more than {len(STEPS)} steps: {launcher.errors()}"


def test_a_held_id_runs_and_is_free_for_no_other_message_if_a_process_dies_at_any_step(
    tmp_path: Path, launcher: Launcher
) -> None:
    """A publisher and a worker die at the same step of their own, and a backup of hard links is made in between."""
    ended = set()
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync=off", root / "ledger"
        published = launcher.run("hold", url, ledger, 2, fault=fault(KILL, step))
        assert launcher.run("hold", url, ledger, 2) == 0, launcher.errors()
        subprocess.run(["cp", "-al", root / "spool", root / "backup"], check=True)
        worked = launcher.run("work", url, ledger, 1, fault=fault(KILL, step))
        assert launcher.run("hold", url, ledger, 2) == 0, launcher.errors()
        books = drain(url, ledger)
        assert set(books.finished) == {"held-0", "held-1"}, step
        # A worker that dies while it runs a message causes one more run, and no publish does.
        assert books.duplicates <= (worked != 0), step
        assert launcher.run("hold", url, ledger, 2) == 0, launcher.errors()
        assert stored(url) == set(), step
        ended |= {published, worked}
        if published == worked == 0:
            break
    assert ended == {0, -signal.SIGKILL}


def test_random_deaths_lose_nothing_and_repeat_only_what_was_running(tmp_path: Path, launcher: Launcher) -> None:
    url, ledger = f"file://{tmp_path}/spool", tmp_path / "ledger"
    draw = random.Random(20)
    killed = 0
    for _ in range(100 * DEPTH if DEEP else 60):
        publisher = launcher.start("publish", url, ledger, 10_000, 5)
        worker = launcher.start("work", url, ledger, 5)
        _await_progress(ledger, draw.randrange(20))
        assert launcher.kill(publisher) == -signal.SIGKILL
        status = launcher.kill(worker)
        assert status in {0, -signal.SIGKILL}, launcher.errors()
        killed += status != 0
    books = drain(url, ledger)
    assert killed >= 20, "few workers died in the middle of their work"
    assert len(books.acked) > 100
    assert books.duplicates <= killed * 5
    assert strays(tmp_path / "spool") == []


def _await_progress(ledger: Path, lines: int) -> None:
    """Wait until the ledger has grown by so many lines, whatever that takes on this machine."""
    books = Books(ledger)
    before = _lines(books)
    wait_for(lambda: _lines(books) >= before + lines, "progress")


def _lines(books: Books) -> int:
    return len(books.read("acked")) + len(books.read("finished"))
