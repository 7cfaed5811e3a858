"""The history in Redis: capped, and nothing that a worker waits for."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import structlog

from qworker import Tasks
from qworker.backend.registry import open_backend
from qworker.history.batch import EventBatch
from qworker.testing import FakeClock
from qworker.testing.contract_history import read_all
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions
from tests.support.servers import RedisServer

QUEUE = "jobs"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def batch(number: int, text: str = "") -> EventBatch:
    return EventBatch(kind="acked", queue=QUEUE, worker="w", at=float(number), id=[f"m{number}"], error=text or None)


async def test_a_stream_keeps_about_the_size_that_the_url_says(server: RedisServer) -> None:
    backend = open_backend(server.url + "?keep_history=1M")
    await backend.create(QUEUE)
    for number in range(3000):
        backend.history.append([batch(number, "x" * 2000)])
        if number % 500 == 499:
            await wait_until(lambda: backend.history._sending is None)
    await wait_until(lambda: backend.history._sending is None)
    found = await read_all(backend, QUEUE)
    assert found[-1].at == 2999.0
    # Redis trims by whole nodes.
    assert 400 < len(found) < 900
    await backend.delete(QUEUE)
    assert await read_all(backend, QUEUE) == []
    with server.client() as client:
        assert client.keys("*history*") == []
    await backend.aclose()


async def test_the_end_of_a_stream_is_found_by_its_last_entry(server: RedisServer) -> None:
    backend = open_backend(server.url)
    await backend.create(QUEUE)
    assert await backend.history.last_position(QUEUE) is None
    for number in range(100):
        backend.history.append([batch(number)])
    await wait_until(lambda: backend.history._sending is None)
    _, end = await backend.history.read(QUEUE, None, 1000)
    with server.client() as client:
        before = client.info("commandstats")["cmdstat_xrange"]["calls"]
        assert await backend.history.last_position(QUEUE) == end
        assert client.info("commandstats")["cmdstat_xrange"]["calls"] == before
    await backend.delete(QUEUE)
    await backend.aclose()


async def test_a_full_redis_is_told_once_and_costs_no_message(server: RedisServer) -> None:
    tasks = Tasks(server.url)

    @tasks.task(queue=QUEUE)
    async def work() -> None: ...

    await tasks.enqueue_many(work.call() for _ in range(1000))
    with server.client() as client:
        client.config_set("maxmemory", "100kb")
    worker = Worker(tasks, WorkerOptions(burst=True))
    try:
        with structlog.testing.capture_logs() as logs:
            assert await worker.run()
    finally:
        with server.client() as client:
            client.config_set("maxmemory", "0")
    assert worker.counts.acked == 1000
    assert [line["event"] for line in logs].count("history_paused") == 1
    await tasks.aclose()


async def test_events_are_kept_while_the_server_is_away_and_a_store_that_refused_is_tried_again(
    server: RedisServer,
) -> None:
    clock = FakeClock()
    backend = open_backend(server.url, clock=clock)
    await backend.create(QUEUE)
    # There is no connection yet, or no longer.
    other = open_backend(server.url, clock=clock)
    other.history.append([batch(1)])
    assert await read_all(backend, QUEUE) == []
    await other.open()
    other.history.append([batch(2)])
    assert [event.at for event in await wait_until(lambda: read_all(backend, QUEUE))] == [1.0, 2.0]
    with server.client() as client:
        client.delete(f"{{qworker:{QUEUE}}}:history")
        client.set(f"{{qworker:{QUEUE}}}:history", "in the way")
        with structlog.testing.capture_logs() as logs:
            other.history.append([batch(3)])
            await wait_until(lambda: other.history._sending is None)
            other.history.append([batch(4)])
            client.delete(f"{{qworker:{QUEUE}}}:history")
            clock.advance(31)
            other.history.append([batch(5)])
            await wait_until(lambda: other.history._sending is None)
    assert [line["event"] for line in logs] == ["history_paused", "history_resumed"]
    assert [event.at for event in await read_all(backend, QUEUE)] == [5.0]
    await other.aclose()
    await backend.aclose()


async def test_events_that_could_not_be_sent_to_a_server_that_has_just_gone_are_stored_when_it_is_back() -> None:
    with RedisServer() as server:
        backend = open_backend(server.url)
        await backend.create(QUEUE)
        (lender,) = backend._pool._lenders.values()
        connections = tuple(lender._idle)

        async def are_lost() -> bool:
            return not any([await connection.is_usable() for connection in connections])

        server.stop(signal.SIGKILL)
        await wait_until(are_lost)
        backend.history.append([batch(1)])
        await wait_until(lambda: backend.history._sending is None)
        server.start()
        # It keeps nothing on disk.
        await backend.create(QUEUE)
        backend.history.append([batch(2)])
        assert [event.at for event in await wait_until(lambda: read_all(backend, QUEUE))] == [1.0, 2.0]
        await backend.aclose()
