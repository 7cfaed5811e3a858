"""A real cluster on loopback: Spark's own standalone master, and workers of one core each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests.spark.java import QUICK_JAVA
from tests.spark.killing import descendants
from tests.support.processes import Process, started

__all__ = ["Cluster", "running_cluster"]

_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_DEPLOY = "org.apache.spark.deploy"
_EXECUTOR = "CoarseGrainedExecutorBackend"
_URL = re.compile(r"Starting Spark master at (spark://\S+)")


class Cluster:
    """What tests see of it.

    Args:
        url: for `--master`.
        workers: its workers' processes, which start executors.
    """

    def __init__(self, url: str, workers: list[Process]) -> None:
        self.url = url
        self._workers = workers

    def executors(self) -> list[int]:
        """The process ids of all executors."""
        return [
            child
            for worker in self._workers
            for child, command in descendants(worker.pid).items()
            if _EXECUTOR in command
        ]

    def killed(self) -> int:
        """Return how many executors died of SIGKILL. The number of started ones is higher when an application ends."""
        return sum("exitStatus 137" in line for worker in self._workers for line in worker.lines)


@contextmanager
def running_cluster(folder: Path, workers: int = 2) -> Iterator[Cluster]:
    """A master, and workers that it knows."""
    with ExitStack() as stack:

        def start(name: str, what: str, *arguments: str) -> Process:
            place = folder / name
            place.mkdir(parents=True)
            return stack.enter_context(
                started(
                    place,
                    *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments),
                    executable=str(_SPARK_CLASS),
                    program=(f"{_DEPLOY}.{what}",),
                    env={"JAVA_TOOL_OPTIONS": QUICK_JAVA, "SPARK_LOCAL_DIRS": str(place)},
                )
            )

        master = start("master", "master.Master")
        found = _URL.search(master.line("Starting Spark master at"))
        assert found is not None
        options = ("--cores", "1", "--memory", "1g", "--work-dir", "work", found[1])
        each = [start(f"worker-{number}", "worker.Worker", *options) for number in range(workers)]
        for worker in each:
            worker.line("Successfully registered with master")
        yield Cluster(found[1], each)
        # In this order: what they have started ends with them.
        for process in (*each, master):
            process.drain()
