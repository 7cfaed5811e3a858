"""Redis clusters: queues on all nodes, slots that move, and primaries that are killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.errors import PublishUncertain
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from tests.fault.loops import both_loops
from tests.fault.redis_load import under_load
from tests.support.servers import RedisServer
from tests.support.topologies import Cluster, cluster, command, queue_slot
from tests.support.waiting import let_pass

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0


@pytest.fixture
def primaries() -> Iterator[Cluster]:
    """Three primaries without replicas."""
    with cluster() as formed:
        yield formed


@pytest.fixture
def replicated() -> Iterator[Cluster]:
    """Three primaries with a replica each, which takes over soon."""
    with cluster(replicas=1, node_timeout=1000) as formed:
        yield formed


def acks(leases: list[Lease]) -> list[Settlement]:
    return [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]


async def test_a_change_of_a_cell_wakes_a_wait_on_every_node(primaries: Cluster) -> None:
    backend, other = open_backend(primaries.url()), open_backend(primaries.url())
    queues = [f"cells-{number}" for number in range(6)]
    waits = [asyncio.create_task(backend.wait([queue], 60.0, [CellWatch(queue, "g", "n")])) for queue in queues]
    for wait in waits:
        await wait_until_blocked(wait)
    for queue in queues:
        (put,) = await other.cells(queue, [CellOp("put", Cell("g", "n", b"x"))])
        assert put.done
    async with asyncio.timeout(40.0):
        await asyncio.gather(*waits)
    for queue in queues:
        await backend.delete(queue)
    assert [await other.cells(queue, [CellOp("get", Cell("g", "n"))]) for queue in queues] == [[CellReply(False)]] * 6
    await backend.aclose()
    await other.aclose()


async def test_queues_of_a_cluster_live_on_all_its_nodes(primaries: Cluster) -> None:
    backend = open_backend(primaries.url())
    names = [f"queue-{n}" for n in range(12)]
    assert {primaries.number_of(name) for name in names} == {0, 1, 2}
    for name in names:
        await backend.publish(name, [Draft(body=name.encode(), priority=n % 3) for n in range(5)])
    assert await backend.queues() == sorted(names)
    waiting = asyncio.create_task(backend.wait(["queue-absent", "queue-empty"], 50))
    await wait_until_blocked(waiting)
    await backend.publish("queue-empty", [Draft(body=b"x")])
    await waiting
    for name in names:
        leases = await backend.lease(name, 10, LONG, 1)
        assert [lease.message.body for lease in leases] == [name.encode()] * 5
        assert await asyncio.to_thread(backend.extend, leases, LONG) == []
        assert await backend.settle(acks(leases)) == []
        await backend.delete(name)
    await backend.aclose()


# -- slots that move ---------------------------------------------------------------------------------------------------


@both_loops
async def test_a_slot_that_moves_takes_its_queue_along(primaries: Cluster) -> None:
    slot = queue_slot(QUEUE)
    number = primaries.number_of(QUEUE)
    source, target = primaries.primaries[number], primaries.primaries[(number + 1) % 3]
    backend = open_backend(primaries.url("?retry_timeout=50"))
    await backend.publish(QUEUE, [Draft(body=b"%d" % n) for n in range(100)])
    held = await backend.lease(QUEUE, 10, LONG)
    accepted: list[str] = []
    stop = asyncio.Event()

    async def produce() -> None:
        while not stop.is_set():
            accepted.extend(await backend.publish(QUEUE, [Draft(body=b"during")]))
            await let_pass(0.005)

    producing = asyncio.create_task(produce())
    await wait_until(lambda: len(accepted) > 3)
    await asyncio.to_thread(_migrate, slot, source, target)
    before = len(accepted)
    await wait_until(lambda: len(accepted) > before + 3, timeout=50)
    stop.set()
    await producing
    assert command(target, "CLUSTER", "COUNTKEYSINSLOT", slot) > 0
    assert await asyncio.to_thread(backend.extend, held, LONG) == []
    assert await backend.settle(acks(held)) == []
    stats = await backend.stats(QUEUE)
    assert (stats.ready, stats.leased) == (90 + len(accepted), 0)
    await backend.aclose()


def _migrate(slot: int, source: RedisServer, target: RedisServer) -> None:
    """Move a slot as redis-cli does."""
    source_id, target_id = command(source, "CLUSTER", "MYID"), command(target, "CLUSTER", "MYID")
    command(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    while keys := command(source, "CLUSTER", "GETKEYSINSLOT", slot, 10):
        command(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 20000, "KEYS", *keys)
    command(target, "CLUSTER", "SETSLOT", slot, "NODE", target_id)
    command(source, "CLUSTER", "SETSLOT", slot, "NODE", target_id)


# -- fail-overs --------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_replica_that_takes_over_has_the_queues_and_the_leases_of_its_slots(replicated: Cluster) -> None:
    backend = open_backend(replicated.url("?retry_timeout=50&timeout=2&min_replicas=1"))
    (queue,), (other,) = replicated.queues_of(0, 1), replicated.queues_of(1, 1)
    await backend.publish(queue, [Draft(body=b"held"), Draft(body=b"ready")])
    (held,) = await backend.lease(queue, 1, LONG)
    assert await asyncio.to_thread(backend.extend, [held], LONG) == []
    await wait_until(lambda: _same_data(replicated.primaries[0], replicated.replicas[0]))
    replicated.primaries[0].stop(signal.SIGKILL)
    # Nobody confirms a write of the new primary: it has no replica yet.
    impatient = open_backend(replicated.url("?retry_timeout=1&timeout=0.5&min_replicas=1"))
    await wait_until(lambda: _is_primary(replicated.replicas[0]), timeout=50)
    with pytest.raises(PublishUncertain):
        await impatient.publish(queue, [Draft(body=b"unconfirmed", id="unconfirmed")])
    assert await backend.publish(other, [Draft(body=b"elsewhere")])
    publishing = asyncio.create_task(backend.publish(queue, [Draft(body=b"after")]))
    replicated.primaries[0].start()
    await publishing
    assert await asyncio.to_thread(backend.extend, [held], LONG) == []
    assert await backend.settle(acks([held])) == []
    bodies = {lease.message.body for lease in await backend.lease(queue, 10, LONG)}
    assert bodies - {b"unconfirmed"} == {b"ready", b"after"}
    await impatient.aclose()
    await backend.aclose()


def _same_data(primary: RedisServer, replica: RedisServer) -> bool:
    with primary.client() as one, replica.client() as other:
        return one.info("replication")["master_repl_offset"] == other.info("replication")["master_repl_offset"]


def _is_primary(server: RedisServer) -> bool:
    with server.client() as client:
        info = client.info("replication")["role"], client.execute_command("CLUSTER", "INFO")
        return info[0] == "master" and b"cluster_state:ok" in info[1]


async def test_one_worker_on_queues_of_all_primaries_outlives_the_death_of_each(
    tmp_path: Path, replicated: Cluster
) -> None:
    queues = [name for number in range(3) for name in replicated.queues_of(number, 2)]
    assert len({queue_slot(name) for name in queues}) == 6
    url = replicated.url("?retry_timeout=50&timeout=2")
    async with under_load(tmp_path, url, queues) as (load, _):
        await load.goes_on()
        replicated.primaries[1].stop(signal.SIGKILL)
        await load.goes_on()
        replicated.primaries[1].start()
        await wait_until(lambda: _follows(replicated.primaries[1]), timeout=50)
        # The one that took over goes, too, and the first one is the primary again.
        replicated.replicas[1].stop(signal.SIGKILL)
        await load.goes_on()
        await load.stop()


def _follows(server: RedisServer) -> bool:
    with server.client() as client:
        info = client.info("replication")
        return bool(info["role"] == "slave" and info["master_link_status"] == "up")


async def test_what_replicas_have_confirmed_survives_a_primary_that_is_killed_under_load(
    tmp_path: Path, replicated: Cluster
) -> None:
    queues = [name for number in range(3) for name in replicated.queues_of(number, 1)]
    url = replicated.url("?retry_timeout=50&timeout=2&min_replicas=1")
    async with under_load(tmp_path, url, queues) as (load, _):
        await load.goes_on()
        replicated.primaries[2].stop(signal.SIGKILL)
        await wait_until(lambda: _is_primary(replicated.replicas[2]), timeout=50)
        replicated.primaries[2].start()
        await load.goes_on()
        await load.finish()
