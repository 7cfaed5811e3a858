from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cell import Cell, CellOp, CellWatch
from qworker.errors import BackendUnavailable, FormatTooNew
from qworker.message import Draft, Query, Selection, SettleAction, Settlement, State
from qworker.testing.contract import BackendContract
from qworker.testing.contract_browse import in_order
from qworker.testing.harness import Case, Harness
from qworker_redis import browse, reap
from qworker_redis.connection import Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost
from qworker_redis.lease import RedisLeaser
from qworker_redis.wait import WakeListWaiter
from tests.support.servers import PROGRAMS, RedisHarness, RedisServer


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """What is promised is promised on every server that speaks the protocol."""
    with RedisServer(moved_clock=True, program=request.param) as server:
        yield server


class TestRedis(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, server: RedisServer) -> AsyncIterator[Harness]:
        async with RedisHarness(server) as harness:
            yield harness


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_pages_of_the_ready_messages_join_two_orders(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(browse, "FIRST", size)
    monkeypatch.setattr(browse, "_BATCH", size)
    async with RedisHarness(server) as harness:
        case = Case(harness, await harness.open())
        for number in range(12):
            await case.publish(b"%d" % number, priority=5 if number % 3 == 2 else 0)
        released = await case.lease(6)
        assert await case.backend.settle(case.settlements(released, SettleAction.RELEASE)) == []
        await in_order(case, State.READY, [b"%d" % number for number in (2, 5, 8, 11, 0, 1, 3, 4, 6, 7, 9, 10)])
        ids = await case.publish(*[b"%d" % number for number in range(12, 20)])
        assert await case.backend.remove(case.queue, Selection(ids=[ids[0], ids[3], ids[4], ids[7]])) == 4
        left = [b"%d" % number for number in (2, 5, 8, 11, 0, 1, 3, 4, 6, 7, 9, 10, 13, 14, 17, 18)]
        await in_order(case, State.READY, left)
        await case.publish(b"again", id=ids[3])
        await in_order(case, State.READY, [*left, b"again"])
        await case.backend.delete(case.queue)


async def test_losses_of_any_slice_of_the_leases_are_named_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reap, "_BATCH", 3)
    async with RedisHarness(server) as harness:
        case = Case(harness, await harness.open())
        await case.publish(*[b"%d" % number for number in range(10)])
        leases = await case.lease(10)
        gone = [leases[number].message.id for number in (4, 8, 9)]
        assert len(await case.backend.cancel(case.queue, Selection(ids=gone[:2]))) == 2
        assert await case.backend.remove(case.queue, Selection(ids=gone[2:])) == 1
        lost = (await case.backend.reap(case.queue)).lost
        assert [(one.id, one.cancelled) for one in lost] == list(zip(gone, (True, True, False), strict=True))
        assert list((await case.backend.reap(case.queue)).lost) == []
        await case.backend.delete(case.queue)


async def test_a_page_costs_as_little_when_others_have_taken_from_the_front(server: RedisServer) -> None:
    """`LPOS` walks the list: where few were taken meanwhile, it is not needed."""
    async with RedisHarness(server) as harness:
        case = Case(harness, await harness.open())
        ids = await case.publish(*[b"x"] * 3000)
        last = (await case.messages(State.READY, limit=2000))[-1].position
        with server.client() as client:
            client.config_resetstat()
            for taken in (0, 900):
                await case.lease(max(1, taken))
                found = await case.messages(State.READY, after=last, limit=2)
                assert [stored.message.id for stored in found] == ids[2000:2002]
                assert "cmdstat_lpos" not in client.info("commandstats")
            await case.lease(500)
            found = await case.messages(State.READY, after=last, limit=2)
            assert [stored.message.id for stored in found] == ids[2000:2002]
            assert client.info("commandstats")["cmdstat_lpos"]["calls"] == 1
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] < 10
        await case.backend.delete(case.queue)


async def test_what_is_kept_no_longer_leaves_nothing_behind(server: RedisServer) -> None:
    backend, queue = open_backend(server.url + "?keep_done=2-messages&keep_failed=1-messages"), "kept"
    await backend.publish(queue, [Draft(body=b"%d" % n, unique_key=f"k{n}") for n in range(1200)])
    for number, action in enumerate((SettleAction.ACK, SettleAction.FAIL_PERM)):
        leases = await backend.lease(queue, 600, 60.0)
        ends = [Settlement(lease=lease, action=action, error="no" if number else None) for lease in leases]
        assert await backend.settle(ends) == []
    await backend.reap(queue)
    stats = await backend.stats(queue)
    assert (stats.done, stats.failed) == (2, 1)
    with server.client() as client:
        names = [f"{{qworker:{queue}}}:{name}" for name in ("msg", "errors", "keys")]
        assert [client.hlen(name) for name in names] == [3, 1, 0]
    await backend.aclose()


async def test_expired_cells_and_those_of_a_deleted_queue_leave_nothing_behind(server: RedisServer) -> None:
    async with RedisHarness(server) as harness:
        case = Case(harness, await harness.open())
        cells = [
            Cell(f"g{number % 3}", f"{number}", b"x", ttl=None if number % 100 == 0 else 60.0) for number in range(1200)
        ]
        await case.backend.cells(case.queue, [CellOp("put", cell) for cell in cells])
        keys = [f"{{qworker:{case.queue}}}:{name}" for name in ("cells", "cellnames", "celldue")]
        await harness.advance(61.0)
        with server.client() as client:
            assert [client.hlen(keys[0]), client.zcard(keys[1]), client.zcard(keys[2])] == [1200, 1200, 1188]
            await case.backend.reap(case.queue)
            assert [client.hlen(keys[0]), client.zcard(keys[1]), client.zcard(keys[2])] == [12, 12, 0]
            await case.backend.delete(case.queue)
            assert client.exists(*keys) == 0


async def test_a_put_whose_answer_was_lost_is_made_once(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RedisHarness(server) as harness:
        case = Case(harness, await harness.open())
        await case.backend.create(case.queue)
        evaluate, calls = ConnectionPool.evaluate, 0

        async def lose_one(self: ConnectionPool, connection: Connection, name: str, *arguments: Any) -> Any:
            nonlocal calls
            reply = await evaluate(self, connection, name, *arguments)
            calls += name == "cells"
            if name == "cells" and calls == 1:
                raise ConnectionLost("lost", sent=True)
            return reply

        monkeypatch.setattr(ConnectionPool, "evaluate", lose_one)
        put = CellOp("put", Cell("g", "n", b"x"), "")
        (reply,) = await case.backend.cells(case.queue, [put])
        assert (reply.done, calls) == (True, 2)
        (again,) = await case.backend.cells(case.queue, [put])
        assert (again.done, again.cell) == (False, reply.cell)
        await case.backend.delete(case.queue)


async def test_a_wait_for_a_cell_has_one_connection_for_all_calls(server: RedisServer) -> None:
    async with RedisHarness(server) as harness:
        case = Case(harness, await harness.open())
        await case.backend.create(case.queue)
        watches = [CellWatch(case.queue, "g", f"{number}") for number in range(20)]
        waits = [asyncio.create_task(case.backend.wait([], 60.0, [watch])) for watch in watches]
        for wait in waits:
            await case.until_waiting(wait)
        with server.client() as client:
            channels = client.pubsub_channels(f"{{qworker:{case.queue}}}:cell:*")
            assert len(channels) == 20
            assert len([one for one in client.client_list() if one["sub"] != "0"]) == 1
            await case.backend.cells(case.queue, [CellOp("put", Cell("g", f"{number}")) for number in range(20)])
            await asyncio.gather(*waits)
            async with asyncio.timeout(30.0):
                while client.pubsub_channels(f"{{qworker:{case.queue}}}:cell:*"):
                    await case.backend.queues()
        await case.backend.delete(case.queue)


async def test_a_queue_of_a_newer_format_is_refused_in_one_line(server: RedisServer) -> None:
    backend = open_backend(server.url)
    await backend.create("newer")
    with server.client() as client:
        client.hset("{qworker:newer}:meta", "version", "2")
    for call in (backend.lease("newer", 1, 60.0), backend.publish("newer", [Draft(body=b"")]), backend.stats("newer")):
        with pytest.raises(FormatTooNew, match="upgrade"):
            await call
    await backend.aclose()


async def test_a_damaged_message_is_set_aside_and_the_others_flow(server: RedisServer) -> None:
    backend = open_backend(server.url)
    first, second = await backend.publish("damage", [Draft(body=b"1"), Draft(body=b"2")])
    with server.client() as client:
        client.hset("{qworker:damage}:msg", first, b"\x00\x00" + b"\x00" * 8 + b"\x00\x02\xff\xff\xff\xff")
    assert [lease.message.id for lease in await backend.lease("damage", 2, 60.0)] == [second]
    (failed,) = await list_messages(backend, "damage", Query(State.FAILED))
    assert failed.message.id == first
    assert failed.error is not None
    assert "damaged" in failed.error
    await backend.aclose()


async def test_a_cancelled_lease_holds_nothing_while_a_damaged_message_is_moved(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = open_backend(server.url), open_backend(server.url)
    first, second = await backend.publish("damage2", [Draft(body=b"1"), Draft(body=b"2")])
    with server.client() as client:
        client.hset("{qworker:damage2}:msg", first, b"\x00\x00" + b"\x00" * 8 + b"\x00\x02\xff\xff\xff\xff")
    moving = asyncio.Event()

    async def hang(*_: object) -> None:
        moving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(RedisLeaser, "_move_to_failed", hang)
    leasing = asyncio.create_task(backend.lease("damage2", 2, 60.0))
    await moving.wait()
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing
    assert [lease.message.id for lease in await other.lease("damage2", 2, 60.0)] == [second]
    await backend.aclose()
    await other.aclose()


async def test_an_error_of_the_wait_keeps_no_message_of_the_lease_behind_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = open_backend(server.url), open_backend(server.url)
    await backend.create("unblocked")
    block = WakeListWaiter.block

    async def publish_and_fail(self: WakeListWaiter, *arguments: Any) -> Any:
        await other.publish("unblocked", [Draft(body=b"x")])
        _, leased = await block(self, *arguments)
        assert leased
        raise BackendUnavailable("Redis cannot serve now: UNBLOCKED")

    with monkeypatch.context() as patched:
        patched.setattr(WakeListWaiter, "block", publish_and_fail)
        with pytest.raises(BackendUnavailable, match="UNBLOCKED"):
            await backend.lease("unblocked", 1, 60.0, timeout=5.0)
    (lease,) = await other.lease("unblocked", 1, 60.0, timeout=10.0)
    assert (lease.message.body, lease.message.tries) == (b"x", 0)
    await backend.aclose()
    await other.aclose()


async def test_a_remote_lease_that_expired_is_not_found(server: RedisServer) -> None:
    first = open_backend(server.url, remote_leases=True)
    await first.publish("resumed", [Draft(body=b"kept", unique_key="k", fields={"a": "b"}), Draft(body=b"other")])
    held, other = await first.lease("resumed", 2, 60.0)
    await first.aclose()
    second = open_backend(server.url, remote_leases=True)
    assert second.remote_leases is not None
    assert await second.remote_leases.find("resumed", held.message.id, held.token + 1) is None
    assert await second.remote_leases.find("resumed", "unknown", held.token) is None
    assert await second.remote_leases.find("absent", held.message.id, held.token) is None
    found = await second.remote_leases.find("resumed", held.message.id, held.token)
    assert found is not None
    assert (found.message, found.token) == (held.message, held.token)
    assert found.expires_at == pytest.approx(held.expires_at, abs=0.001)
    assert await asyncio.to_thread(second.extend, [found], 90.0) == []
    assert await second.settle([Settlement(lease=found, action=SettleAction.ACK)]) == []
    assert await second.remote_leases.find("resumed", held.message.id, held.token) is None
    # What has expired and was taken by another is lost, however good the token once was.
    server.advance(61.0)
    with server.client() as client:
        # The clock was not set: time has passed.
        client.hdel("{qworker:resumed}:meta", "seen")
    assert (await second.reap("resumed")).returned == 1
    (taken,) = await second.lease("resumed", 1, 60.0)
    assert await second.remote_leases.find("resumed", other.message.id, other.token) is None
    assert taken.token > other.token
    await second.aclose()


async def test_nobody_takes_a_workers_lease_over_with_its_token(server: RedisServer) -> None:
    worker = open_backend(server.url)
    await worker.publish("attached", [Draft(body=b"kept")])
    (held,) = await worker.lease("attached", 1, 60.0)
    server_of_clients = open_backend(server.url, remote_leases=True)
    assert server_of_clients.remote_leases is not None
    assert await server_of_clients.remote_leases.find("attached", held.message.id, held.token) is None
    await server_of_clients.aclose()
    await worker.aclose()


async def test_calls_on_300_queues_at_once_share_16_connections(server: RedisServer) -> None:
    backend = open_backend(server.url)
    await backend.open()
    with server.client() as client:
        opened = client.info("stats")["total_connections_received"]
        calls = [asyncio.create_task(backend.publish(f"q{n}", [Draft(body=b"%d" % n)])) for n in range(300)]
        # A call that is cancelled while it waits for a connection leaves its turn to the next one.
        await asyncio.sleep(0)
        for call in calls[100:200]:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert client.info("stats")["total_connections_received"] - opened <= 16
    assert all(isinstance(ids, list) for ids in (*done[:100], *done[200:]))
    await backend.aclose()
