"""Promise 8: a message that kills its worker fails after its tries, and other messages continue."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import IO

import pytest

from qworker import State
from qworker.backend.registry import open_backend
from qworker.message import Query, StoredMessage
from tests.support.processes import pause
from tests.support.waiting import PATIENCE, wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

APP = """
import asyncio, os, signal, time
from contextlib import asynccontextmanager
from qworker import Backoff, Context, Tasks

@asynccontextmanager
async def lifespan(app):
    yield "state"

tasks = Tasks(os.environ["URL"], lifespan=lifespan)
options = {"max_tries": 3, "retry": Backoff(initial=0.0)}

def started(name):
    with open(os.environ["STARTS"], "a") as file:
        print(name, os.getpid(), file=file)

@tasks.task(**options)
async def poison(context: Context[str]) -> None:
    started(f"poison-{context.state}")
    while not os.path.exists(os.environ["GO"]):
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

@tasks.task(**options)
async def neighbour(context: Context[str], number: int) -> None:
    started(f"neighbour-{number}-{context.state}")
    while not os.path.exists(os.environ["GO"]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    while os.path.exists(os.environ["HOLD"]):
        await asyncio.sleep(0.01)

@tasks.task(**options)
def plain(context: Context[str]) -> None:
    started(f"plain-{context.state}")
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)

@tasks.task(**options)
def raises() -> None:
    started("raises")
    raise ValueError("not a death")
"""


# The app in a child process of a worker, while the file is there.
CHILD = """
import sys

@asynccontextmanager
async def broken(app):
    raise RuntimeError("the settings are gone")
    yield

if "isolated_main" in " ".join(sys.orig_argv) and os.path.exists(os.environ["BROKEN"]):
    {fault}
"""


class Poisoned:
    """An app with a message that kills its process, and its workers."""

    def __init__(self, folder: Path) -> None:
        (folder / "poison_app.py").write_text(APP)
        self.folder = folder
        self.url = f"file://{folder}/spool"
        self.starts = folder / "starts"
        self.starts.touch()
        self.ids: list[str] = []
        self.environment = {
            **os.environ,
            "URL": self.url,
            "STARTS": str(self.starts),
            "GO": str(folder / "go"),
            "HOLD": str(folder / "hold"),
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "qworker", *arguments]

    def enqueue(self, task: str, *arguments: str) -> None:
        command = self.command("enqueue", "poison_app:tasks", task, *arguments)
        done = subprocess.run(command, cwd=self.folder, env=self.environment, check=True, stdout=subprocess.PIPE)
        self.ids.append(done.stdout.decode().strip())

    @contextmanager
    def worker(self, *options: str, output: IO[bytes] | None = None) -> Generator[subprocess.Popen[bytes]]:
        command = self.command("run", "poison_app:tasks", *options)
        with subprocess.Popen(command, cwd=self.folder, env=self.environment, stderr=output) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(PATIENCE)
                    finally:
                        process.kill()

    def started(self) -> Counter[str]:
        return Counter(line.split()[0] for line in self.starts.read_text().splitlines())

    def pids(self, name: str) -> list[int]:
        return [int(line.split()[1]) for line in self.starts.read_text().splitlines() if line.startswith(name)]

    def go(self) -> None:
        Path(self.environment["GO"]).touch()

    def stored(self, state: State) -> list[StoredMessage]:
        async def listed() -> list[StoredMessage]:
            async with aclosing(open_backend(self.url)) as backend:
                await backend.open()
                return [each async for page in backend.browse("default", Query(state)) for each in page]

        return asyncio.run(listed())

    def reap(self) -> None:
        """Return the messages of dead workers."""

        async def reaped() -> None:
            async with aclosing(open_backend(self.url)) as backend:
                await backend.open()
                await backend.reap("default")

        asyncio.run(reaped())

    def is_empty(self) -> bool:
        """Whether all messages were acked or failed. Listings of one state after another could miss one that moves."""
        return all(one.state in {State.FAILED, State.DONE} for one in self.found())

    def found(self) -> list[StoredMessage]:
        """All messages that were enqueued, each once, even if one becomes ready meanwhile."""

        async def found() -> list[StoredMessage]:
            async with aclosing(open_backend(self.url)) as backend:
                await backend.open()
                return await backend.find("default", self.ids)

        return asyncio.run(found())


@pytest.fixture
def poisoned(tmp_path: Path) -> Poisoned:
    return Poisoned(tmp_path)


def test_poison_fails_after_its_tries_and_the_worker_lives_and_survivors_are_cleared(poisoned: Poisoned) -> None:
    poisoned.enqueue("poison")
    for number in range(3):
        poisoned.enqueue("neighbour", str(number))
    poisoned.enqueue("plain")
    with poisoned.worker() as first:
        wait_for(lambda: sum(poisoned.started().values()) == 5)
        poisoned.go()
        assert first.wait(PATIENCE) == -signal.SIGKILL
    with poisoned.worker() as second:
        wait_for(poisoned.is_empty)
        assert second.poll() is None
        assert second.pid not in poisoned.pids("poison")
        assert second.pid not in poisoned.pids("neighbour")
        assert second.pid not in poisoned.pids("plain")
    (failed,) = poisoned.stored(State.FAILED)
    assert failed.error is not None
    assert "the handler's process died: killed by SIGKILL" in failed.error
    neighbours = {f"neighbour-{number}-state": 2 for number in range(3)}
    started = poisoned.started()
    # Its handler may have ended, and its message with it, before the poison killed the worker.
    assert started.pop("plain-state") in {1, 2}
    assert started == {"poison-state": 3, **neighbours}
    assert second.returncode == 0


def test_a_suspect_that_waits_for_a_process_is_not_blamed_for_the_next_death(poisoned: Poisoned) -> None:
    Path(poisoned.environment["HOLD"]).touch()
    poisoned.enqueue("poison")
    for number in range(8):
        poisoned.enqueue("neighbour", str(number))
    with poisoned.worker() as first:
        wait_for(lambda: sum(poisoned.started().values()) == 9)
        poisoned.go()
        assert first.wait(PATIENCE) == -signal.SIGKILL
    with poisoned.worker("--isolated", "1") as second:
        # One runs in the only process. The others were released, and are leased again and again.
        wait_for(lambda: any(count == 2 for name, count in poisoned.started().items() if name.startswith("neighbour")))
        wait_for(lambda: _stops_with(second, lambda: len(poisoned.stored(State.LEASED)) == 1))
        second.kill()
        second.wait()
    poisoned.reap()
    messages = [stored.message for stored in poisoned.found()]
    deaths = Counter(message.deaths for message in messages if b"neighbour" in message.body)
    assert deaths[1] >= 7
    assert deaths[1] + deaths[2] == 8


def _stops_with(process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> bool:
    """Stop the process. If the condition does not hold then, let it continue."""
    pause(process.pid)
    if holds():
        return True
    process.send_signal(signal.SIGCONT)
    return False


def test_an_exception_makes_no_suspect(poisoned: Poisoned) -> None:
    poisoned.enqueue("raises")
    with poisoned.worker() as worker:
        wait_for(poisoned.is_empty)
        assert poisoned.pids("raises") == [worker.pid] * 3
    (failed,) = poisoned.stored(State.FAILED)
    assert failed.message.deaths == 0


BROKEN = {
    "import": "raise ImportError('the settings are gone')",
    "exit": "raise SystemExit('the settings are gone')",
    "no task": "del tasks.registered_tasks['poison']",
    "lifespan": "tasks.lifespan = broken",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_child_that_cannot_start_the_app_clears_no_suspicion_and_counts_no_try(poisoned: Poisoned, what: str) -> None:
    """Only the child has this fault. So a repaired app can run the message."""
    broken = poisoned.folder / "broken"
    broken.touch()
    with (poisoned.folder / "poison_app.py").open("a") as app:
        app.write(CHILD.format(fault=BROKEN[what]))
    poisoned.environment["BROKEN"] = str(broken)
    poisoned.enqueue("poison")
    poisoned.go()
    with poisoned.worker() as first:
        assert first.wait(PATIENCE) == -signal.SIGKILL
    log = poisoned.folder / "log"
    with log.open("wb") as output, poisoned.worker("--log-format", "json", output=output) as second:
        wait_for(lambda: b'"isolation_failed"' in log.read_bytes(), show=log.read_text)
        wait_for(lambda: poisoned.stored(State.DELAYED))
        assert second.poll() is None
    assert second.returncode == 0
    # By now it may be due.
    (waiting,) = poisoned.found()
    assert waiting.state in {State.DELAYED, State.READY}
    assert (waiting.message.tries, waiting.message.deaths) == (1, 1)
    line = next(line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "isolation_failed")
    assert line["message_id"] == waiting.message.id
    assert "the settings are gone" in line["error"] or "no handler 'poison'" in line["error"]
    assert poisoned.started() == {"poison-state": 1}
    broken.unlink()
    if what != "import":
        return
    with poisoned.worker() as third:
        wait_for(poisoned.is_empty)
        assert third.poll() is None
        assert third.pid not in poisoned.pids("poison")
    assert poisoned.started() == {"poison-state": 3}


HIDDEN = """
import asyncio
import hidden_app
from qworker import logs
from qworker.worker.worker import Worker
from qworker.worker.worker_options import WorkerOptions
logs.configure(True, "info")
asyncio.run(Worker(hidden_app.apps[0], WorkerOptions(burst=True)).run())
"""


def test_an_app_that_no_child_can_import_is_reported_when_the_worker_starts(poisoned: Poisoned) -> None:
    """The command line has a name for every app that it runs. A script can run one that has none."""
    source = (poisoned.folder / "poison_app.py").read_text().replace("tasks = Tasks(", "apps = [Tasks(", 1)
    source = source.replace("lifespan=lifespan)", "lifespan=lifespan)]", 1).replace("@tasks.", "@apps[0].")
    (poisoned.folder / "hidden_app.py").write_text(source)
    (poisoned.folder / "run_hidden.py").write_text(HIDDEN)
    commands = {
        False: poisoned.command("run", "poison_app:tasks", "--burst", "--log-format", "json"),
        True: [sys.executable, "run_hidden.py"],
    }
    for hidden, command in commands.items():
        done = subprocess.run(
            command, cwd=poisoned.folder, env=poisoned.environment, stderr=subprocess.PIPE, timeout=PATIENCE, check=True
        )
        events = Counter(json.loads(line)["event"] for line in done.stderr.splitlines())
        assert events["worker_started"] == 1
        assert events["isolation_disabled"] == hidden
