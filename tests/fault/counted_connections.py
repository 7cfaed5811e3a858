"""Use a store on Redis in every way, and count the sockets that redis-py opens for it.

    python counted_connections.py URL LOOP

Prints `used` and waits for a line, while the test ends all connections. Then it uses the store again, and its last line
is the number of sockets.
"""

from __future__ import annotations

import asyncio
import sys
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis.asyncio.connection
import redis.connection

from qworker import Message, Tasks, bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.message import Draft, Query, SettleAction, Settlement, State
from qworker.tools.doctor import run_checks
from qworker.worker import Worker, WorkerOptions
from tests.fault.loops import LOOPS

QUEUE = "work"
# The class of each connection.
opened: list[str] = []


def count_connections() -> None:
    """Count each socket that a class of redis-py connects."""
    # Each of these opens the socket itself. The classes for TLS and for sentinels call these.
    for blocking in (redis.connection.Connection, redis.connection.UnixDomainSocketConnection):
        blocking._connect = _counted(blocking._connect)
    for waiting in (redis.asyncio.connection.Connection, redis.asyncio.connection.UnixDomainSocketConnection):
        waiting._connect = _counted_waiting(waiting._connect)


def _counted(connect: Any) -> Any:
    @wraps(connect)
    def counted(self: Any) -> Any:
        connected = connect(self)
        opened.append(type(self).__name__)
        return connected

    return counted


def _counted_waiting(connect: Any) -> Any:
    @wraps(connect)
    async def counted(self: Any) -> Any:
        connected = await connect(self)
        opened.append(type(self).__name__)
        return connected

    return counted


async def use(backend: Backend) -> None:
    """Make each kind of call, many at once."""
    await asyncio.gather(*[backend.publish(QUEUE, [Draft(body=b"x")]) for _ in range(20)])
    waiting = [asyncio.ensure_future(backend.wait([f"empty-{n}"], 0.1)) for n in range(3)]
    leases = await backend.lease(QUEUE, 10, 60.0)
    assert await asyncio.to_thread(backend.extend, leases, 60.0) == []
    leases += await backend.lease(QUEUE, 20, 60.0, 0.1)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    assert await backend.lease(QUEUE, 1, 60.0, 0.1) == []
    await asyncio.gather(*waiting)
    await backend.reap(QUEUE)
    await backend.stats(QUEUE)
    await list_messages(backend, QUEUE, Query(State.READY))
    for log in await backend.history.logs():
        await backend.history.last_position(log)


async def load(backend: Backend) -> None:
    """Write in bulk. A store that does not keep staged messages itself needs the folder."""
    with TemporaryDirectory() as folder:
        writer = bulk.open(backend, QUEUE, "load", folder=Path(folder))
        await writer.commit(0, [await writer.stage("run", 0, "a", [[Draft(body=b"staged")]])])
        await writer.forget()


async def work(url: str) -> None:
    """Run a worker until nothing is ready."""
    tasks = Tasks(url)
    ran = 0

    @tasks.raw_handler(queue=QUEUE)
    async def on_message(message: Message) -> None:
        nonlocal ran
        ran += 1

    await Worker(tasks, WorkerOptions(queues=(QUEUE,), burst=True)).run()
    assert ran > 0


async def patiently(backend: Backend) -> None:
    """Use the store as soon as the lost connections are replaced."""
    for _ in range(10):
        try:
            await use(backend)
        except BackendUnavailable:
            continue
        return
    raise SystemExit("the store cannot be reached again")


async def run(url: str) -> None:
    backend = open_backend(url)
    await use(backend)
    await load(backend)
    await work(url)
    await run_checks(url)
    print("used", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await patiently(backend)
    await backend.aclose()
    print(len(opened), flush=True)


def main(url: str, loop: str) -> None:
    count_connections()
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run(url))


if __name__ == "__main__":
    main(*sys.argv[1:])
