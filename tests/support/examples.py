"""The examples, run as their READMEs say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.depth import DEEP
from tests.support.waiting import wait_for

__all__ = ["EXAMPLES", "PATIENCE", "environment", "files_in", "running", "wait_in_run", "workers_of"]

EXAMPLES = Path(__file__).parents[2] / "examples"
# Seconds for one step; the whole installation is thousands of files, and two processors may be busy with other tests.
PATIENCE = 120.0


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    kept["PYTHONUNBUFFERED"] = "1"
    kept["QWORKER_EXAMPLE_FILES"] = os.environ.get("QWORKER_EXAMPLE_FILES", "1000000" if DEEP else "1200")
    return kept


def wait_in_run(condition: Callable[[], bool], supervisor: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Wait for a condition while the workers run."""

    def holds() -> bool:
        assert supervisor.poll() is None, f"qworker run ended with {supervisor.returncode}:\n{log.read_text()[-3000:]}"
        return condition()

    wait_for(holds, what, log.read_text, timeout=PATIENCE)


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
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"resource_tracker" not in arguments:
            found.append(int(child))
    return found


def files_in(queue: Path, *states: str) -> int:
    return sum(len([name for name in os.listdir(queue / state) if not name.startswith(".")]) for state in states)
