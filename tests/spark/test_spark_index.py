"""Run the example spark_index as its README says, and kill a process of Spark and workers meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, files_in, running, wait_in_run, workers_of

# Not of the group that shares a session: it starts Sparks of its own.
pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

# Of each 10,000 files; the whole installation takes minutes on two processors. Each killed worker takes the last
# quarter of a second of its history with it, about 30 files on a fast machine: that must be far less than half of the
# files.
SAMPLE = str(min(400, int(os.environ.get("QWORKER_EXAMPLE_FILES", "400"))))


def step(folder: Path, *steps: str, **more: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    given = {"QWORKER_EXAMPLE_FILES": SAMPLE, "QWORKER_EXAMPLE_MASTER": "local[2,3]", **more}
    # What compiles once and runs for a second is not worth the best compiler.
    given["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    command = [sys.executable, "app.py", *steps]
    done = subprocess.run(
        command, cwd=folder, env=kept | given, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_an_index_with_spark_at_both_ends_equals_a_sequential_pass(tmp_path: Path) -> None:
    folder = tmp_path / "spark_index"
    shutil.copytree(EXAMPLES / "spark_index", folder, ignore=shutil.ignore_patterns("__pycache__", "spool", "archive"))
    loaded = step(folder, "load", QWORKER_EXAMPLE_KILL="killed")
    assert (folder / "killed").exists(), "no process of Spark's was killed"
    enqueued = int(loaded.split()[0])
    queue = folder / "spool" / "files"
    assert len(list(queue.glob("load-*/*/*/*"))) == enqueued > 100

    kills = 0
    with running(folder, "-Q", "files", "-w", "2", "-c", "4") as (supervisor, log):
        for part in (0.2, 0.6):
            wait_in_run(lambda part=part: files_in(queue, "done") >= part * enqueued, supervisor, log, f"{part} done")
            wait_in_run(lambda: bool(workers_of(supervisor.pid)), supervisor, log, "a worker")
            victim = workers_of(supervisor.pid)[0]
            os.kill(victim, signal.SIGKILL)
            kills += 1
            wait_in_run(
                lambda gone=victim: gone not in workers_of(supervisor.pid), supervisor, log, "the end of a worker"
            )
        wait_in_run(
            lambda: not list(queue.glob("load-*")) and files_in(queue, "queue", "lease", "delay") == 0,
            supervisor,
            log,
            "an empty queue",
        )
    assert kills == 2

    # Both passes, and their comparison, are the example's own: its exit status says whether they agree.
    told = step(folder, "study", "check")
    done, failed, runs = map(int, re.findall(r"(\d+) (?:done|failed|runs)", told)[:3])
    assert done + failed == enqueued
    # What a killed worker had not yet written of its history is missing there, and nowhere else.
    assert enqueued // 2 < runs < 2 * enqueued
    assert told.count(f"Totals(files={done}, broken={failed}, ") == 2
    assert "never enqueued 0, twice 0, lost 0" in told
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    # What is archived has left the queue.
    assert files_in(queue, "done", "fail") == 0
