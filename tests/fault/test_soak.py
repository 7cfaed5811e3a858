"""Publishers and workers run for $QWORKER_TEST_SOAK seconds, while processes die all the time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fault import harness
from tests.fault.harness import Books, drain, strays
from tests.support.examples import workers_of
from tests.support.processes import environment
from tests.support.servers import RedisServer
from tests.support.waiting import block_for, wait_for

SECONDS = float(os.environ.get("QWORKER_TEST_SOAK", "4"))
ROOT = Path(__file__).parents[2]
# How many messages may wait before publishers pause.
AHEAD = 1000

pytestmark = [pytest.mark.fault, pytest.mark.timeout(SECONDS + 240)]


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/spool"
    else:
        with RedisServer() as server:
            yield server.url


class Soak:
    """What runs, and what can happen to it."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url, self.ledger, self._stack = url, folder / "ledger", stack
        self.books = Books(self.ledger)
        self.log = folder / "workers.log"
        self._draw = random.Random(7)
        self.survivor = self._worker("1")
        self.supervisors = [self._worker("2") for _ in range(2)]
        self.publisher = self._publish()
        self.events: Counter[str] = Counter()

    def _worker(self, processes: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "qworker", "run", "tests.fault.soak_app:tasks", "-w", processes, "-c", "5"]
        command += ["--visibility-timeout", "5", "--log-level", "warning"]
        variables = environment(SOAK_URL=self.url, SOAK_LEDGER=str(self.ledger))
        with self.log.open("ab") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=output, start_new_session=True)
        self._stack.callback(harness.kill, process)
        return process

    def _publish(self) -> subprocess.Popen[bytes]:
        process = harness.start("publish", self.url, self.ledger, 300, 5)
        self._stack.callback(harness.kill, process)
        return process

    def turn(self) -> None:
        """Something happens to somebody."""
        which = self._draw.randrange(len(self.supervisors))
        supervisor = self.supervisors[which]
        workers = workers_of(supervisor.pid)
        what = self._draw.choice(["worker", "worker", "publisher", "supervisor", "drain", "stop"])
        if what == "publisher":
            harness.kill(self.publisher)
        elif not workers:
            # It has only just begun.
            what = "nothing"
        elif what == "supervisor":
            harness.kill(supervisor)
            self.supervisors[which] = self._worker("2")
        elif what == "drain":
            self.drain(supervisor)
            self.supervisors[which] = self._worker("2")
        else:
            victim = self._draw.choice(workers)
            if what == "stop":
                os.kill(victim, signal.SIGSTOP)
                block_for(self._draw.random())
                os.kill(victim, signal.SIGCONT)
            else:
                os.kill(victim, signal.SIGKILL)
        self.events[what] += 1

    def has_finished(self, lines: int) -> bool:
        """Whether so many messages have run, while enough are published."""
        finished = len(self.books.read("finished"))
        if self.publisher.poll() is not None and len(self.books.read("acked")) < finished + AHEAD:
            self.publisher = self._publish()
        return finished >= lines

    def drain(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        # 4: one of its processes was killed as it was to end.
        assert process.wait(harness.PATIENCE) in {0, 4}, self.errors()

    def errors(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def size(self) -> tuple[int, float]:
        """Open files and MB of the worker that nothing happens to."""
        process = Path(f"/proc/{self.survivor.pid}")
        pages = int((process / "statm").read_text().split()[1])
        return len(os.listdir(process / "fd")), pages * os.sysconf("SC_PAGESIZE") / 1e6


@contextmanager
def soaking(url: str, folder: Path) -> Iterator[Soak]:
    with ExitStack() as stack:
        yield Soak(url, folder, stack)


def test_what_dies_all_the_time_loses_nothing_and_runs_nothing_twice_beyond_its_tries(url: str, tmp_path: Path) -> None:
    with soaking(url, tmp_path) as soak:
        wait_for(lambda: soak.books.finished, "the first message", soak.errors)
        draw, began, early = random.Random(8), time.monotonic(), None
        while time.monotonic() < began + SECONDS:
            soak.turn()
            more = len(soak.books.read("finished")) + draw.randrange(100)
            wait_for(lambda more=more: soak.has_finished(more), "progress", soak.errors)
            if early is None and time.monotonic() > began + SECONDS / 4:
                early = soak.size()
        late = soak.size()
        wait_for(lambda: soak.publisher.poll() is not None, "the last publisher")
        for supervisor in soak.supervisors:
            wait_for(lambda supervisor=supervisor: workers_of(supervisor.pid), "its workers", soak.errors)
            soak.drain(supervisor)
        soak.drain(soak.survivor)
    books = drain(url, soak.ledger)
    print(f"{len(books.acked)} messages, {books.duplicates} ran again, {dict(soak.events)}, {early} and {late}")
    assert len(books.acked) > 50
    assert soak.events
    twice = [start for start, times in Counter(books.read("started")).items() if times > 1]
    assert twice == [], "these began twice, and their tries do not tell"
    early = early or late
    assert late[0] <= early[0] + 16
    assert late[1] <= early[1] + 20
    if url.startswith("file:"):
        assert strays(tmp_path / "spool") == []
