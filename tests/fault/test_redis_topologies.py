"""Sentinels, clusters, replicas, TLS and users: real servers, and what happens when the primary changes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qworker import bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable, PermissionDenied, PublishUncertain
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from qworker_redis.topology import queue_slot
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import let_pass

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0


def acks(leases: list[Lease]) -> list[Settlement]:
    return [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]


# -- sentinels ---------------------------------------------------------------------------------------------------------


async def test_a_fail_over_is_followed() -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(RedisServer(port=free_port()))
        replica = stack.enter_context(
            RedisServer(port=free_port(), replicaof=f"127.0.0.1 {primary.port}", repl_diskless_sync_delay="0")
        )
        with replica.client() as client:
            await wait_until(lambda: client.info("replication").get("master_link_status") == "up", timeout=50)
        sentinel = stack.enter_context(
            RedisServer(
                port=free_port(),
                sentinel=f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
                "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n",
            )
        )
        with sentinel.client() as client:
            await wait_until(lambda: client.sentinel_slaves("main") or None, timeout=50)
        backend = open_backend(
            f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0?retry_timeout=50&timeout=2&min_replicas=1"
        )
        await backend.open()
        assert backend.durability == "replicated"
        await backend.publish(QUEUE, [Draft(body=b"before")])
        (lease,) = await backend.lease(QUEUE, 1, LONG)
        waiting = asyncio.create_task(_patient_lease(backend))
        primary.stop(signal.SIGKILL)
        alone = open_backend(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0?retry_timeout=50&timeout=2")
        await alone.publish(QUEUE, [Draft(body=b"after")])
        assert [found.message.body for found in await waiting] == [b"after"]
        assert await asyncio.to_thread(alone.extend, [lease], LONG) == []
        assert await alone.settle(acks([lease])) == []
        await backend.aclose()
        await alone.aclose()


async def _patient_lease(backend: Backend) -> list[Lease]:
    async def lease() -> list[Lease]:
        try:
            return await backend.lease(QUEUE, 1, LONG, 1)
        except BackendUnavailable:
            return []

    return await wait_until(lease, timeout=50)


async def test_a_write_that_too_few_replicas_have_is_no_success() -> None:
    with RedisServer() as server:
        backend = open_backend(server.url + "?min_replicas=1&timeout=0.2&retry_timeout=0.3")
        with pytest.raises(PublishUncertain, match="replicas"):
            await backend.publish(QUEUE, [Draft(body=b"x")])
        await backend.aclose()


# -- clusters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[list[RedisServer]]:
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(RedisServer(port=free_port(), cluster_enabled="yes", cluster_node_timeout="5000"))
            for _ in range(3)
        ]
        bounds = [0, 5461, 10923, 16384]
        for node, first, end in zip(nodes, bounds[:-1], bounds[1:], strict=True):
            raw(node, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            raw(node, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        yield nodes


async def _formed(nodes: list[RedisServer]) -> None:
    def agreed() -> bool:
        for node in nodes:
            if b"cluster_state:ok" not in raw(node, "CLUSTER", "INFO") or len(raw(node, "CLUSTER", "SLOTS")) != 3:
                return False
        return True

    await wait_until(agreed, timeout=50)


def raw(node: RedisServer, *command: Any) -> Any:
    """An answer as it is."""
    with node.client() as client:
        return client.execute_command(*command)


def _node_of(nodes: list[RedisServer], queue: str) -> int:
    return min(queue_slot(queue) * 3 // 16384, 2)


async def test_queues_of_a_cluster_live_on_all_its_nodes(nodes: list[RedisServer]) -> None:
    await _formed(nodes)
    backend = open_backend(f"redis+cluster://127.0.0.1:{nodes[1].port},127.0.0.1:{nodes[2].port}")
    names = [f"queue-{n}" for n in range(12)]
    assert {_node_of(nodes, name) for name in names} == {0, 1, 2}
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


async def test_a_slot_that_moves_takes_its_queue_along(nodes: list[RedisServer]) -> None:
    await _formed(nodes)
    slot = queue_slot(QUEUE)
    source = nodes[_node_of(nodes, QUEUE)]
    target = nodes[(_node_of(nodes, QUEUE) + 1) % 3]
    backend = open_backend(f"redis+cluster://127.0.0.1:{nodes[0].port}?retry_timeout=50")
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
    assert raw(target, "CLUSTER", "COUNTKEYSINSLOT", slot) > 0
    assert await asyncio.to_thread(backend.extend, held, LONG) == []
    assert await backend.settle(acks(held)) == []
    stats = await backend.stats(QUEUE)
    assert (stats.ready, stats.leased) == (90 + len(accepted), 0)
    await backend.aclose()


def _migrate(slot: int, source: RedisServer, target: RedisServer) -> None:
    """Move a slot as redis-cli does."""
    source_id, target_id = raw(source, "CLUSTER", "MYID"), raw(target, "CLUSTER", "MYID")
    raw(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    raw(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    while keys := raw(source, "CLUSTER", "GETKEYSINSLOT", slot, 10):
        raw(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 20000, "KEYS", *keys)
    raw(target, "CLUSTER", "SETSLOT", slot, "NODE", target_id)
    raw(source, "CLUSTER", "SETSLOT", slot, "NODE", target_id)


# -- TLS and users -----------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    certificate = tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(certificate), "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate


async def test_tls_is_verified(authority: Path) -> None:
    port = free_port()
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(authority),
        "tls-key-file": str(authority.with_name("key.pem")),
        "tls-ca-cert-file": str(authority),
    }
    with RedisServer(**options):
        url = f"rediss://127.0.0.1:{port}/0"
        stranger = open_backend(url)
        with pytest.raises(BackendUnavailable, match="certificate"):
            await stranger.open()
        await stranger.aclose()
        own = f"tls_cert={authority}&tls_key={authority.with_name('key.pem')}"
        backend = open_backend(f"{url}?tls_ca={authority}&{own}")
        await backend.publish(QUEUE, [Draft(body=b"x")])
        leases = await backend.lease(QUEUE, 1, LONG, 1)
        assert await asyncio.to_thread(backend.extend, leases, LONG) == []
        assert await backend.settle(acks(leases)) == []
        await backend.aclose()


async def test_a_user_needs_only_what_the_docs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(
        line.split("ACL SETUSER worker", 1)[1]
        for line in (Path(__file__).parents[2] / "docs/redis.md").read_text().splitlines()
        if "ACL SETUSER worker" in line
    )
    with RedisServer() as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "worker", *rule.replace("PASSWORD", "pass/word").split())
        monkeypatch.setenv("QWORKER_REDIS_PASSWORD", "pass/word")
        backend = open_backend(f"unix://worker@{server.socket}")
        await backend.open()
        await backend.create(QUEUE)
        await backend.publish(QUEUE, [Draft(body=b"x", delay=0.001), Draft(body=b"y", unique_key="k")])
        await backend.wait([QUEUE], 5)
        leases = await wait_until(lambda: backend.lease(QUEUE, 2, LONG, 1))
        assert await asyncio.to_thread(backend.extend, leases, LONG) == []
        assert await backend.settle(acks(leases)) == []
        assert await backend.queues() == [QUEUE]
        await backend.reap(QUEUE)
        await backend.stats(QUEUE)
        await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(250)])
        for state in State:
            for newest in (False, True):
                found = await list_messages(backend, QUEUE, Query(state, newest=newest))
                if found:
                    await list_messages(backend, QUEUE, Query(state, after=found[-1].position, newest=newest))
                await backend.find(QUEUE, [stored.message.id for stored in found[:3]])
        for log in await backend.history.logs():
            await backend.history.last_position(log)
        writer = bulk.open(backend, QUEUE, "job")
        await writer.discard("another")
        await writer.commit(0, [await writer.stage("run", 0, "a", [[Draft(body=b"z")]])])
        await writer.forget()
        await backend.delete(QUEUE)
        await backend.aclose()
        with server.client() as client:
            assert client.acl_log() == [], "a command was refused"


@pytest.mark.parametrize("url", ["unix://{}", "unix://:wrong@{}", "unix://worker:wrong@{}"])
async def test_a_wrong_password_is_one_line_and_is_not_shown(url: str) -> None:
    with RedisServer(requirepass="right") as server:
        backend = open_backend(url.format(server.socket))
        with pytest.raises(PermissionDenied) as caught:
            await backend.open()
        assert "wrong" not in str(caught.value) + backend.describe()
        assert "\n" not in str(caught.value)
        with pytest.raises(PermissionDenied):
            await backend.publish(QUEUE, [Draft(body=b"x")])
        await backend.aclose()
