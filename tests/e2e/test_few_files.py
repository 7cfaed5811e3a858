"""A worker whose process may have few files open works with what it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Process, started
from tests.support.waiting import block_for

APP = """
import asyncio, os
from qworker import Tasks

tasks = Tasks(os.environ["QWORKER_URL"])

@tasks.task
async def greet(name: str) -> None:
    await asyncio.sleep(0.01)

@tasks.task
async def hold(name: str) -> None:
    print("begin", flush=True)
    await asyncio.sleep(3600)
"""

MESSAGES = 200
FEW = ("-c", 'ulimit -n 128; exec "$0" -m qworker "$@"', sys.executable)


@pytest.fixture(params=["file", "fsq"])
def url(request, tmp_path: Path) -> str:
    (tmp_path / "app.py").write_text(APP)
    return f"{request.param}://{tmp_path}/spool"


def few(folder: Path, url: str, *arguments: str) -> Any:
    return started(folder, *arguments, executable="/bin/sh", program=FEW, env={"QWORKER_URL": url})


def enqueue(folder: Path, url: str, task: str) -> None:
    (folder / "calls").write_text("".join(f"{json.dumps([str(n)])}\n" for n in range(MESSAGES)))
    with started(folder, "enqueue", "app:tasks", task, "--from-file", "calls", env={"QWORKER_URL": url}) as process:
        assert process.end() == 0, process.text


def processor_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_backlog_is_worked_off_and_the_worker_says_that_it_has_few(tmp_path, url):
    enqueue(tmp_path, url, "greet")
    with few(tmp_path, url, "run", "app:tasks", "--burst") as process:
        assert process.end() == 0, process.text
    (limited,) = process.events("concurrency_limited")
    assert limited["limit"] == 64
    (stopped,) = process.events("worker_stopped")
    assert (stopped["acked"], stopped["lost"]) == (MESSAGES, 0)
    assert not process.events("backend_unavailable")


def test_a_full_worker_rests_and_hears_a_sigterm(tmp_path, url):
    enqueue(tmp_path, url, "hold")
    with few(tmp_path, url, "run", "app:tasks", "--shutdown-timeout", "0") as process:
        process.line("begin", 64)
        before = processor_seconds(process)
        # A second in which there is nothing to do.
        block_for(1.0)
        assert processor_seconds(process) - before < 0.5
        assert process.drain() == 4
    assert process.events("worker_stopped")[0]["released"] == 64


@pytest.mark.parametrize("scheme", ["file", "fsq", "mq", "sq", "vsqs"])
def test_more_messages_are_published_at_once_than_files_may_be_open(tmp_path, scheme):
    (tmp_path / "bodies").write_text("".join(f"{n}\n" for n in range(MESSAGES)))
    url = f"{scheme}://{tmp_path}/spool"
    program = ("-c", 'ulimit -n 64; exec "$0" -m qworker "$@"', sys.executable)
    arguments = ["publish", url, "q", "--lines", "--file", "bodies"]
    with started(tmp_path, *arguments, executable="/bin/sh", program=program) as process:
        assert process.end() == 0, process.text
    with started(tmp_path, "stats", url, "q", "--json") as process:
        assert process.end() == 0
        assert json.loads(process.text)["ready"] == MESSAGES
