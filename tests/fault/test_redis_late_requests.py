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
from qworker.errors import BackendUnavailable, PublishUncertain
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing.wait_until import wait_until
from qworker_redis.keys import queue_key
from tests.support.depth import DEEP, DEPTH
from tests.support.proxy import LossyProxy
from tests.support.servers import PROGRAMS, RedisServer, free_port
from tests.support.waiting import PATIENCE, let_pass

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

QUEUE = "work"
LONG = 1000.0
PUBLISHERS, EACH = 10, 20 * DEPTH
MESSAGES = max(1000, 100 * DEPTH) if DEEP else 100
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


async def until_stored(backend: Backend, drafts: list[Draft]) -> list[str]:
    """Publish messages with ids, as an app does: again until the answer comes. A busy machine is later than 0.2 s."""

    async def stored() -> list[str]:
        try:
            return await backend.publish(QUEUE, drafts)
        except (BackendUnavailable, PublishUncertain):
            return []

    return await wait_until(stored, PATIENCE)


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
    await until_stored(backend, [Draft(body=b"first", id=name_of(99))])
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
    assert await until_stored(backend, drafts) == [draft.id for draft in drafts]
    await run_ready(direct, runs)
    await proxy.deliver()
    await run_ready(direct, runs)
    assert runs == dict.fromkeys([name_of(99), *[name_of(number) for number in range(size)]], 1)
    # Later messages with the same ids are new ones.
    assert await until_stored(backend, drafts) == [draft.id for draft in drafts]
    await run_ready(direct, runs)
    assert runs[name_of(0)] == 2
    await backend.aclose()


@pytest.mark.parametrize("scheme", ["redis"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("priority", [0, 3])
@pytest.mark.parametrize("before", ["nothing", "another id", "the same id"])
async def test_an_id_that_another_process_publishes_again_runs_once(
    proxy: LossyProxy, scheme: str, direct: Backend, size: int, priority: int, before: str
) -> None:
    """The first process has died, and its request arrives after the ack."""
    drafts = [Draft(body=b"body %d" % n, id=name_of(n), priority=priority) for n in range(size)]
    died = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.2&retry_timeout=0.05")
    runs: Counter[str] = Counter()
    if before == "the same id":
        await until_stored(died, drafts)
        await run_ready(direct, runs)
    else:
        await until_stored(died, [Draft(body=b"first", id=name_of(99) if before == "another id" else None)])
    proxy.hold = is_publish
    with pytest.raises(PublishUncertain):
        await died.publish(QUEUE, drafts)
    proxy.hold = lambda _: False
    await died.aclose()
    other = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0")
    await run_ready(direct, runs)
    runs.clear()
    assert await other.publish(QUEUE, drafts) == [draft.id for draft in drafts]
    await run_ready(direct, runs)
    await proxy.deliver()
    await run_ready(direct, runs)
    assert runs == {draft.id: 1 for draft in drafts}
    # Later messages with the same ids are new ones, also at once, and from each process.
    for backend in (other, direct, other):
        assert await backend.publish(QUEUE, drafts) == [draft.id for draft in drafts]
        await run_ready(direct, runs)
    assert runs == {draft.id: 4 for draft in drafts}
    await other.aclose()


@pytest.mark.parametrize("scheme", ["redis"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("earlier", [True, False], ids=["earlier message", "no earlier message"])
async def test_a_call_that_repeats_its_request_finds_what_others_published_in_the_meantime(
    proxy: LossyProxy, scheme: str, direct: Backend, size: int, earlier: bool
) -> None:
    slow = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.5&retry_timeout=100")
    drafts = [Draft(body=b"body %d" % n, id=name_of(n)) for n in range(size)]
    runs: Counter[str] = Counter()
    await slow.publish(QUEUE, [Draft(body=b"first", id=name_of(99))])
    if earlier:
        # It ends before the call begins, so it is another message.
        await direct.publish(QUEUE, drafts)
    await run_ready(direct, runs)
    runs.clear()
    proxy.hold = is_publish
    publishing = asyncio.create_task(slow.publish(QUEUE, drafts))
    await wait_until(lambda: len(proxy.held) == 2)
    assert await direct.publish(QUEUE, drafts) == [draft.id for draft in drafts]
    await run_ready(direct, runs)
    proxy.hold = lambda _: False
    assert await publishing == [draft.id for draft in drafts]
    await proxy.deliver()
    await run_ready(direct, runs)
    assert runs == {draft.id: 1 for draft in drafts}
    await slow.publish(QUEUE, drafts)
    await run_ready(direct, runs)
    assert runs == {draft.id: 2 for draft in drafts}
    await slow.aclose()


@pytest.mark.parametrize("seconds", [1.0, 5.0, 20.0, 120.0])
@pytest.mark.parametrize("given", [True, False], ids=["given id", "new id"])
@pytest.mark.parametrize("repeated_by", ["the call", "another process"])
async def test_a_request_that_is_held_back_for_seconds_stores_nothing_twice(
    seconds: float, given: bool, repeated_by: str
) -> None:
    """The time passes on the server's clock. In deep tests, it passes on all clocks, up to 20 s."""
    with RedisServer(port=free_port(), moved_clock=True) as server:
        async with LossyProxy(str(server.socket)) as proxy:
            direct = open_backend(f"redis://127.0.0.1:{server.port}/0")
            call = "retry_timeout=100" if repeated_by == "the call" else "retry_timeout=0.05"
            slow = open_backend(f"redis://127.0.0.1:{proxy.port}/0?timeout=0.2&{call}")
            runs: Counter[str] = Counter()
            await until_stored(slow, [Draft(body=b"first", id=name_of(99))])
            await until_stored(slow, [Draft(body=b"first")])
            await run_ready(direct, runs)
            runs.clear()
            # A process can only repeat a message whose id it knows.
            drafts = [Draft(body=b"body", id="order-17" if given or repeated_by != "the call" else None)]
            proxy.hold = lambda data: is_publish(data) and not proxy.held
            if repeated_by == "the call":
                await slow.publish(QUEUE, drafts)
            else:
                proxy.hold = is_publish
                with pytest.raises(PublishUncertain):
                    await slow.publish(QUEUE, drafts)
                await direct.publish(QUEUE, drafts)
            await run_ready(direct, runs)
            assert proxy.held
            if DEEP and seconds <= 20:
                await let_pass(seconds)
            else:
                server.advance(seconds)
            await direct.reap(QUEUE)
            await proxy.deliver()
            await run_ready(direct, runs)
            assert list(runs.values()) == [1]
            await slow.aclose()
            await direct.aclose()


async def test_after_the_servers_clock_was_set_back_an_id_can_be_published_again() -> None:
    with RedisServer(port=free_port(), moved_clock=True) as server:
        backend = open_backend(f"redis://127.0.0.1:{server.port}/0")
        runs: Counter[str] = Counter()
        for step in (0.0, -3600.0, 0.0, 7200.0, 0.0):
            server.advance(step)
            await backend.publish(QUEUE, [Draft(body=b"body", id="order-17")])
            await run_ready(backend, runs)
        assert runs["order-17"] == 5
        await backend.aclose()


async def test_the_times_of_published_ids_do_not_accumulate() -> None:
    with RedisServer(port=free_port(), moved_clock=True) as server, server.client() as client:
        backend = open_backend(f"redis://127.0.0.1:{server.port}/0")
        for number in range(1200):
            await backend.publish(QUEUE, [Draft(body=b"body", id=name_of(number))])
        assert client.zcard(queue_key(QUEUE, "holds")) == 1200
        server.advance(61)
        await backend.reap(QUEUE)
        assert not client.exists(queue_key(QUEUE, "holds"))
        # Other messages keep none.
        await backend.publish(QUEUE, [Draft(body=b"body"), Draft(body=b"body", delay=9), Draft(body=b"y", priority=2)])
        assert not client.exists(queue_key(QUEUE, "holds"))
        await backend.aclose()


@pytest.mark.parametrize("scheme", ["redis"])
async def test_a_publish_with_a_pending_key_that_the_app_repeats_returns_the_pending_id(
    proxy: LossyProxy, scheme: str, direct: Backend
) -> None:
    (pending,) = await direct.publish(QUEUE, [Draft(body=b"pending", unique_key="k")])
    backend = open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.2&retry_timeout=0.05")
    await until_stored(backend, [Draft(body=b"first", id="first")])
    drafts = [Draft(body=b"body", id="a"), Draft(body=b"body", id="b", unique_key="k")]
    proxy.hold = is_publish
    with pytest.raises(PublishUncertain):
        await backend.publish(QUEUE, drafts)
    proxy.hold = lambda _: False
    await proxy.deliver()
    assert await until_stored(backend, drafts) == ["a", pending]
    assert (await direct.stats(QUEUE)).ready == 3
    await backend.aclose()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_id_with_a_hold_stays_taken_after_its_message_is_gone(program: str) -> None:
    draft, runs = Draft(body=b"x", id="order-17", hold=600), Counter[str]()
    with RedisServer(port=free_port(), moved_clock=True, program=program) as server, server.client() as client:
        direct = open_backend(f"redis://127.0.0.1:{server.port}/0")
        await direct.create(QUEUE)
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
        server.advance(601)
        await direct.reap(QUEUE)
        assert client.zscore(queue_key(QUEUE, "holds"), "order-17") is None
        await direct.publish(QUEUE, [Draft(body=b"y", id="order-17")])
        await run_ready(direct, runs)
        assert runs["order-17"] == 2
        await direct.aclose()


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
    command = ["unshare", "--net", sys.executable, str(LINK), str(MESSAGES)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600 if DEEP else 200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    published, ran, twice, outages = map(int, ended.stdout.splitlines()[-1].split())
    assert published == ran == MESSAGES
    assert twice == 0
    assert outages >= 3
