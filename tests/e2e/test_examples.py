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
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, PATIENCE, environment, files_in, running, wait_in_run, workers_of
from tests.support.waiting import block_for


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the example that the test names, so that its spool is the test's own."""
    copy = tmp_path / request.param
    shutil.copytree(EXAMPLES / request.param, copy, ignore=shutil.ignore_patterns("__pycache__", "spool", "*.sqlite*"))
    return copy


def run(folder: Path, *command: str, patience: float = PATIENCE) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=patience, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def rows(database: Path) -> int:
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        return int(connection.execute("SELECT count(*) FROM files").fetchone()[0])


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
            wait_in_run(lambda goal=goal: rows(database) >= goal, supervisor, log, f"{goal} of {enqueued} rows")
            wait_in_run(lambda: bool(workers_of(supervisor.pid)), supervisor, log, "a worker")
            block_for(draw.random() * 0.1)
            for worker in draw.sample(workers_of(supervisor.pid), k=1):
                os.kill(worker, signal.SIGKILL)
                kills += 1
                # Until then it is still among the workers that can be drawn.
                wait_in_run(
                    lambda gone=worker: gone not in workers_of(supervisor.pid), supervisor, log, "the end of a worker"
                )

        def is_over() -> bool:
            # A message that moves between two of the directories can be missed: so all must have run, too.
            all_have_run = rows(database) + files_in(queue, "fail") >= enqueued
            return all_have_run and files_in(queue, "queue", "lease", "delay") == 0

        wait_in_run(is_over, supervisor, log, "an empty queue")
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
        wait_in_run(
            lambda: counted.is_dir() and len(list(counted.glob("*.json"))) >= 10, supervisor, log, "ten counted"
        )
        run(folder, "./drop.sh", *names[10:])  # and beside one
        wait_in_run(lambda: len(list(counted.glob("*.json"))) >= 20, supervisor, log, "all counted")
    for name, body in bodies.items():
        found = json.loads((counted / f"{name}.json").read_text())
        assert found == {"lines": body.count("\n"), "words": len(body.split()), "bytes": len(body)}
    assert files_in(folder / "spool" / "inbox", "queue", "lease", "delay", "fail") == 0
    assert (folder / "worker.log").read_text().count(" words") == len(bodies)
