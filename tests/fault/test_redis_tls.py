"""TLS, client certificates and users: what a server demands is kept, and a refusal is one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qworker import bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cell import Cell, CellAction, CellOp, CellWatch
from qworker.errors import BackendError, BackendUnavailable, PermissionDenied
from qworker.message import Draft, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from tests.fault.loops import both_loops
from tests.support.certificates import Certificates
from tests.support.servers import RedisServer, free_port
from tests.support.topologies import cluster, watched

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "tls")


@pytest.fixture
def server(certificates: Certificates) -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), tls=certificates) as server:
        yield server


def administrator(server: RedisServer) -> Any:
    """A plain client, for the commands that have no types."""
    return server.client()


async def work(backend: Backend, queue: str = QUEUE) -> None:
    """Use each kind of connection: for calls, for blocking reads, and for threads."""
    await backend.publish(queue, [Draft(body=b"x")])
    leases = await backend.lease(queue, 1, LONG, 1)
    assert [lease.message.body for lease in leases] == [b"x"]
    assert await asyncio.to_thread(backend.extend, leases, LONG) == []
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    assert await backend.lease(queue, 1, LONG) == []
    assert await backend.lease(queue, 1, LONG, 0.05) == []
    await backend.wait([queue], 0.05)


async def works(url: str) -> None:
    backend = open_backend(url)
    try:
        await backend.open()
        await work(backend)
    finally:
        await backend.aclose()


async def refused(url: str, kind: type[BackendError] = BackendUnavailable, timeout: float = 20.0) -> str:
    """Return the one line with which `open` and `publish` fail, before the timeout unless nobody answers."""
    backend = open_backend(f"{url}{'&' if '?' in url else '?'}retry_timeout=0.1&timeout={timeout}")
    with pytest.raises(kind) as caught:
        await backend.open()
    with pytest.raises(kind):
        await backend.publish(QUEUE, [Draft(body=b"x")])
    await backend.aclose()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- certificates ------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_server_with_a_certificate_of_the_named_authority_is_used(
    server: RedisServer, certificates: Certificates
) -> None:
    await works(f"{server.tcp_url}?tls_ca={certificates.ca}")
    await works(f"{server.tcp_url}?tls_ca={certificates.ca}&{certificates.client_options}")


@both_loops
async def test_a_certificate_of_another_authority_is_refused_in_one_line(server: RedisServer, tmp_path: Path) -> None:
    for options in ("", f"?tls_ca={Certificates(tmp_path / 'other').ca}", "?tls_verify=ca"):
        error = await refused(server.tcp_url + options)
        assert "certificate is not trusted" in error
        assert "tls_ca=FILE" in error
    await works(f"{server.tcp_url}?tls_verify=0")


async def test_threads_refuse_a_certificate_of_another_authority_too(
    server: RedisServer, certificates: Certificates, tmp_path: Path
) -> None:
    backend = open_backend(f"{server.tcp_url}?tls_ca={certificates.ca}&timeout=5")
    await backend.publish(QUEUE, [Draft(body=b"x")])
    leases = await backend.lease(QUEUE, 1, LONG)
    port = server.port
    server.close()
    with RedisServer(port=port, tls=Certificates(tmp_path / "other")):
        with pytest.raises(BackendUnavailable, match="certificate is not trusted") as caught:
            await asyncio.to_thread(backend.extend, leases, LONG)
        assert "\n" not in str(caught.value)
    await backend.aclose()


async def test_tls_verify_says_how_much_of_a_certificate_must_be_right(tmp_path: Path) -> None:
    elsewhere = Certificates(tmp_path / "elsewhere", "DNS:elsewhere.example")
    with RedisServer(port=free_port(), tls=elsewhere) as server:
        for verify in ("", "&tls_verify=1"):
            assert "certificate is not trusted" in await refused(f"{server.tcp_url}?tls_ca={elsewhere.ca}{verify}")
        for verify in ("ca", "0"):
            await works(f"{server.tcp_url}?tls_ca={elsewhere.ca}&tls_verify={verify}")


async def test_a_server_that_asks_for_a_client_certificate_gets_it(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "tls", client_required=True)
    other = Certificates(tmp_path / "other")
    with RedisServer(port=free_port(), tls=certificates) as server:
        url = f"{server.tcp_url}?tls_ca={certificates.ca}"
        await works(f"{url}&{certificates.client_options}")
        assert "Redis at 127.0.0.1" in await refused(url)
        assert "Redis at 127.0.0.1" in await refused(f"{url}&{other.client_options}")


async def test_a_port_without_tls_and_one_with_tls_are_told_apart(
    server: RedisServer, certificates: Certificates
) -> None:
    assert "use rediss://" in await refused(f"redis://127.0.0.1:{server.port}")
    with RedisServer(port=free_port()) as plain:
        options = f"?tls_ca={certificates.ca}"
        assert "does not speak TLS" in await refused(f"rediss://127.0.0.1:{plain.port}{options}", timeout=1.0)


# -- sentinels and clusters --------------------------------------------------------------------------------------------


async def test_sentinels_and_their_primary_speak_tls(certificates: Certificates) -> None:
    with watched(replicas=1, sentinels=2, tls=certificates) as group:
        await works(group.url(f"?tls=1&tls_ca={certificates.ca}&min_replicas=1"))
        assert "certificate is not trusted" in await refused(group.url("?tls=1"))
        await refused(group.url())


async def test_the_nodes_of_a_cluster_speak_tls(certificates: Certificates) -> None:
    with cluster(tls=certificates) as formed:
        backend = open_backend(formed.url(f"?tls=1&tls_ca={certificates.ca}"))
        for number in range(3):
            await work(backend, *formed.queues_of(number, 1))
        await backend.aclose()
        assert "certificate is not trusted" in await refused(formed.url("?tls=1"))


# -- users -------------------------------------------------------------------------------------------------------------


async def test_a_user_logs_in_over_tls(
    server: RedisServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with administrator(server) as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">pass/word", "~*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "off")
    url = f"rediss://{{}}127.0.0.1:{server.port}?tls_ca={certificates.ca}"
    await works(url.format("worker:pass%2Fword@"))
    assert "password" in await refused(url.format("worker:wrong@"), PermissionDenied)
    assert "password" in await refused(url.format(""), PermissionDenied)
    monkeypatch.setenv("QWORKER_REDIS_PASSWORD", "pass/word")
    await works(url.format("worker@"))


async def use_cells(backend: Backend) -> None:
    """Make every operation of cells, and a wait that is woken by a message of a channel."""
    waiting = asyncio.create_task(backend.wait([], 60.0, [CellWatch(QUEUE, "g", "n")]))
    await wait_until_blocked(waiting)
    (put,) = await backend.cells(QUEUE, [CellOp("put", Cell("g", "n", ttl=LONG))])
    async with asyncio.timeout(40.0):
        await waiting
    actions: list[CellAction] = ["get", "list", "delete", "close"]
    replies = await backend.cells(QUEUE, [CellOp(do, Cell("g", "" if do == "list" else "n")) for do in actions])
    assert [reply.done for reply in (put, *replies)] == [True] * 5
    await backend.cells(QUEUE, [CellOp("put", Cell("g", "n", ttl=0.000_001))])
    await backend.reap(QUEUE)
    (closed,) = await backend.cells(QUEUE, [CellOp("close", Cell("g", ""))])
    assert closed.empty


async def test_a_user_needs_only_what_the_docs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(
        line.split("ACL SETUSER worker", 1)[1]
        for line in (Path(__file__).parents[2] / "docs/reference/redis.md").read_text().splitlines()
        if "ACL SETUSER worker" in line
    )
    with RedisServer() as server:
        with administrator(server) as client:
            client.execute_command("ACL", "SETUSER", "worker", *rule.replace("PASSWORD", "pass/word").split())
        monkeypatch.setenv("QWORKER_REDIS_PASSWORD", "pass/word")
        backend = open_backend(f"unix://worker@{server.socket}")
        await backend.open()
        await backend.create(QUEUE)
        await backend.publish(QUEUE, [Draft(body=b"x", delay=0.001), Draft(body=b"y", unique_key="k")])
        await backend.wait([QUEUE], 5)
        leases = await wait_until(lambda: backend.lease(QUEUE, 2, LONG, 1))
        assert await asyncio.to_thread(backend.extend, leases, LONG) == []
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
        assert await backend.queues() == [QUEUE]
        await backend.reap(QUEUE)
        await use_cells(backend)
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
        with administrator(server) as client:
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


async def test_a_user_without_channels_finds_the_change_of_a_cell_a_little_later() -> None:
    with RedisServer() as server:
        with administrator(server) as client:
            rule = "on nopass allkeys resetchannels +@all -publish -subscribe"
            client.execute_command("ACL", "SETUSER", "worker", *rule.split())
        backend = open_backend(f"unix://worker@{server.socket}")
        await use_cells(backend)
        assert (await backend.cells(QUEUE, [CellOp("get", Cell("g", "n"))]))[0].cell is None
        await backend.aclose()
