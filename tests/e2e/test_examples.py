"""The examples, run as their READMEs say: real processes, real files, real SIGKILLs."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.depth import DEEP

EXAMPLES = Path(__file__).parents[2] / "examples"
# Seconds for one step; the whole installation is thousands of files, and two processors may be busy with other tests.
PATIENCE = 120.0


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the example that the test names, so that its spool is the test's own."""
    copy = tmp_path / request.param
    shutil.copytree(EXAMPLES / request.param, copy, ignore=shutil.ignore_patterns("__pycache__", "spool", "*.sqlite*"))
    return copy


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    kept["PYTHONUNBUFFERED"] = "1"
    kept["QWORKER_EXAMPLE_FILES"] = os.environ.get("QWORKER_EXAMPLE_FILES", "1000000" if DEEP else "1200")
    return kept


def run(folder: Path, *command: str, patience: float = PATIENCE) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=patience, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def until(condition: Callable[[], bool], supervisor: subprocess.Popen[bytes], log: Path, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert supervisor.poll() is None, f"qworker run ended with {supervisor.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.02)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`qworker run app:tasks`, drained at the end, which must succeed; nothing of it survives a failing test."""
    log = folder / "worker.log"
    command = [sys.executable, "-m", "qworker", "run", "app:tasks", *options]
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield started, log
        started.send_signal(signal.SIGTERM)
        status = started.wait(PATIENCE)
        assert status == 0, f"the drain ended with {status}:\n{log.read_text()[-3000:]}"
    finally:
        # The session is the test's own: nothing but what it started is in the group.
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def workers_of(supervisor: int) -> list[int]:
    """The supervisor's children that are workers: a helper process of the interpreter may be among its children."""
    found = []
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        try:
            arguments = Path(f"/proc/{child}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if b"resource_tracker" not in arguments:
            found.append(int(child))
    return found


def rows(database: Path) -> int:
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        return int(connection.execute("SELECT count(*) FROM files").fetchone()[0])


def files_in(queue: Path, *states: str) -> int:
    return sum(len([name for name in os.listdir(queue / state) if not name.startswith(".")]) for state in states)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("folder", ["stdlib_index"], indirect=True)
def test_an_index_built_by_killed_workers_equals_a_sequential_pass(folder: Path) -> None:
    enqueued = int(run(folder, sys.executable, "app.py", "enqueue").split()[0])
    database, queue = folder / "index.sqlite", folder / "spool" / "files"
    assert files_in(queue, "queue") == enqueued
    draw = random.Random(enqueued)
    kills = 0
    with running(folder, "-w", "2", "-c", "8") as (supervisor, log):
        # Spread over the first three quarters, so that there is always something to kill in the middle of.
        for goal in range(enqueued // 12, enqueued * 3 // 4, enqueued // 8):
            until(lambda goal=goal: rows(database) >= goal, supervisor, log, f"{goal} of {enqueued} rows")
            until(lambda: bool(workers_of(supervisor.pid)), supervisor, log, "a worker")
            time.sleep(draw.random() * 0.1)
            for worker in draw.sample(workers_of(supervisor.pid), k=1):
                os.kill(worker, signal.SIGKILL)
                kills += 1
        until(lambda: files_in(queue, "queue", "lease", "delay") == 0, supervisor, log, "an empty queue")
    assert kills >= 5
    # Both passes, and their comparison, are the example's own: its exit status says whether they agree.
    shown = run(folder, sys.executable, "app.py", "check", patience=5 * PATIENCE)
    indexed = rows(database)
    assert f"files={indexed}" in shown
    assert indexed + files_in(queue, "fail") == enqueued


@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", ["inbox"], indirect=True)
def test_files_that_a_shell_script_drops_are_counted_once_each(folder: Path) -> None:
    bodies = {f"note-{i}.txt": f"line {i}\n" * (i + 1) for i in range(20)}
    for name, body in bodies.items():
        (folder / name).write_text(body)
    names = list(bodies)
    run(folder, "./drop.sh", *names[:10])  # before any worker
    counted = folder / "counted"
    with running(folder) as (supervisor, log):
        until(lambda: counted.is_dir() and len(list(counted.glob("*.json"))) >= 10, supervisor, log, "ten counted")
        run(folder, "./drop.sh", *names[10:])  # and beside one
        until(lambda: len(list(counted.glob("*.json"))) >= 20, supervisor, log, "all counted")
    for name, body in bodies.items():
        found = json.loads((counted / f"{name}.json").read_text())
        assert found == {"lines": body.count("\n"), "words": len(body.split()), "bytes": len(body)}
    assert files_in(folder / "spool" / "inbox", "queue", "lease", "delay", "fail") == 0
    assert (folder / "worker.log").read_text().count(" words") == len(bodies)
