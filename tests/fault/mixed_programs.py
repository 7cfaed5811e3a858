"""What the test of mixed versions runs, with the code of today.

    python mixed_programs.py publish URL LEDGER COUNT NAME      publish COUNT messages, a few at a time
    python mixed_programs.py work URL LEDGER NAME               work until SIGTERM

The copy in tests/fixtures/written-by-31528ec does the same with the code of that commit, and stays as it is.

Books of the ledger: `published` (after the store has said yes), `run` (each time that a handler begins: name, tries),
`acked` and `failed` (after the store has taken the outcome: id, worker).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from qworker import Context, Draft, Fail, Message, Retry, Tasks
from qworker.worker import Worker, WorkerOptions
from qworker.worker.delivery import Delivery

QUEUE = "mixed"
CONCURRENCY = 8
# Short, for on Redis a killed worker's messages come back by time alone; the living extend theirs, although a busy
# machine lets them wait. Older processes are told to use the same.
VISIBILITY = 10.0


class Ledger:
    """Append-only files of lines: what is written survives the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def write(self, book: str, *lines: str) -> None:
        if book not in self._files:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._files[book] = os.open(self._folder / book, flags, 0o644)
        os.write(self._files[book], "".join(f"{line}\n" for line in lines).encode())


def make_tasks(url: str, ledger: Ledger) -> Tasks:
    tasks = Tasks(url)

    async def run(ctx: Context, name: str) -> None:
        ledger.write("run", f"{name} {ctx.tries}")
        await asyncio.sleep(0.002)
        number = int(name.rpartition("-")[2])
        if number % 10 == 3 and ctx.tries == 0:
            raise Retry("not yet", delay=0.05)
        if number % 50 == 7:
            raise Fail(f"{name} is not wanted")

    @tasks.task(queue=QUEUE, max_tries=1000)
    async def call(ctx: Context, name: str) -> None:
        await run(ctx, name)

    @tasks.raw_handler(queue=QUEUE, max_tries=1000)
    async def raw(ctx: Context, message: Message) -> None:
        await run(ctx, message.body.decode())

    return tasks


async def publish(url: str, ledger: Ledger, count: int, name: str) -> None:
    """Calls and raw messages in turns; every tenth batch is due later."""
    tasks = make_tasks(url, ledger)
    backend = await tasks.backend()
    for first in range(0, count, 5):
        names = [f"{name}-{number}" for number in range(first, min(first + 5, count))]
        if first % 2:
            await tasks.enqueue_many([tasks["call"].call(each) for each in names])
        else:
            delay = 0.3 if first % 50 == 0 else 0.0
            drafts = [Draft(body=each.encode(), id=f"given:{each}", delay=delay) for each in names]
            await backend.publish(QUEUE, drafts)
        ledger.write("published", *names)
    await tasks.aclose()


class Told:
    """Writes down what the store has taken."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def handler_started(self, delivery: Delivery) -> None:
        """A handler tells it itself."""

    def message_settled(self, delivery: Delivery, outcome: str, error: str | None, duration: float) -> None:
        self._ledger.write(outcome, f"{delivery.lease.message.id} {self._name}")


async def work(url: str, ledger: Ledger, name: str) -> None:
    tasks = make_tasks(url, ledger)
    options = WorkerOptions(concurrency=CONCURRENCY, visibility_timeout=VISIBILITY)
    worker = Worker(tasks, options)
    worker.observers.append(Told(ledger, name))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    await worker.run()


def main(program: str, url: str, folder: str, *rest: str) -> None:
    ledger = Ledger(Path(folder))
    if program == "publish":
        asyncio.run(publish(url, ledger, int(rest[0]), rest[1]))
    else:
        asyncio.run(work(url, ledger, rest[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
