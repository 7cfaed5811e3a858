"""Processes that the Redis fault tests kill and stop; each writes what it did to append-only files of lines.

Run as `python redis_programs.py PROGRAM URL FOLDER`; see `main`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path

from qworker import Message, Tasks
from qworker.backend.registry import open_backend
from qworker.errors import BackendError
from qworker.message import Draft, SettleAction, Settlement
from qworker.worker import Worker
from qworker.worker.worker_options import WorkerOptions

QUEUE = "work"
VISIBILITY = 30.0
CONCURRENCY = 10


def write(folder: Path, book: str, *lines: str) -> None:
    """Append lines; what is written survives the process."""
    file = os.open(folder / book, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)


async def publish(url: str, folder: Path) -> None:
    """Publish batches, each until the store says yes, as long as there is no file `stop`."""
    backend = open_backend(url)
    for number in itertools.count():
        if (folder / "stop").exists():
            break
        names = [f"p{os.getpid()}-{number}-{n}" for n in range(3)]
        write(folder, "attempted", *names)
        while True:
            try:
                await backend.publish(QUEUE, [Draft(body=name.encode(), id=name) for name in names])
                break
            except BackendError:
                await asyncio.sleep(0.02)
        write(folder, "accepted", *names)
    await backend.aclose()


async def work(url: str, folder: Path) -> None:
    """A worker, until SIGTERM."""
    tasks = Tasks(url)

    @tasks.raw_handler(queue=QUEUE, max_tries=1000)
    async def on_message(message: Message) -> None:
        await asyncio.sleep(0)
        write(folder, "finished", message.body.decode())

    worker = Worker(tasks, WorkerOptions(queues=(QUEUE,), concurrency=CONCURRENCY, visibility_timeout=VISIBILITY))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    await worker.run()


async def watch(url: str, folder: Path) -> None:
    """Reap and lease, in rounds that can be counted."""
    backend = open_backend(url)
    while True:
        await backend.reap(QUEUE)
        leases = await backend.lease(QUEUE, 10, VISIBILITY)
        write(folder, "finished", *(lease.message.body.decode() for lease in leases))
        await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
        write(folder, "rounds", "1")
        await backend.wait([QUEUE], 0.2)


async def hold(url: str, folder: Path) -> None:
    """Lease 20 for 0.3 s and say so; when a line arrives, tell how many were lost and how many settlements refused."""
    backend = open_backend(url)
    leases = await backend.lease(QUEUE, 20, 0.3)
    write(folder, "held", *(lease.message.id for lease in leases))
    sys.stdin.readline()
    lost = backend.extend(leases[:2], VISIBILITY)
    refused = await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    print(len(lost), len(refused), flush=True)
    await backend.aclose()


PROGRAMS = {program.__name__: program for program in (publish, work, watch, hold)}


def main(name: str, url: str, folder: str) -> None:
    asyncio.run(PROGRAMS[name](url, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
