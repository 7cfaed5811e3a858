"""A step of the server's clock: no lease is taken early, and none outlasts its visibility timeout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker_redis.host_clock import HostClock
from tests.support.servers import PROGRAMS, MovedClock, RedisServer, free_port

pytestmark = pytest.mark.fault

QUEUE = "work"
VISIBILITY = 30.0
# Seconds that a lease may last longer, and shorter by the inaccuracy of clocks.
LATER, SOONER = 5.0, 1.0

each_jump = pytest.mark.parametrize("jump", [3600.0, -3600.0, 600.0, -600.0])
each_scheme = pytest.mark.parametrize("scheme", ["redis", "rfq"])
each_host = pytest.mark.parametrize("host", ["the same host", "another host"])


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), moved_clock=True, program=request.param) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


def url_of(server: RedisServer, scheme: str) -> str:
    return f"{scheme}://127.0.0.1:{server.port}/0"


def use_host(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Let the next backends run on a host that has started at another time."""
    if host == "another host":
        monkeypatch.setattr("qworker_redis.host_clock.boot_id", lambda: "another-start")


async def remaining(server: RedisServer, backend: Backend) -> dict[str, float]:
    """Return the seconds that each lease lasts, by the server's clock."""
    with server.client() as client:
        seconds, microseconds = client.time()
    now = seconds + microseconds / 1e6
    leased = await list_messages(backend, QUEUE, Query(State.LEASED))
    return {row.message.id: row.expires_at - now for row in leased if row.expires_at is not None}


async def check(server: RedisServer, backend: Backend, leases: list[Lease], began: float) -> None:
    """Check what is left of leases that were made or extended after `began`, by the monotonic clock."""
    left = await remaining(server, backend)
    # A call that was late, on a busy machine, counts twice: its time has passed, and what it tells of the host's clock
    # is as old.
    least = VISIBILITY - 2 * (time.monotonic() - began) - SOONER
    assert left.keys() == {lease.message.id for lease in leases}
    assert all(least < seconds <= VISIBILITY + LATER for seconds in left.values()), (least, left)


async def leased(backend: Backend, count: int = 5) -> list[Lease]:
    await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(count)])
    leases = await backend.lease(QUEUE, count, VISIBILITY)
    await backend.reap(QUEUE)
    return leases


@each_jump
@each_scheme
@each_host
async def test_the_first_reap_of_a_new_process_after_a_jump_takes_no_live_lease(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, scheme: str, host: str, jump: float
) -> None:
    worker = open_backend(url_of(server, scheme))
    began = time.monotonic()
    leases = await leased(worker)
    server.advance(jump)
    use_host(monkeypatch, host)
    new = open_backend(url_of(server, scheme))
    assert (await new.reap(QUEUE)).returned == 0
    await check(server, new, leases, began)
    # The next ones see no second jump.
    assert (await worker.reap(QUEUE)).returned + (await new.reap(QUEUE)).returned == 0
    await check(server, new, leases, began)
    assert await worker.settle([Settlement(lease=one, action=SettleAction.ACK) for one in leases]) == []
    await worker.aclose()
    await new.aclose()


@each_jump
@each_scheme
@pytest.mark.parametrize("first", ["extend", "lease"])
async def test_leases_that_are_extended_or_made_after_a_jump_keep_their_time(
    server: RedisServer, scheme: str, first: str, jump: float
) -> None:
    worker = open_backend(url_of(server, scheme))
    began = time.monotonic()
    leases = await leased(worker)
    await worker.publish(QUEUE, [Draft(body=b"later")])
    server.advance(jump)
    if first == "extend":
        assert await asyncio.to_thread(worker.extend, leases[:2], VISIBILITY) == []
    else:
        leases += await worker.lease(QUEUE, 1, VISIBILITY)
        assert len(leases) == 6
    new = open_backend(url_of(server, scheme))
    assert (await new.reap(QUEUE)).returned + (await worker.reap(QUEUE)).returned == 0
    await check(server, new, leases, began)
    await worker.aclose()
    await new.aclose()


@each_scheme
@each_host
async def test_a_worker_that_starts_after_a_pause_takes_the_leases_of_the_dead_one(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, scheme: str, host: str
) -> None:
    clock = MovedClock()
    dead = open_backend(url_of(server, scheme), clock=clock)
    leases = await leased(dead)
    await dead.aclose()
    clock.ahead += 40
    server.advance(40)
    use_host(monkeypatch, host)
    new = open_backend(url_of(server, scheme), clock=clock)
    began = time.monotonic()
    returned = (await new.reap(QUEUE)).returned
    if host == "the same host":
        assert returned == len(leases)
    else:
        # It cannot know that time has passed: they return one visibility timeout later.
        assert returned == 0
        await check(server, new, leases, began)
        clock.ahead += VISIBILITY + LATER
        server.advance(VISIBILITY + LATER)
        assert (await new.reap(QUEUE)).returned == len(leases)
    await new.aclose()


async def test_an_outage_of_all_workers_is_no_jump(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock()
    first = open_backend(server.url, clock=clock)
    leases = await leased(first)
    use_host(monkeypatch, "another host")
    second = open_backend(server.url, clock=clock)
    assert (await second.reap(QUEUE)).returned + (await first.reap(QUEUE)).returned == 0
    clock.ahead += 40
    server.advance(40)
    assert (await second.reap(QUEUE)).returned == len(leases)
    await first.aclose()
    await second.aclose()


async def test_a_reap_that_arrives_late_moves_nothing(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = open_backend(server.url)
    began = time.monotonic()
    leases = await leased(worker)
    boot, microseconds = HostClock.reading(HostClock(MovedClock())).split()
    with monkeypatch.context() as patch:
        patch.setattr(HostClock, "reading", lambda self: f"{boot} {int(microseconds) - 60_000_000}")
        late = open_backend(server.url)
        await late.reap(QUEUE)
    await worker.reap(QUEUE)
    await check(server, worker, leases, began)
    await worker.aclose()
    await late.aclose()
