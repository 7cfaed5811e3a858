"""`qworker run --health` and `qworker health` as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from qworker.health.probe import fetch_page
from tests.support.processes import PYTHON, Process, environment, started
from tests.support.waiting import PATIENCE, wait_for

APP = """
import time
from pathlib import Path
from qworker import Tasks

tasks = Tasks("file://./spool")

@tasks.task
async def block(name: str) -> None:
    # The loop's thread neither waits nor sleeps, until it is freed.
    print(f"begin {name}", flush=True)
    while not Path(f"free-{name}").exists():
        for _ in range(20000):
            pass
    print(f"end {name}", flush=True)

@tasks.task
async def quick(number: int) -> None:
    print(f"quick {number}", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def enqueue(folder: Path, task: str, *arguments: object) -> None:
    subprocess.run(
        [PYTHON, "-m", "qworker", "enqueue", "app:tasks", task, *map(json.dumps, arguments)],
        cwd=folder,
        env=environment(),
        timeout=PATIENCE,
        check=True,
        capture_output=True,
    )


def port_of(process: Process) -> int:
    return int(process.event("health_server_started")["port"])


def page(port: int, path: str) -> tuple[int, str]:
    return fetch_page(f"127.0.0.1:{port}", path, PATIENCE)


def run(folder: Path, *options: str, env: dict[str, str] | None = None) -> object:
    return started(
        folder, "run", "app:tasks", "--log-format", "json", "--health", "127.0.0.1:0", *options, env=env or {}
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_answers_while_a_handler_blocks_the_loop(folder: Path, workers: str) -> None:
    with run(folder, "-w", workers, "--stall-timeout", "1") as process:
        port = port_of(process)
        wait_for(lambda: page(port, "/readyz")[0] == 200, "ready", lambda: process.text)
        # A worker that did not run for a second is told to be stalled, also on a busy machine.
        wait_for(lambda: page(port, "/livez") == (200, "ok\n"), "alive", lambda: process.text)
        enqueue(folder, "block", "a")
        process.line("begin a")
        wait_for(lambda: page(port, "/livez")[0] == 503, "stalled", lambda: process.text)
        assert page(port, "/metrics")[0] == 200
        assert page(port, "/stats")[0] == 200
        (folder / "free-a").touch()
        process.line("end a")
        wait_for(lambda: page(port, "/livez")[0] == 200, "alive again", lambda: process.text)
        acked = 'qworker_outcome="acked",qworker_task="block"} 1.0'
        wait_for(lambda: acked in page(port, "/metrics")[1], "counted", lambda: page(port, "/metrics")[1])
        assert process.drain() == 0, process.text


def test_a_draining_worker_is_not_ready_and_still_alive(folder: Path) -> None:
    with run(folder, "-w", "2", env={"QWORKER_HTTP_TOKEN": "open-sesame"}) as process:
        port = port_of(process)
        wait_for(lambda: page(port, "/readyz")[0] == 200, "ready", lambda: process.text)
        assert page(port, "/stats")[0] == 401
        enqueue(folder, "block", "a")
        process.line("begin a")
        process.signal(signal.SIGTERM)
        wait_for(lambda: page(port, "/readyz") == (503, "draining\n"), "not ready", lambda: process.text)
        assert page(port, "/livez")[0] == 200
        (folder / "free-a").touch()
        assert process.end() == 0, process.text


def test_counts_survive_a_killed_worker(folder: Path) -> None:
    with run(folder, "-w", "1:2", "-c", "1") as process:
        port = port_of(process)
        first = int(process.event("worker_process_started")["pid"])
        wait_for(lambda: page(port, "/readyz")[0] == 200, "ready", lambda: process.text)
        enqueue(folder, "quick", 1)
        acked = 'qworker_outcome="acked",qworker_task="quick"} %d.0\n'
        wait_for(lambda: acked % 1 in page(port, "/metrics")[1], "counted", lambda: process.text)
        os.kill(first, signal.SIGKILL)
        process.event("worker_process_ended")
        assert acked % 1 in page(port, "/metrics")[1]
        enqueue(folder, "quick", 2)
        process.line("quick 2")
        wait_for(lambda: acked % 2 in page(port, "/metrics")[1], "counted on", lambda: page(port, "/metrics")[1])
        assert process.drain() == 0, process.text


def test_a_worker_that_replaces_itself_keeps_its_port(folder: Path) -> None:
    with run(folder, "--max-messages", "1") as process:
        port = port_of(process)
        enqueue(folder, "quick", 1)
        process.event("worker_stopped")
        assert int(process.event("health_server_started", 2)["port"]) == port
        wait_for(lambda: page(port, "/readyz")[0] == 200, "ready again", lambda: process.text)
        assert process.drain() == 0, process.text


def test_the_command_is_an_exec_probe(folder: Path) -> None:
    def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-m", "qworker", "health", *arguments, "--timeout", str(PATIENCE)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    with run(folder) as process:
        port = port_of(process)
        wait_for(lambda: page(port, "/readyz")[0] == 200, "ready", lambda: process.text)
        assert (probe(f"127.0.0.1:{port}").returncode, probe(f"0.0.0.0:{port}", "--page", "readyz").stdout) == (
            0,
            "ok\n",
        )
        assert '"backlog":0' in probe(f"http://127.0.0.1:{port}/stats").stdout
        assert process.drain() == 0, process.text
    gone = probe(f"127.0.0.1:{port}")
    assert gone.returncode == 1
    assert "does not answer" in gone.stdout
    assert probe("nonsense").returncode == 2
