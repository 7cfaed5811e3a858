"""Finding and killing the Python processes of one Spark session, and no others."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.waiting import block_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["COMMIT", "Killer", "forked", "jvm"]

COMMIT = "pyspark.sql.worker.commit_data_source_write"


def jvm(spark: SparkSession) -> int:
    """The process id of the session's JVM."""
    return int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]


def descendants(process: int) -> dict[int, str]:
    """Everything that a process has started: ids, and command lines."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(folder.name))
    found: dict[int, str] = {}
    waiting = [process]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            try:
                found[child] = (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            waiting.append(child)
    return found


def workers(process: int) -> list[int]:
    """The Python processes in which tasks run."""
    return forked(process, "pyspark.worker")


def forked(process: int, module: str) -> list[int]:
    """Return the Python processes that run a module of Spark. Their parent is a daemon with the same command line."""
    daemons = [child for child, command in descendants(process).items() if command.split()[-1:] == [module]]
    return [child for daemon in daemons for child in descendants(daemon)]


class Killer:
    """Kills one task's Python process by SIGKILL, once, at some moment while a block runs.

    Args:
        process: the session's JVM.
        draw: for the moment and the victim.
        within: the longest time until then, in seconds.
    """

    def __init__(self, process: int, draw: random.Random, within: float) -> None:
        self._process = process
        self._draw = draw
        self._after = draw.uniform(0.0, within)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.killed = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        self._over.wait(self._after)
        while not self._over.is_set():
            # Idle ones are kept by the daemon: their death would prove nothing.
            busy = [worker for worker in workers(self._process) if _is_busy(worker)]
            if busy:
                try:
                    os.kill(self._draw.choice(busy), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed += 1
                return


def _is_busy(process: int) -> bool:
    def used() -> int:
        fields = (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    try:
        before = used()
        block_for(0.02)
        return used() > before
    except (FileNotFoundError, ProcessLookupError):
        return False
