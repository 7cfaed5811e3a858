"""Lost replies of Redis, restarts, full memory: no message is lost or runs twice because of them."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendError, BackendUnavailable, PublishUncertain, StorageFull
from qworker.kit.doctor_check import CheckStatus
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker.url import BackendURL
from qworker_redis import RedisBackend
from tests.fault.loops import both_loops
from tests.support.proxy import LossyProxy
from tests.support.servers import PROGRAMS, RedisServer
from tests.support.waiting import PATIENCE, let_pass

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def acks(leases: list[Lease]) -> list[Settlement]:
    return [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]


def lossy(seed: int, share: float) -> Any:
    """Lose a share of the answers, and never those of a greeting."""
    draw = random.Random(seed)
    return lambda data: b"proto" not in data and b"redis_version" not in data and draw.random() < share


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param([Draft(body=b"x")], id="one"),
        pytest.param([Draft(body=b"x", unique_key="k")], id="one with a key"),
        pytest.param([Draft(body=b"x"), Draft(body=b"y")], id="two"),
    ],
)
async def test_what_ran_before_its_publish_is_repeated_is_not_stored_again(
    server: RedisServer, drafts: list[Draft]
) -> None:
    with server.client() as client:
        async with LossyProxy(str(server.socket)) as proxy:
            backend = open_backend(proxy.url("?retry_timeout=50"))
            # A publisher that is at work: its queue is there, and the scripts are known.
            for key in (None, None, "before"):
                await backend.publish(QUEUE, [Draft(body=b"before", unique_key=key)])

            def lose(data: bytes) -> bool:
                if proxy.resets:
                    return False
                assert client.hlen(f"{{qworker:{QUEUE}}}:msg") == 3 + len(drafts)
                client.delete(*(f"{{qworker:{QUEUE}}}:{part}" for part in ("msg", "ready", "keys")))
                return True

            proxy.lose = lose
            ids = await backend.publish(QUEUE, drafts)
            assert proxy.resets == 1
            assert len(ids) == len(drafts)
            assert await list_messages(backend, QUEUE, Query(State.READY)) == []
            # The next ones are stored.
            assert len(await backend.publish(QUEUE, drafts)) == len(drafts)
            assert len(await list_messages(backend, QUEUE, Query(State.READY))) == len(drafts)
            await backend.aclose()


@both_loops
async def test_every_message_runs_once_and_every_ack_counts_when_answers_are_lost(server: RedisServer) -> None:
    direct = open_backend(server.url)
    await direct.publish(QUEUE, [Draft(body=b"%d" % n) for n in range(200)])
    ran: list[int] = []
    async with LossyProxy(str(server.socket), lossy(2, 0.15)) as proxy:
        backend = open_backend(proxy.url("?retry_timeout=50"))
        deadline = asyncio.get_running_loop().time() + 50
        while len(ran) < 200:
            assert asyncio.get_running_loop().time() < deadline
            try:
                leases = await backend.lease(QUEUE, 7, LONG, 0.2)
            except BackendUnavailable:
                continue
            ran += [int(lease.message.body) for lease in leases]
            # What a lost answer had claimed came back untouched.
            assert all(lease.message.tries == 0 for lease in leases)
            assert await backend.settle(acks(leases)) == []
        await backend.aclose()
        assert proxy.resets > 5
    assert sorted(ran) == list(range(200))
    stats = await until_counted(direct, 0)
    assert stats.leased == 0
    await direct.aclose()


async def until_counted(backend: Any, ready: int) -> Any:
    async def counted() -> Any:
        stats = await backend.stats(QUEUE)
        return stats if (stats.ready, stats.leased) == (ready, 0) else None

    return await wait_until(counted)


@both_loops
async def test_a_settlement_whose_answer_was_lost_may_be_repeated_by_its_caller(server: RedisServer) -> None:
    async with LossyProxy(str(server.socket)) as proxy:
        backend = open_backend(proxy.url("?retry_timeout=0.1&timeout=20"))
        await backend.publish(QUEUE, [Draft(body=b"%d" % n) for n in range(4)])
        # The server knows the script: the answer that is lost is that of the settlement.
        assert await backend.settle(acks(await backend.lease(QUEUE, 1, LONG))) == []
        one, two, three = await backend.lease(QUEUE, 3, LONG)
        direct = open_backend(server.url)
        await direct.remove(QUEUE, Selection(ids=[two.message.id]))
        ends = [
            Settlement(lease=one, action=SettleAction.ACK),
            Settlement(lease=two, action=SettleAction.ACK),
            Settlement(lease=three, action=SettleAction.FAIL_TMP, error="again"),
        ]
        proxy.lose = lambda data: True
        with pytest.raises(BackendUnavailable):
            await backend.settle(ends)
        proxy.lose = lambda data: False
        # Other batches in between take nothing away from the answer; the third message has failed, and is leased again.
        await backend.publish(QUEUE, [Draft(body=b"4")])
        (again,) = await backend.lease(QUEUE, 1, LONG)
        assert (again.message.body, again.message.tries) == (b"3", 1)
        assert await backend.settle(acks([again])) == []
        assert await backend.settle(ends) == [ends[1]]
        (last,) = await list_messages(direct, QUEUE, Query(State.READY))
        assert last.message.body == b"4"
        await backend.aclose()
        await direct.aclose()


@both_loops
async def test_a_silent_network_is_noticed_and_left(server: RedisServer) -> None:
    async with LossyProxy(str(server.socket)) as proxy:
        backend = open_backend(proxy.url("?timeout=0.5&retry_timeout=50"))
        await backend.publish(QUEUE, [Draft(body=b"before")])
        # These two are not repeated by the backend, and on a busy machine the server can be late.
        (lease,) = await answered(lambda: backend.lease(QUEUE, 1, LONG), bool)
        proxy.silent = True
        with pytest.raises(BackendUnavailable):
            await backend.lease(QUEUE, 1, LONG)
        with pytest.raises(BackendUnavailable):
            await asyncio.to_thread(backend.extend, [lease], LONG)
        publishing = asyncio.create_task(backend.publish(QUEUE, [Draft(body=b"during")]))
        # Longer than a call waits for its answer.
        await let_pass(0.6)
        proxy.silent = False
        proxy.reset_all()
        await publishing
        assert await answered(lambda: asyncio.to_thread(backend.extend, [lease], LONG), lambda _: True) == []
        assert await backend.settle(acks([lease])) == []
        await backend.aclose()


T = TypeVar("T")


async def answered(call: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
    """Repeat a call until the server answers in time, with what is wanted: what a lost answer leased comes back."""

    async def answer() -> tuple[T] | None:
        try:
            found = await call()
        except BackendUnavailable:
            return None
        return (found,) if wanted(found) else None

    return (await wait_until(answer, PATIENCE))[0]


async def test_the_outcome_of_a_publish_that_got_no_answer_is_said_to_be_unknown(server: RedisServer) -> None:
    async with LossyProxy(str(server.socket), lossy(3, 1.0)) as proxy:
        backend = open_backend(proxy.url("?retry_timeout=0.2"))
        with pytest.raises(PublishUncertain):
            await backend.publish(QUEUE, [Draft(body=b"x")])
        await backend.aclose()


async def test_nobody_is_there_says_so_at_once() -> None:
    with RedisServer() as server:
        url = server.url
    backend = open_backend(url)
    with pytest.raises(BackendUnavailable, match="cannot connect to Redis"):
        await backend.open()
    await backend.aclose()


@both_loops
async def test_flushed_scripts_are_taught_again(server: RedisServer) -> None:
    backend = open_backend(server.url)
    with server.client() as client:
        for n in range(50):
            await backend.publish(QUEUE, [Draft(body=b"%d" % n)])
            if n % 3 == 0:
                client.script_flush()
            (lease,) = await backend.lease(QUEUE, 1, LONG, 5)
            assert lease.message.body == b"%d" % n
            client.script_flush()
            assert await asyncio.to_thread(backend.extend, [lease], LONG) == []
            assert await backend.settle(acks([lease])) == []
    await backend.aclose()


@both_loops
async def test_a_restart_under_load_loses_nothing() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        backend = open_backend(server.url + "?retry_timeout=50")
        await backend.open()
        assert backend.durability == "disk"
        accepted: set[str] = set()
        finished: set[str] = set()
        stop = asyncio.Event()

        async def produce() -> None:
            while not stop.is_set():
                accepted.update(await backend.publish(QUEUE, [Draft(body=b"x")] * 3))

        async def consume() -> None:
            while not stop.is_set():
                try:
                    leases = await backend.lease(QUEUE, 10, LONG, 0.2)
                except BackendUnavailable:
                    await let_pass(0.02)
                    continue
                assert await backend.settle(acks(leases)) == []
                finished.update(lease.message.id for lease in leases)

        loops = [asyncio.create_task(produce()), asyncio.create_task(consume())]
        for _ in range(3):
            before = len(finished)
            await wait_until(lambda before=before: len(finished) > before + 50)
            server.stop(signal.SIGKILL)
            await let_pass(0.05)
            server.start()
        before = len(finished)
        await wait_until(lambda: len(finished) > before)
        stop.set()
        await asyncio.gather(*loops)

        async def drained() -> bool:
            leases = await backend.lease(QUEUE, 100, LONG)
            assert await backend.settle(acks(leases)) == []
            finished.update(lease.message.id for lease in leases)
            stats = await backend.stats(QUEUE)
            return not stats.ready and not stats.leased

        await wait_until(drained)
        assert accepted - finished == set()
        assert finished - accepted == set()
        await backend.aclose()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_full_server_refuses_publishes_and_drains(program: str) -> None:
    # redis-6.2 knows no script flags: there the scripts get along without them.
    with RedisServer(program=program) as server:
        await fill_and_drain(server)


async def fill_and_drain(server: RedisServer) -> None:
    backend = open_backend(server.url + "?keep_done=5-messages")
    await backend.publish(QUEUE, [Draft(body=b"first", unique_key="k")])
    stored = 1
    with server.client() as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 2_000_000)
        refused = ""
        while not refused:
            try:
                await backend.publish(QUEUE, [Draft(body=b"x" * 10_000, priority=stored % 2) for _ in range(10)])
                stored += 10
            except StorageFull as error:
                refused = str(error)
        assert "maxmemory" in refused
        client.config_set("maxmemory", 1_000_000)
    (first,) = await backend.lease(QUEUE, 1, LONG)
    assert await asyncio.to_thread(backend.extend, [first], LONG) == []
    assert await backend.settle([Settlement(lease=first, action=SettleAction.FAIL_TMP, error="again")]) == []
    (again,) = await backend.lease(QUEUE, 1, LONG)
    assert await backend.settle([Settlement(lease=again, action=SettleAction.FAIL_PERM, error="no")]) == []
    assert await backend.requeue(QUEUE, Selection(state=State.FAILED)) == 1
    (again,) = await backend.lease(QUEUE, 1, LONG)
    assert await backend.settle([Settlement(lease=again, action=SettleAction.RELEASE)]) == []
    await backend.reap(QUEUE)
    drained = 0
    while leases := await backend.lease(QUEUE, 50, LONG):
        assert await backend.settle(acks(leases)) == []
        drained += len(leases)
    assert drained == stored
    with server.client() as client:
        client.config_set("maxmemory", 0)
    await backend.publish(QUEUE, [Draft(body=b"after")])
    await backend.aclose()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_primary_that_is_one_no_more_is_no_error_of_the_call(program: str) -> None:
    with RedisServer(program=program) as server:
        backend = open_backend(server.url + "?retry_timeout=0.3")
        await backend.publish(QUEUE, [Draft(body=b"1")])
        (held,) = await backend.lease(QUEUE, 1, LONG)
        with server.client() as client:
            client.config_set("replica-read-only", "yes")
            # Of nobody that answers: what it has is its own.
            client.replicaof("127.0.0.1", "1")
            # The next look may find another primary; for now there is none, and nothing has happened.
            with pytest.raises(BackendUnavailable):
                await backend.publish(QUEUE, [Draft(body=b"2")])
            with pytest.raises(BackendUnavailable):
                await backend.settle(acks([held]))
            with pytest.raises(BackendUnavailable):
                await asyncio.to_thread(backend.extend, [held], LONG)
            client.replicaof("NO", "ONE")
        assert await asyncio.to_thread(backend.extend, [held], LONG) == []
        assert await backend.settle(acks([held])) == []
        await backend.aclose()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
async def test_a_server_that_may_evict_queues_is_refused(server: RedisServer, policy: str) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
    backend = open_backend(server.url)
    with pytest.raises(BackendError, match="noeviction"):
        await backend.open()
    await backend.aclose()


@both_loops
async def test_a_stopped_server_delays_and_loses_nothing(server: RedisServer) -> None:
    backend = open_backend(server.url + "?timeout=0.3&retry_timeout=50")
    await backend.publish(QUEUE, [Draft(body=b"0")])
    server.pause()
    publishing = asyncio.create_task(backend.publish(QUEUE, [Draft(body=b"1")]))
    # Longer than a call waits for its answer.
    await let_pass(1)
    server.go_on()
    await publishing
    await backend.aclose()
    # A lease is not repeated, and on a busy machine the server can be later than 0.3 s.
    patient = open_backend(server.url)
    assert [lease.message.body for lease in await patient.lease(QUEUE, 5, LONG)] == [b"0", b"1"]
    await patient.aclose()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_doctor_names_the_server_and_finds_it_well(program: str) -> None:
    with RedisServer(program=program) as server:
        checks = {check.name: check for check in await RedisBackend.doctor(BackendURL.parse(server.url))}
    product, _, version = program.partition("-")
    wanted = "Redis " if program == "redis-server" else f"{product.capitalize()} {version} at "
    assert checks["redis version"].detail.startswith(wanted)
    assert checks["redis scripts"].health is CheckStatus.OK
    assert not [check for check in checks.values() if check.health is CheckStatus.BROKEN]


async def test_the_doctor_tells_what_is_in_force(server: RedisServer) -> None:
    url = BackendURL.parse(server.url)
    checks = {check.name: check for check in await RedisBackend.doctor(url)}
    assert checks["redis version"].health is CheckStatus.OK
    assert checks["redis scripts"].health is CheckStatus.OK
    assert checks["redis persistence"].health is CheckStatus.WARN
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "yes")
        client.config_set("appendfsync", "always")
    checks = {
        check.name: check for check in await RedisBackend.doctor(BackendURL.parse(server.url + "?min_replicas=2"))
    }
    assert checks["redis memory"].health is CheckStatus.BROKEN
    assert "noeviction" in checks["redis memory"].fix
    assert checks["redis persistence"].health is CheckStatus.OK
    assert checks["redis replicas"].health is CheckStatus.BROKEN
    server.stop(signal.SIGKILL)
    # That nobody is there is told by the check before.
    assert await RedisBackend.doctor(url) == []
