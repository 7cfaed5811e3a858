"""Requests that the network delivers late: a publish that was repeated meanwhile is stored and run once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import PublishUncertain
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing.wait_until import wait_until
from qworker_redis.keys import queue_key
from tests.support.depth import DEPTH
from tests.support.proxy import LossyProxy
from tests.support.servers import PROGRAMS, RedisServer, free_port

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

QUEUE = "work"
LONG = 1000.0
PUBLISHERS, EACH = 10, 20 * DEPTH
LINK = Path(__file__).with_name("redis_link.py")

each_scheme = pytest.mark.parametrize("scheme", ["redis", "rfq"])


@pytest.fixture(params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), program=request.param) as server:
        yield server


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(str(server.socket)) as proxy:
        yield proxy


@pytest.fixture
async def direct(server: RedisServer, scheme: str) -> AsyncIterator[Backend]:
    backend = open_backend(f"{scheme}://127.0.0.1:{server.port}/0")
    await backend.create(QUEUE)
    yield backend
    await backend.aclose()


def name_of(number: int) -> str:
    return f"{number:08x}" + "1" * 24


async def run_ready(backend: Backend, runs: Counter[str]) -> None:
    leases = await backend.lease(QUEUE, 500, LONG)
    runs.update(lease.message.id for lease in leases)
    assert await backend.settle([Settlement(lease=one, action=SettleAction.ACK) for one in leases]) == []


def is_publish(data: bytes) -> bool:
    return b"EVAL" in data and b"body" in data


@each_scheme
async def test_a_publish_whose_first_attempt_arrives_late_runs_once(
    proxy: LossyProxy, scheme: str, direct: Backend
) -> None:
    seen: set[bytes] = set()
    runs: Counter[str] = Counter()

    def is_first(data: bytes) -> bool:
        # The repetition of a publish has the same bodies.
        if not is_publish(data) or (body := data[data.index(b"body") :]) in seen:
            return False
        seen.add(body)
        return True

    async def publish(first: int) -> list[str]:
        backend = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.3&retry_timeout=100")
        # The first publish of a backend also finds its connection and the scripts.
        await backend.publish(QUEUE, [Draft(body=b"first")])
        proxy.hold = is_first
        ids: list[str] = []
        for number in range(first, first + EACH):
            batch = [Draft(body=b"body %d %d" % (number, n)) for n in range(1 + number % 2)]
            ids += await backend.publish(QUEUE, batch)
            await run_ready(direct, runs)
        await backend.aclose()
        return ids

    published = [i for some in await asyncio.gather(*[publish(EACH * n) for n in range(PUBLISHERS)]) for i in some]
    await run_ready(direct, runs)
    assert set(published) <= runs.keys()
    assert len(proxy.held) > EACH * PUBLISHERS / 2
    proxy.hold = lambda _: False
    await proxy.deliver()
    await run_ready(direct, runs)
    assert [name for name, count in runs.items() if count > 1] == []
    assert (await direct.stats(QUEUE)).ready == 0


@each_scheme
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("when", ["before it is published again", "after the ack"])
async def test_a_publish_that_the_app_repeats_after_an_error_runs_once(
    proxy: LossyProxy, scheme: str, direct: Backend, size: int, when: str
) -> None:
    backend = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.2&retry_timeout=0.05")
    await backend.publish(QUEUE, [Draft(body=b"first", id=name_of(99))])
    drafts = [Draft(body=b"body %d" % number, id=name_of(number)) for number in range(size)]
    runs: Counter[str] = Counter()
    proxy.hold = is_publish
    with pytest.raises(PublishUncertain):
        await backend.publish(QUEUE, drafts)
    proxy.hold = lambda _: False
    assert proxy.held
    if when != "after the ack":
        await proxy.deliver()
        await run_ready(direct, runs)
    assert await backend.publish(QUEUE, drafts) == [draft.id for draft in drafts]
    await run_ready(direct, runs)
    await proxy.deliver()
    await run_ready(direct, runs)
    assert runs == dict.fromkeys([name_of(99), *[name_of(number) for number in range(size)]], 1)
    # Later messages with the same ids are new ones.
    assert await backend.publish(QUEUE, drafts) == [draft.id for draft in drafts]
    await run_ready(direct, runs)
    assert runs[name_of(0)] == 2
    await backend.aclose()


@pytest.mark.parametrize("scheme", ["redis"])
async def test_a_publish_with_a_pending_key_that_the_app_repeats_returns_the_pending_id(
    proxy: LossyProxy, scheme: str, direct: Backend
) -> None:
    (pending,) = await direct.publish(QUEUE, [Draft(body=b"pending", unique_key="k")])
    backend = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.2&retry_timeout=0.05")
    await backend.publish(QUEUE, [Draft(body=b"first")])
    drafts = [Draft(body=b"body", id="a"), Draft(body=b"body", id="b", unique_key="k")]
    proxy.hold = is_publish
    with pytest.raises(PublishUncertain):
        await backend.publish(QUEUE, drafts)
    proxy.hold = lambda _: False
    await proxy.deliver()
    assert await backend.publish(QUEUE, drafts) == ["a", pending]
    assert (await direct.stats(QUEUE)).ready == 3
    await backend.aclose()


@pytest.mark.parametrize("scheme", ["redis"])
async def test_an_id_with_a_hold_stays_taken_after_its_message_is_gone(
    server: RedisServer, scheme: str, direct: Backend
) -> None:
    del scheme
    draft, runs = Draft(body=b"x", id="order-17", hold=0.5), Counter[str]()
    with server.client() as client:
        await direct.publish(QUEUE, [Draft(body=b"x")])
        assert not client.exists(queue_key(QUEUE, "holds"))
        await direct.publish(QUEUE, [draft])
        for _ in range(3):
            await run_ready(direct, runs)
            # Also without a hold of their own, alone and in a batch, and delayed.
            assert await direct.publish(QUEUE, [draft]) == ["order-17"]
            assert await direct.publish(QUEUE, [Draft(body=b"y", id="order-17")]) == ["order-17"]
            assert await direct.publish(QUEUE, [Draft(body=b"y", id="order-17", delay=0.1, priority=3)]) == ["order-17"]
            await direct.publish(QUEUE, [Draft(body=b"y", id="order-17"), Draft(body=b"z")])
        await run_ready(direct, runs)
        assert runs["order-17"] == 1

        async def swept() -> bool:
            await direct.reap(QUEUE)
            return not client.exists(queue_key(QUEUE, "holds"))

        await wait_until(swept)
    await direct.publish(QUEUE, [Draft(body=b"y", id="order-17")])
    await run_ready(direct, runs)
    assert runs["order-17"] == 2


@pytest.mark.parametrize("scheme", ["redis"])
@pytest.mark.parametrize("priority", [0, 9])
async def test_a_hold_goes_with_every_other_option(direct: Backend, scheme: str, priority: int) -> None:
    del scheme
    draft = Draft(body=b"x", id="all", hold=60, priority=priority, unique_key="key", tries=2, fields={"a": "b"})
    await direct.publish(QUEUE, [draft])
    (lease,) = await direct.lease(QUEUE, 1, LONG)
    message = lease.message
    assert (message.id, message.body, message.priority, message.unique_key) == ("all", b"x", priority, "key")
    assert (message.tries, message.fields) == (2, {"a": "b"})


def test_a_network_interface_that_goes_down_and_up_lets_nothing_run_twice() -> None:
    """The kernel sends what was unanswered again, also for connections that their process has closed."""
    command = ["unshare", "--net", sys.executable, str(LINK), str(100 * DEPTH)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    published, ran, twice, outages = map(int, ended.stdout.splitlines()[-1].split())
    assert published == ran == 100 * DEPTH
    assert twice == 0
    assert outages >= 3
