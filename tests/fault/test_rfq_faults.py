"""Lost replies, cancelled calls, flushed scripts and killed workers on topics of rfq: no message is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.kit.doctor_check import CheckStatus
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker.url import BackendURL
from qworker_redis.rfq import RfqBackend
from tests.fault.loops import both_loops
from tests.support.proxy import LossyProxy
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import let_pass

pytestmark = pytest.mark.fault

TOPIC = "work"
LONG = 1000.0
KILLS = 6
CONCURRENCY = 5
# Seconds: so many that a living worker keeps its messages, although a busy machine lets it wait.
VISIBILITY = 8.0

WORKER = f"""\
import asyncio, os, sys
from qworker import Message, Tasks
from qworker.worker.worker_options import WorkerOptions
from qworker.worker import Worker

tasks = Tasks(sys.argv[1])
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@tasks.raw_handler(queue="{TOPIC}", max_tries=1000)
async def on_message(message: Message) -> None:
    await asyncio.sleep(0.005)
    os.write(log, message.body + b"\\n")

asyncio.run(Worker(tasks, WorkerOptions(concurrency={CONCURRENCY}, visibility_timeout={VISIBILITY})).run())
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
async def direct(server: RedisServer) -> AsyncIterator[Backend]:
    backend = open_backend(f"rfq://127.0.0.1:{server.port}/0")
    yield backend
    await backend.aclose()


def lossy(seed: int, share: float) -> Any:
    """Lose a share of the answers, and never those of a greeting."""
    draw = random.Random(seed)
    return lambda data: b"proto" not in data and b"redis_version" not in data and draw.random() < share


def through(proxy: LossyProxy) -> Backend:
    return open_backend(f"rfq://127.0.0.1:{proxy.port}/0?retry_timeout=50")


def acks(leases: list[Lease]) -> list[Settlement]:
    return [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]


async def test_200_publishes_store_200_when_answers_are_lost(server: RedisServer, direct: Backend) -> None:
    async with LossyProxy(str(server.socket), lossy(1, 0.2)) as proxy:
        backend = through(proxy)
        ids = [(await backend.publish(TOPIC, [Draft(body=b"%d" % n)]))[0] for n in range(200)]
        await backend.aclose()
        assert proxy.resets > 5
    stored = await list_messages(direct, TOPIC, Query(State.READY))
    assert [row.message.id for row in stored] == ids
    assert [int(row.message.body) for row in stored] == list(range(200))


@both_loops
async def test_every_message_runs_once_and_every_ack_counts_when_answers_are_lost(
    server: RedisServer, direct: Backend
) -> None:
    await direct.publish(TOPIC, [Draft(body=b"%d" % n) for n in range(200)])
    ran: list[int] = []
    async with LossyProxy(str(server.socket), lossy(2, 0.15)) as proxy:
        backend = through(proxy)
        async with asyncio.timeout(50):
            while len(ran) < 200:
                try:
                    leases = await backend.lease(TOPIC, 7, LONG, 0.2)
                except BackendUnavailable:
                    continue
                ran += [int(lease.message.body) for lease in leases]
                # What a lost answer had claimed came back untouched.
                assert all(lease.message.tries == 0 for lease in leases)
                assert await backend.settle(acks(leases)) == []
        await backend.aclose()
        assert proxy.resets > 5
    assert sorted(ran) == list(range(200))
    with server.client() as client:
        assert client.keys("rfq:work:[bnm]*") == []


@both_loops
async def test_cancelled_calls_lose_nothing(direct: Backend, server: RedisServer) -> None:
    ids = await direct.publish(TOPIC, [Draft(body=b"x") for _ in range(20)])
    other = open_backend(direct.describe())
    draw = random.Random(3)
    for _ in range(150):
        held = await direct.lease(TOPIC, draw.randrange(1, 5), LONG)
        calls: list[Any] = [
            direct.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in held]),
            other.lease(TOPIC, 5, LONG),
            other.lease(TOPIC, 5, LONG, 1.0),
            other.wait([TOPIC, "other"], 1.0),
        ]
        running = [asyncio.create_task(call) for call in calls]
        await let_pass(draw.random() * 0.002)
        for task in running[1:]:
            task.cancel()
        await asyncio.wait(running)
        for task in running[1:3]:
            if not task.cancelled():
                await other.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in task.result()])
        assert await direct.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in held]) is not None

    async def all_are_back() -> bool:
        return (await direct.stats(TOPIC)).ready == len(ids)

    await wait_until(all_are_back)
    assert {row.message.id for row in await list_messages(direct, TOPIC, Query(State.READY))} == set(ids)
    with server.client() as client:
        assert client.hlen("rfq:work:qworker:claims") == client.zcard("rfq:work:qworker:leased") == 0
    await other.aclose()


async def test_killed_workers_lose_nothing_and_run_little_twice(
    server: RedisServer, direct: Backend, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    names = [b"%d" % number for number in range(600)]
    for first in range(0, len(names), 20):
        await direct.publish(TOPIC, [Draft(body=name) for name in names[first : first + 20]])

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, direct.describe(), str(log))

    def done() -> list[bytes]:
        return log.read_bytes().split() if log.exists() else []

    workers = [await start() for _ in range(2)]
    try:
        for turn in range(KILLS):
            enough = 40 * (turn + 1)
            await wait_until(lambda enough=enough: len(done()) >= enough, timeout=50)
            victim = workers.pop(0)
            victim.send_signal(signal.SIGKILL)
            await victim.wait()
            workers.append(await start())
        await wait_until(lambda: set(done()) == set(names), timeout=50)

        async def is_empty() -> bool:
            stats = await direct.stats(TOPIC)
            return stats.ready == stats.leased == stats.delayed == 0

        await wait_until(is_empty, timeout=50)
    finally:
        for worker in workers:
            worker.kill()
            await worker.wait()
    twice = sum(count - 1 for count in Counter(done()).values())
    # What a killed worker had, and may have finished and not acked; and what a machine that is too slow took for dead.
    assert twice <= KILLS * CONCURRENCY * 2
    assert (await direct.stats(TOPIC)).failed == 0


async def test_flushed_scripts_are_taught_again_and_the_doctor_knows_them(server: RedisServer, direct: Backend) -> None:
    for number in range(3):
        with server.client() as client:
            client.script_flush()
        await direct.publish(TOPIC, [Draft(body=b"%d" % number)])
        leases = await direct.lease(TOPIC, 1, LONG)
        assert await asyncio.to_thread(direct.extend, leases, LONG) == []
        assert await direct.settle(acks(leases)) == []
    checks = {check.name: check for check in await RfqBackend.doctor(BackendURL.parse(direct.describe()))}
    assert checks["redis scripts"].health is CheckStatus.OK
