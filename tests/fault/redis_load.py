"""A `qworker run` under load: publishers in the test, and a ledger in which handlers write what they run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import BackendError
from qworker.message import Draft
from qworker.testing.wait_until import wait_until
from tests.support.processes import Process, started
from tests.support.waiting import PATIENCE, let_pass

__all__ = ["APP", "Load", "under_load"]

APP = """
import os, time
from qworker import Message, Tasks

tasks = Tasks()
ledger = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

async def on_message(message: Message) -> None:
    os.write(ledger, f"{message.body.decode()} {time.monotonic_ns()}\\n".encode())

for queue in os.environ["LOAD_QUEUES"].split(","):
    tasks.raw_handler(queue=queue, max_tries=1000)(on_message)
"""


class Load:
    """Messages that are published all the time, and a worker that runs them. A body is `QUEUE/NUMBER`.

    Args:
        folder: The folder of the worker's app, with its ledger.
        backend: What publishes.
        queues: Each queue has its own publisher.
    """

    def __init__(self, folder: Path, backend: Backend, queues: Sequence[str]) -> None:
        self._ledger = folder / "ledger"
        self._backend = backend
        self._queues = queues
        self._attempted: Counter[str] = Counter()
        self._accepted: set[str] = set()
        self._stop = asyncio.Event()
        self._publishing: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the publishers."""
        self._publishing = [asyncio.create_task(self._publish(queue)) for queue in self._queues]

    async def cancel(self) -> None:
        """End the publishers, if they are not at their end."""
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)

    async def _publish(self, queue: str) -> None:
        """Publish batches until `finish` is called, each again under the same ids until the store has accepted it."""
        while not self._stop.is_set():
            first = self._attempted[queue]
            names = [f"{queue}/{number}" for number in range(first, first + 3)]
            self._attempted[queue] += len(names)
            drafts = [Draft(body=name.encode(), id=name.replace("/", "-")) for name in names]
            while True:
                try:
                    await self._backend.publish(queue, drafts)
                    break
                except BackendError:
                    await let_pass(0.02)
            self._accepted.update(names)
            await let_pass(0.003)

    def runs(self) -> list[tuple[str, int]]:
        """Return each run that has begun: the body, and when, in nanoseconds of the monotonic clock."""
        lines = self._ledger.read_text().splitlines(keepends=True) if self._ledger.exists() else []
        parts = (line.split() for line in lines if line.endswith("\n"))
        return [(body, int(moment)) for body, moment in parts]

    async def goes_on(self, count: int = 30) -> None:
        """Wait until messages of each queue have run that were not yet published when this was called."""
        before = Counter(self._attempted)

        def have_run() -> bool:
            bodies = (body.split("/") for body, _ in self.runs())
            new = Counter(queue for queue, number in bodies if int(number) >= before[queue])
            return all(new[queue] >= count for queue in self._queues)

        await wait_until(have_run, timeout=PATIENCE, what="new messages of each queue run")

    async def first_run_after(self, moment: int) -> int:
        """Wait for a run that began after a moment of the monotonic clock, and return its own moment."""
        return await wait_until(
            lambda: next((began for _, began in self.runs() if began > moment), 0), timeout=PATIENCE, what="a run"
        )

    async def stop(self) -> None:
        """Stop publishing, as soon as everything that was attempted is accepted."""
        self._stop.set()
        await asyncio.gather(*self._publishing)

    async def finish(self) -> None:
        """Stop publishing, and check that everything that was accepted runs, and nothing else."""
        await self.stop()
        await wait_until(
            lambda: self._accepted <= {body for body, _ in self.runs()}, timeout=PATIENCE, what="all that was accepted"
        )
        assert {body for body, _ in self.runs()} == self._accepted

    @property
    def repeated(self) -> int:
        """The number of runs of a message that had run before."""
        return sum(Counter(body for body, _ in self.runs()).values()) - len({body for body, _ in self.runs()})


@asynccontextmanager
async def under_load(
    folder: Path,
    url: str,
    queues: Sequence[str] = ("work",),
    *,
    workers: int = 1,
    loop: str = "auto",
    app: str = APP,
    worker_url: str | None = None,
) -> AsyncIterator[tuple[Load, Process]]:
    """Run workers and publishers until the block ends. The workers must then end well, having started once."""
    (folder / "app.py").write_text(app)
    backend = open_backend(url)
    load = Load(folder, backend, queues)
    command = (
        "run",
        "app:tasks",
        "--url",
        worker_url or url,
        "--log-format",
        "json",
        "-w",
        str(workers),
        "--loop",
        loop,
    )
    with started(folder, *command, env={"LOAD_QUEUES": ",".join(queues)}) as process:
        await asyncio.to_thread(process.event, "worker_started", workers)
        load.start()
        try:
            yield load, process
        finally:
            await load.cancel()
            await backend.aclose()
        assert await asyncio.to_thread(process.drain) == 0, process.text
        assert len(process.events("worker_started")) == workers, process.text
