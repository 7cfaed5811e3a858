"""Real `qworker run` processes, and the ledger in which their handlers write when they begin and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.bench import child_environment

__all__ = ["Ledger", "Running", "running", "until", "write_app"]

_PATIENCE = 120.0

_APP = """
import asyncio, os, time
from qworker import Tasks

tasks = Tasks()
ledger = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

def note(what, number):
    # One write: the lines of several processes do not mix, and stand in the order in which things happened.
    os.write(ledger, f"{what} {number} {time.monotonic_ns()}\\n".encode())

@tasks.task(queue="bench", max_tries=100)
async def step(number: int, seconds: float) -> None:
    note("begin", number)
    how = "cut"
    try:
        if seconds:
            await asyncio.sleep(seconds)
        how = "done"
    finally:
        note(how, number)

@tasks.task(queue="bench")
async def noop(number: int) -> None:
    pass

@tasks.task(queue="bench")
async def block(number: int, seconds: float) -> None:
    # Keeps the loop's thread and the interpreter's lock.
    note("begin", number)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    note("done", number)
"""


# Results are kept for so short that they expire as others come.
_FEATURES = """
from qworker import Hook, Tasks

class Around(Hook):
    async def around(self, attempt, go):
        return await go()

tasks = Tasks(hooks=[Around()])

@tasks.task(queue="bench", result=5)
async def noop(number: int) -> int:
    return number

@tasks.every(1)
@tasks.task(queue="bench")
async def tick() -> None:
    pass
"""


def write_app(folder: Path, *, features: bool = False) -> None:
    """Put the app of these figures into a folder: tasks `step`, `noop` and `block` on the queue `bench`.

    Args:
        folder: where.
        features: only `noop`, with a result and a hook, beside a schedule with a tick each second.
    """
    (folder / "app.py").write_text(_FEATURES if features else _APP)


class Running:
    """One `qworker run app:tasks` in a folder, started by `starter` if that is given: words before the command."""

    def __init__(self, folder: Path, url: str, *options: str, starter: Sequence[str] = ()) -> None:
        self._log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "qworker", "run", "app:tasks", "--url", url, "--log-format", "json"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*starter, *command, *options],
                cwd=folder,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def event(self, name: str) -> dict[str, Any]:
        """Wait for a log event."""

        def found() -> dict[str, Any] | None:
            lines = self._log.read_bytes().splitlines()
            known = (json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}"))
            return next((line for line in known if line.get("event") == name), None)

        event: dict[str, Any] = until(found, f"the event {name}", self._expect_alive)
        return event

    def _expect_alive(self) -> None:
        if not self.alive:
            raise RuntimeError(f"a worker ended with {self._process.returncode}: {self._log.read_text()[-2000:]}")

    def drain(self) -> int:
        """SIGTERM; its exit status.

        Raises:
            RuntimeError: it crashed.
        """
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(_PATIENCE)
        if status not in {0, 4}:
            raise RuntimeError(f"a worker ended with {status}: {self._log.read_text()[-2000:]}")
        return status

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self.alive:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(folder: Path, url: str, *options: str) -> Iterator[Running]:
    """A worker that has begun to work, and ends with the block."""
    worker = Running(folder, url, *options)
    try:
        worker.event("worker_started")
        yield worker
    finally:
        worker.kill()


class Ledger:
    """What handlers have written, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger"
        self._at = 0
        self._open: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        # Runs that began while an earlier one of the same message lived, or after one was done; and runs that were cut
        # short.
        self.overlapped = 0
        self.repeated = 0
        self.cut = 0
        # When runs began: monotonic nanoseconds, in order.
        self.begins: list[int] = []

    def read(self) -> None:
        """Take what is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode().splitlines():
            self._take(*line.split())

    def _take(self, what: str, number: str, at: str) -> None:
        if what == "begin":
            self.begins.append(int(at))
            self.overlapped += self._open[number] > 0
            self.repeated += self.done[number] > 0
            self._open[number] += 1
            return
        self._open[number] -= 1
        if what == "done":
            self.done[number] += 1
        else:
            self.cut += 1


def until(
    condition: Callable[[], Any], what: str, check: Callable[[], None] = lambda: None, *, patience: float = _PATIENCE
) -> Any:
    """Wait at most `patience` seconds for a condition, and return what it returned.

    Raises:
        RuntimeError: it does not come true.
    """
    deadline = time.monotonic() + patience
    while not (found := condition()):
        check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {patience:g} s")
        time.sleep(0.01)
    return found
