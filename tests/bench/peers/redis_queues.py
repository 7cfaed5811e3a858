"""Other task queues on Redis, with their best documented settings: `redis_queues.py PEER ACTION URL COUNT`.

Actions: `enqueue` and `bulk` print seconds per call. `fill` only enqueues. `work` runs COUNT waiting tasks in one
process at concurrency 100 (synchronous ones: with their best number of threads), and prints the seconds from the first
start to the last end, without the last acks. `listen` prints `ready`, and then the milliseconds from the time in each
of COUNT tasks to its start. `send` enqueues them with pauses between the two numbers of seconds that follow. Each peer
has its own environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class Meter:
    """What the measured task does: it counts, and the last one tells and ends the process."""

    wanted = 0
    listening = False
    count = 0
    first = 0.0
    delays: list[float] = []  # noqa: RUF012
    cpu = 0.0

    def tick(self, value: int) -> None:
        """Run as the task."""
        if self.listening:
            self.delays.append((time.monotonic_ns() - value) / 1e6)
        elif not self.count:
            self.first = time.perf_counter()
            self.cpu = time.process_time()
        self.count += 1
        if self.count == self.wanted:
            self.tell()

    def tell(self) -> None:
        """Print the result and leave at once: how a peer stops is not measured."""
        if self.listening:
            print(json.dumps(self.delays), flush=True)
        else:
            seconds, cpu = time.perf_counter() - self.first, time.process_time() - self.cpu
            print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)
        os._exit(0)


METER = Meter()


class Peer(Protocol):
    """One queue."""

    async def open(self) -> None:
        """Connect."""

    async def enqueue(self, value: int) -> None:
        """Enqueue one task, awaited."""

    async def bulk(self, values: list[int]) -> None:
        """Enqueue many, the fastest documented way."""

    async def work(self) -> None:
        """Run a worker, for ever."""


async def gathered(enqueue: Callable[[int], Awaitable[Any]], values: list[int]) -> None:
    """The batch of those that have no batch: 100 at once."""
    for first in range(0, len(values), 100):
        await asyncio.gather(*(enqueue(value) for value in values[first : first + 100]))


class Repid:
    """repid, on streams."""

    def __init__(self, url: str) -> None:
        import repid

        self.app = repid.Repid(title="bench")
        self.server = repid.RedisServer(url)
        self.app.servers.register_server("default", self.server, is_default=True)
        router = repid.Router()

        async def noop(value: int) -> None:
            METER.tick(value)

        router.actor(noop)
        self.app.include_router(router)

    async def open(self) -> None:
        # Left open: the process ends with it.
        await self.server.connect()

    async def enqueue(self, value: int) -> None:
        await self.app.send_message_json(channel="default", payload={"value": value}, headers={"topic": "noop"})

    async def bulk(self, values: list[int]) -> None:
        await gathered(self.enqueue, values)

    async def work(self) -> None:
        await self.app.run_worker(tasks_limit=100)


class Arq:
    """arq; a shorter poll than its default, which would bound both its rate and its latency."""

    def __init__(self, url: str) -> None:
        from arq.connections import RedisSettings

        self.settings = RedisSettings.from_dsn(url)

    async def open(self) -> None:
        from arq import create_pool

        self.pool = await create_pool(self.settings)

    async def enqueue(self, value: int) -> None:
        await self.pool.enqueue_job("noop", value)

    async def bulk(self, values: list[int]) -> None:
        await gathered(self.enqueue, values)

    async def work(self) -> None:
        from arq.worker import Worker, func

        async def noop(context: Any, value: int) -> None:
            METER.tick(value)

        worker = Worker(
            [func(noop, name="noop", keep_result=0)],
            redis_settings=self.settings,
            max_jobs=100,
            poll_delay=0.01,
            keep_result=0,
            handle_signals=False,
        )
        await worker.async_run()


class Saq:
    """SAQ."""

    def __init__(self, url: str) -> None:
        from saq import Queue

        self.queue = Queue.from_url(url)

    async def open(self) -> None:
        await self.queue.connect()

    async def enqueue(self, value: int) -> None:
        await self.queue.enqueue("noop", value=value, ttl=-1)

    async def bulk(self, values: list[int]) -> None:
        await gathered(self.enqueue, values)

    async def work(self) -> None:
        from saq import Worker

        async def noop(context: Any, *, value: int) -> None:
            METER.tick(value)

        await Worker(self.queue, [("noop", noop)], concurrency=100).start()


class Taskiq:
    """taskiq on its stream broker, the one that acks."""

    def __init__(self, url: str) -> None:
        from taskiq_redis import RedisStreamBroker

        self.broker = RedisStreamBroker(url, consumer_id="0")

        @self.broker.task(task_name="noop")
        async def noop(value: int) -> None:
            METER.tick(value)

        self.noop = noop

    async def open(self) -> None:
        await self.broker.startup()

    async def enqueue(self, value: int) -> None:
        await self.noop.kiq(value)

    async def bulk(self, values: list[int]) -> None:
        await gathered(self.enqueue, values)

    async def work(self) -> None:
        from taskiq.receiver import Receiver

        await Receiver(self.broker, max_async_tasks=100, run_startup=False).listen(asyncio.Event())


class Streaq:
    """streaq."""

    def __init__(self, url: str) -> None:
        from streaq import Worker

        self.worker = Worker(redis_url=url, concurrency=100, handle_signals=False)

        async def noop(value: int) -> None:
            METER.tick(value)

        self.noop = self.worker.task(noop, ttl=0, silent=True)

    async def open(self) -> None:
        if sys.argv[2] not in {"work", "listen"}:
            await self.worker.__aenter__()

    async def enqueue(self, value: int) -> None:
        await self.noop.enqueue(value)

    async def bulk(self, values: list[int]) -> None:
        await self.worker.enqueue_many([self.noop.enqueue(value) for value in values])

    async def work(self) -> None:
        await self.worker.run_async()


class Dramatiq:
    """dramatiq, with eight threads, its default."""

    def __init__(self, url: str) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        self.broker = RedisBroker(url=url)
        dramatiq.set_broker(self.broker)

        @dramatiq.actor
        def noop(value: int) -> None:
            METER.tick(value)

        self.noop = noop

    async def open(self) -> None:
        pass

    async def enqueue(self, value: int) -> None:
        self.noop.send(value)

    async def bulk(self, values: list[int]) -> None:
        for value in values:
            self.noop.send(value)

    async def work(self) -> None:
        from dramatiq import Worker

        Worker(self.broker, worker_threads=8).start()
        await asyncio.Event().wait()


class Huey:
    """huey with one thread, its fastest here; a crash loses what it has popped."""

    def __init__(self, url: str) -> None:
        from huey import RedisHuey

        self.huey = RedisHuey("bench", url=url, results=False)

        @self.huey.task(name="noop")
        def noop(value: int) -> None:
            METER.tick(value)

        self.noop = noop

    async def open(self) -> None:
        pass

    async def enqueue(self, value: int) -> None:
        self.noop(value)

    async def bulk(self, values: list[int]) -> None:
        for value in values:
            self.noop(value)

    async def work(self) -> None:
        self.huey.create_consumer(workers=1, periodic=False).start()
        await asyncio.Event().wait()


PEERS: dict[str, Callable[[str], Peer]] = {
    "repid": Repid,
    "arq": Arq,
    "saq": Saq,
    "taskiq": Taskiq,
    "streaq": Streaq,
    "dramatiq": Dramatiq,
    "huey": Huey,
}


async def main() -> None:
    """See the module."""
    name, action, url = sys.argv[1:4]
    METER.wanted = count = int(sys.argv[4])
    METER.listening = action == "listen"
    peer = PEERS[name](url)
    await peer.open()
    if action in {"work", "listen"}:
        if METER.listening:
            asyncio.get_running_loop().call_later(2.0, lambda: print('"ready"', flush=True))
        await peer.work()
        raise SystemExit(f"{name}: its worker ended by itself")
    if action == "send":
        shortest, longest = map(float, sys.argv[5:7])
        for _ in range(count):
            await asyncio.sleep(random.uniform(shortest, longest))
            await peer.enqueue(time.monotonic_ns())
        os._exit(0)
    await peer.enqueue(0)
    began = time.perf_counter()
    if action == "enqueue":
        for value in range(count - 1):
            await peer.enqueue(value)
    else:
        await peer.bulk(list(range(count - 1)))
    print(json.dumps((time.perf_counter() - began) / count), flush=True)
    os._exit(0)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
