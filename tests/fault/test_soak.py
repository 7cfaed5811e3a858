"""Publishers and workers run for $QWORKER_TEST_SOAK seconds, while processes die all the time."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fault import harness
from tests.fault.harness import Books, drain, strays
from tests.support.examples import workers_of
from tests.support.processes import environment, pause
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


class ProcessEnds:
    """When each process that has begun a handler ran no more: also a process of suspects, which ends with its worker.

    Times are in nanoseconds of the monotonic clock, as the kernel reports each end.
    """

    def __init__(self, book: Path) -> None:
        self.at: dict[int, int] = {}
        self._book = book
        self._read = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        poll, running, known = select.poll(), dict[int, int](), set[int]()
        while not self._over.is_set():
            for process in self._begun() - known:
                known.add(process)
                try:
                    fd = os.pidfd_open(process)
                except ProcessLookupError:
                    self.at[process] = time.monotonic_ns()
                    continue
                running[fd] = process
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(5):
                self.at[running.pop(fd)] = time.monotonic_ns()
                poll.unregister(fd)
                os.close(fd)
        for fd in running:
            os.close(fd)

    def _begun(self) -> set[int]:
        """The processes in the lines that are new."""
        if not self._book.exists():
            return set()
        with self._book.open("rb") as file:
            file.seek(self._read)
            lines = file.read().rpartition(b"\n")[0]
        self._read += len(lines) + 1 if lines else 0
        return {int(line.split()[3]) for line in lines.splitlines()}


class Soak:
    """What runs, and what can happen to it."""

    def __init__(self, url: str, folder: Path, stack: ExitStack, *, visibility: float = 5.0, long: float = 0.0) -> None:
        self.url, self.ledger, self._stack = url, folder / "ledger", stack
        self._visibility, self._long = visibility, long
        # How many processes were killed.
        self.killed = 0
        self.ends = ProcessEnds(self.ledger / "handlers")
        stack.callback(self.ends.close)
        self.books = Books(self.ledger)
        self.log = folder / "workers.log"
        self._draw = random.Random(7)
        self.survivor = self._worker("1")
        self.supervisors = [self._worker("2") for _ in range(2)]
        self.publisher = self._publish()
        self.events: Counter[str] = Counter()

    def _worker(self, processes: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "qworker", "run", "tests.fault.soak_app:tasks", "-w", processes, "-c", "5"]
        command += ["--visibility-timeout", f"{self._visibility}", "--log-level", "warning", "--wait-for-backend"]
        variables = environment(SOAK_URL=self.url, SOAK_LEDGER=str(self.ledger), SOAK_LONG=f"{self._long}")
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
            # A new session has one group: its workers were killed with it.
            wait_for(lambda: all(_has_ended(worker) for worker in workers), "the end of its workers")
            self.killed += len(workers)
            self.supervisors[which] = self._worker("2")
        elif what == "drain":
            self.drain(supervisor)
            self.supervisors[which] = self._worker("2")
        else:
            victim = self._draw.choice(workers)
            if what == "stop":
                pause(victim)
                block_for(self._draw.random())
                os.kill(victim, signal.SIGCONT)
            else:
                os.kill(victim, signal.SIGKILL)
                wait_for(lambda: _has_ended(victim), "its end")
                self.killed += 1
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


class Run(NamedTuple):
    """One run of a handler. Times are in nanoseconds of the monotonic clock."""

    body: str
    token: int
    began: int
    ended: int
    how: str


def runs(ledger: Path, ends: ProcessEnds) -> list[Run]:
    """Every run of a handler, oldest first. One without an end has ended with its process, which was killed."""
    began: dict[tuple[str, int], tuple[int, int]] = {}
    found: list[Run] = []
    for line in (ledger / "handlers").read_text().splitlines():
        what, body, token, process, moment = line.split()
        key = body, int(token)
        if what == "start":
            assert key not in began, f"{key} began twice"
            began[key] = int(process), int(moment)
        else:
            found.append(Run(*key, began.pop(key)[1], int(moment), what))
    wait_for(lambda: {process for process, _ in began.values()} <= ends.at.keys(), "the ends of all processes")
    found += [Run(*key, moment, ends.at[process], "killed") for key, (process, moment) in began.items()]
    return sorted(found, key=lambda run: run.began)


def has_repeats(ledger: Path) -> bool:
    """Whether a message has started more than once."""
    starts = [line.split()[1] for line in (ledger / "handlers").read_text().splitlines() if line.startswith("start ")]
    return len(set(starts)) < len(starts)


def _has_ended(process: int) -> bool:
    """Whether a process runs no more, even if its parent has not seen it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def soaking(url: str, folder: Path, *, visibility: float = 5.0, long: float = 0.0) -> Iterator[Soak]:
    with ExitStack() as stack:
        yield Soak(url, folder, stack, visibility=visibility, long=long)


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


# Seconds: so many that a worker which a busy machine lets wait keeps its messages.
SHORT = 5.0


def _strike(server: RedisServer, draw: random.Random, events: Counter[str]) -> None:
    """Kill the server, or stop it for up to 1.5 visibility timeouts."""
    if draw.random() < 0.4:
        server.stop(signal.SIGKILL)
        block_for(draw.random() * SHORT)
        server.start()
        events["server killed"] += 1
    else:
        server.pause()
        block_for(draw.uniform(0.2, 1.5) * SHORT)
        server.go_on()
        events["server stopped"] += 1


@pytest.mark.parametrize("scheme", ["file", "redis"])
def test_no_two_handlers_of_one_message_run_at_once(scheme: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = None if scheme == "file" else stack.enter_context(RedisServer(appendonly="yes", appendfsync="always"))
        url = f"file://{tmp_path}/spool" if server is None else server.url
        soak = stack.enter_context(soaking(url, tmp_path, visibility=SHORT, long=1.5 * SHORT))
        wait_for(lambda: soak.books.finished, "the first message", soak.errors)
        draw, began = random.Random(9), time.monotonic()
        # On a busy machine, the first kills may meet no handler.
        while time.monotonic() < began + max(16.0, SECONDS) or not soak.killed or not has_repeats(soak.ledger):
            soak.turn()
            if server is not None:
                _strike(server, draw, soak.events)
            more = len(soak.books.read("finished")) + 20
            wait_for(lambda more=more: soak.has_finished(more), "progress", soak.errors)
        wait_for(lambda: soak.publisher.poll() is not None, "the last publisher")
        for supervisor in soak.supervisors:
            wait_for(lambda supervisor=supervisor: workers_of(supervisor.pid), "its workers", soak.errors)
            soak.drain(supervisor)
        soak.drain(soak.survivor)
        drain(url, soak.ledger)
        found = runs(soak.ledger, soak.ends)
    again, overlapping = 0, list[str]()
    for body, group in groupby(sorted(found), key=lambda run: run.body):
        for earlier, later in pairwise(sorted(group, key=lambda run: run.began)):
            again += 1
            assert later.token > earlier.token, (body, earlier, later)
            if later.began < earlier.ended:
                overlap, after = (earlier.ended - later.began) / 1e9, (later.began - earlier.began) / 1e9
                overlapping.append(f"{overlap:.3f} s, {after:.3f} s after the first start: {earlier} and {later}")
    print(f"{len(found)} runs, {again} again, {Counter(run.how for run in found)}, {dict(soak.events)}")
    assert again > 0
    assert overlapping == [], soak.events
