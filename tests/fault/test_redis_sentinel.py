"""Redis with sentinels: fail-overs, sentinels that are out of date, and sentinels that do not answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable, PublishUncertain
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from tests.fault.loops import both_loops
from tests.fault.redis_load import under_load
from tests.support.proxy import LossyProxy
from tests.support.servers import RedisServer, free_port
from tests.support.topologies import command, primary_server, replica_of, sentinel_of, watched
from tests.support.waiting import let_pass

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0


def acks(leases: list[Lease]) -> list[Settlement]:
    return [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]


# -- fail-overs --------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_fail_over_is_followed() -> None:
    with watched(replicas=1, sentinels=1) as group:
        backend = open_backend(group.url("?retry_timeout=50&timeout=2&min_replicas=1"))
        await backend.open()
        assert backend.durability == "replicated"
        await backend.publish(QUEUE, [Draft(body=b"before")])
        (lease,) = await backend.lease(QUEUE, 1, LONG)
        waiting = asyncio.create_task(_patient_lease(backend))
        group.primary.stop(signal.SIGKILL)
        alone = open_backend(group.url("?retry_timeout=50&timeout=2"))
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


async def test_what_a_replica_has_confirmed_survives_a_primary_that_is_killed_under_load(tmp_path: Path) -> None:
    with watched(replicas=2, sentinels=3) as group:
        url = group.url("?min_replicas=1&timeout=2&retry_timeout=50")
        async with under_load(tmp_path, url) as (load, _):
            await load.goes_on()
            group.primary.stop(signal.SIGKILL)
            await load.goes_on()
            # This sentinel may not have led the fail-over, and hears of it from the one that has.
            replicas = {replica.port for replica in group.replicas}
            await wait_until(lambda: group.named() in replicas, timeout=50, what="the sentinel names the new primary")
            await load.finish()


async def test_a_write_that_too_few_replicas_have_is_no_success() -> None:
    with RedisServer() as server:
        backend = open_backend(server.url + "?min_replicas=1&timeout=0.2&retry_timeout=0.3")

        async def refused() -> bool:
            with pytest.raises((PublishUncertain, BackendUnavailable)) as caught:
                await backend.publish(QUEUE, [Draft(body=b"x")])
            # A busy server does not answer within 0.2 s: then nobody knows about its replicas.
            return caught.type is PublishUncertain and "replicas" in str(caught.value)

        await wait_until(refused, timeout=50)
        await backend.aclose()


# -- sentinels that are out of date ------------------------------------------------------------------------------------


class Swapped:
    """A primary and its replica that have changed places, and a sentinel that still names the old primary."""

    def __init__(self, old: RedisServer, new: RedisServer, stale: RedisServer) -> None:
        self.old = old
        self.new = new
        self.stale = stale

    def swap(self) -> None:
        """Make the replica the primary, and the primary its replica."""
        command(self.old, "REPLICAOF", "127.0.0.1", self.new.port)
        command(self.new, "REPLICAOF", "NO", "ONE")

    def tell(self) -> None:
        """Tell the sentinel which server is the primary now."""
        command(self.stale, "SENTINEL", "REMOVE", "main")
        command(self.stale, "SENTINEL", "MONITOR", "main", "127.0.0.1", self.new.port, 1)

    def url(self, options: str, *others: RedisServer) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in (self.stale, *others))
        return f"redis+sentinel://{hosts}/main{options}"


@pytest.fixture
def servers() -> Iterator[Swapped]:
    with ExitStack() as stack:
        old = stack.enter_context(primary_server())
        new = stack.enter_context(replica_of(old))
        # It takes nothing for down, and so never moves its primary.
        yield Swapped(old, new, stack.enter_context(sentinel_of(old, down_after=600_000)))


@both_loops
async def test_a_server_that_is_not_the_primary_any_more_is_not_used_although_a_sentinel_names_it(
    servers: Swapped,
) -> None:
    backend = open_backend(servers.url("?retry_timeout=0.3"))
    await backend.publish(QUEUE, [Draft(body=b"held"), Draft(body=b"ready")])
    (held,) = await backend.lease(QUEUE, 1, LONG)
    assert await asyncio.to_thread(backend.extend, [held], LONG) == []
    await wait_until(lambda: command(servers.new, "DBSIZE") == command(servers.old, "DBSIZE"))
    servers.swap()
    for call in (
        backend.publish(QUEUE, [Draft(body=b"refused")]),
        backend.lease(QUEUE, 1, LONG),
        backend.settle(acks([held])),
        asyncio.to_thread(backend.extend, [held], LONG),
    ):
        with pytest.raises(BackendUnavailable) as caught:
            await call
        assert "\n" not in str(caught.value)
    newcomer = open_backend(servers.url(""))
    with pytest.raises(BackendUnavailable, match="primary"):
        await newcomer.open()
    await newcomer.aclose()
    patient = open_backend(servers.url("?retry_timeout=50"))
    publishing = asyncio.create_task(patient.publish(QUEUE, [Draft(body=b"during")]))
    servers.tell()
    await publishing
    assert await asyncio.to_thread(backend.extend, [held], LONG) == []
    assert await backend.settle(acks([held])) == []
    direct = open_backend(servers.new.url)
    stored = {each.message.body for state in State for each in await list_messages(direct, QUEUE, Query(state))}
    assert stored == {b"ready", b"during"}
    for each in (backend, patient, direct):
        await each.aclose()


async def test_a_sentinel_that_names_an_old_primary_is_passed_over_for_the_next(servers: Swapped) -> None:
    servers.swap()
    with sentinel_of(servers.new) as current:
        backend = open_backend(servers.url("", current))
        await backend.publish(QUEUE, [Draft(body=b"x")])
        leases = await backend.lease(QUEUE, 1, LONG)
        assert await asyncio.to_thread(backend.extend, leases, LONG) == []
        assert await backend.settle(acks(leases)) == []
        await backend.aclose()


# -- sentinels that do not answer --------------------------------------------------------------------------------------


@both_loops
async def test_a_sentinel_that_accepts_and_never_answers_is_left_for_the_next_within_the_timeout() -> None:
    with watched(replicas=0, sentinels=1) as group:
        (sentinel,) = group.sentinels
        async with LossyProxy(str(sentinel.socket)) as proxy:
            proxy.silent = True
            hosts = f"127.0.0.1:{proxy.port},127.0.0.1:{sentinel.port}"

            async def left_in_time() -> bool:
                backend = open_backend(f"redis+sentinel://{hosts}/main?timeout=0.5")
                try:
                    async with asyncio.timeout(5):
                        await backend.open()
                        await backend.publish(QUEUE, [Draft(body=b"x")])
                        leases = await backend.lease(QUEUE, 1, LONG)
                    async with asyncio.timeout(5):
                        assert await asyncio.to_thread(backend.extend, leases, LONG) == []
                        assert await backend.settle(acks(leases)) == []
                except (BackendUnavailable, PublishUncertain, TimeoutError):
                    return False
                finally:
                    await backend.aclose()
                return True

            # Again, if the machine was busy: the servers that do answer have 0.5 s for it, too.
            await wait_until(left_in_time, timeout=50)


async def test_a_sentinel_that_is_not_there_is_left_for_the_next() -> None:
    with watched(replicas=0, sentinels=1) as group:
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{group.sentinels[0].port}"
        backend = open_backend(f"redis+sentinel://{hosts}/main")
        await backend.publish(QUEUE, [Draft(body=b"x")])
        assert (await backend.stats(QUEUE)).ready == 1
        await backend.aclose()


async def test_work_goes_on_while_no_sentinel_answers() -> None:
    with watched(replicas=0, sentinels=1) as group:
        async with LossyProxy(str(group.sentinels[0].socket)) as proxy:
            backend = open_backend(f"redis+sentinel://127.0.0.1:{proxy.port}/main?timeout=0.5&retry_timeout=50")
            await _publish_and_ack(backend)
            proxy.silent = True
            proxy.reset_all()
            await _publish_and_ack(backend)
            # The connections are lost, and the sentinel says where to open new ones.
            with group.primary.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
            publishing = asyncio.create_task(backend.publish(QUEUE, [Draft(body=b"x")]))
            # Longer than a sentinel is waited for.
            await let_pass(0.6)
            proxy.silent = False
            proxy.reset_all()
            await publishing
            await _publish_and_ack(backend)
            await backend.aclose()


async def _publish_and_ack(backend: Backend) -> None:
    """Publishes and settlements are repeated by the backend. A lease and an extension fail on a server that is late."""
    await backend.publish(QUEUE, [Draft(body=b"x")])
    leases = await _patient_lease(backend)

    async def extended() -> bool:
        try:
            return await asyncio.to_thread(backend.extend, leases, LONG) == []
        except BackendUnavailable:
            return False

    await wait_until(extended, timeout=50)
    assert await backend.settle(acks(leases)) == []


async def test_a_name_that_no_sentinel_knows_is_one_line() -> None:
    with watched(replicas=0, sentinels=1) as group:
        backend = open_backend(group.url().replace("/main/", "/other/"))
        with pytest.raises(BackendUnavailable, match="other") as caught:
            await backend.open()
        assert "\n" not in str(caught.value)
        await backend.aclose()
