"""Removed messages leave rows in the list of ready messages: they delay no later message, and hide none."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from redis import Redis

from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, Selection, SettleAction, Settlement, State
from qworker_redis.keys import queue_key
from qworker_redis.rfq.keys import rfq_key
from tests.support.depth import DEPTH
from tests.support.servers import RedisServer, free_port

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0
MANY = 20_000 * DEPTH


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with server.client() as client:
        yield client


def leave_rows(client: Redis, ids: list[str]) -> None:
    """Remove ready messages as releases did that left all of their rows."""
    for first in range(0, len(ids), 1000):
        some = ids[first : first + 1000]
        client.hset(queue_key(QUEUE, "gone"), mapping=dict.fromkeys(some, 1))
        client.hdel(queue_key(QUEUE, "msg"), *some)
    client.hincrby(queue_key(QUEUE, "meta"), "gone", len(ids))


def script_calls(client: Redis) -> int:
    found: int = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    return found


@pytest.mark.parametrize("order", ["first", "last", "random"])
@pytest.mark.parametrize("kept", [0, 50])
async def test_after_many_removals_a_new_message_starts_as_in_an_empty_queue(
    server: RedisServer, client: Redis, order: str, kept: int
) -> None:
    backend = open_backend(server.url)
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(MANY)])
    draw = random.Random(5)
    left = sorted(draw.sample(range(MANY), kept))
    removed = [ids[number] for number in sorted(set(range(MANY)) - set(left), reverse=order == "last")]
    if order == "random":
        draw.shuffle(removed)
    assert await backend.remove(QUEUE, Selection(ids=removed)) == MANY - kept
    client.config_resetstat()
    (new,) = await backend.publish(QUEUE, [Draft(body=b"new")])
    # A worker's first reap takes off the rest.
    await backend.reap(QUEUE)
    leases = await backend.lease(QUEUE, 100, LONG)
    assert [lease.message.id for lease in leases] == [*[ids[number] for number in left], new]
    # The publish, the lease, and as many calls for the rest as the removal has left: it was most of the queue.
    assert script_calls(client) < 3 + MANY / 1000
    assert client.llen(queue_key(QUEUE, "ready")) == client.hlen(queue_key(QUEUE, "gone")) == 0
    assert client.hget(queue_key(QUEUE, "meta"), "gone") in {None, b"0"}
    await backend.aclose()


async def test_a_lease_passes_over_the_rows_of_removed_messages_without_waiting(
    server: RedisServer, client: Redis
) -> None:
    backend = open_backend(server.url)
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(MANY)])
    leave_rows(client, ids)
    (new,) = await backend.publish(QUEUE, [Draft(body=b"new")])
    # One call of the backend: the worker would wait for up to a second between two.
    assert [lease.message.id for lease in await backend.lease(QUEUE, 10, LONG)] == [new]
    await backend.aclose()


async def test_a_lease_that_waits_passes_over_the_rows_of_removed_messages(server: RedisServer, client: Redis) -> None:
    backend = open_backend(server.url)
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(5000)])
    leases = await backend.lease(QUEUE, 5000, LONG)
    assert await backend.lease(QUEUE, 10, LONG) == []
    assert await backend.settle([Settlement(lease=one, action=SettleAction.ACK) for one in leases]) == []
    # The last lease has found nothing, so the next one waits first.
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(5000)])
    leave_rows(client, ids)
    (new,) = await backend.publish(QUEUE, [Draft(body=b"new")])
    assert [lease.message.id for lease in await backend.lease(QUEUE, 10, LONG, 5.0)] == [new]
    await backend.aclose()


@pytest.mark.parametrize("release", ["this", "an older"])
async def test_a_purge_of_ready_messages_does_not_stop_at_rows_of_removed_ones(
    server: RedisServer, client: Redis, release: str
) -> None:
    backend = open_backend(server.url)
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(6000)])
    if release == "this":
        assert await backend.remove(QUEUE, Selection(ids=ids[:2900] + ids[2950:5900])) == 5850
    else:
        leave_rows(client, ids[:2900] + ids[2950:5900])
    assert await backend.remove(QUEUE, Selection(state=State.READY)) == 150
    assert await backend.lease(QUEUE, 10, LONG) == []
    assert (await backend.stats(QUEUE)).ready == 0
    await backend.aclose()


async def test_a_purge_of_a_topic_does_not_stop_at_ids_whose_map_is_gone(server: RedisServer, client: Redis) -> None:
    backend = open_backend(f"rfq://127.0.0.1:{server.port}/0")
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(1600)])
    assert client.unlink(*[rfq_key(QUEUE, "message") + b":" + name.encode() for name in ids[:1500]]) == 1500
    assert client.llen(rfq_key(QUEUE, "backlog")) == 1600
    assert await backend.remove(QUEUE, Selection(state=State.READY)) == 100
    assert client.llen(rfq_key(QUEUE, "backlog")) == 0
    await backend.aclose()


async def test_a_purge_removes_all_messages_although_the_count_of_removed_ones_is_too_high(
    server: RedisServer, client: Redis
) -> None:
    backend = open_backend(server.url)
    await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(5)])
    client.hset(queue_key(QUEUE, "meta"), "gone", 100)
    assert (await backend.stats(QUEUE)).ready == 5
    assert await backend.remove(QUEUE, Selection(state=State.READY)) == 5
    await backend.reap(QUEUE)
    assert (await backend.stats(QUEUE)).ready == 0
    await backend.aclose()


@pytest.mark.parametrize("scheme", ["redis", "rfq"])
@pytest.mark.parametrize("how", ["find", "part"])
async def test_large_messages_are_read_in_several_answers_and_small_ones_in_one(
    server: RedisServer, client: Redis, scheme: str, how: str
) -> None:
    """The server keeps an answer in its memory, and so does the reader."""
    backend = open_backend(f"{scheme}://127.0.0.1:{server.port}/0")
    sizes = {"large": 1 << 20, "small": 10}
    for queue, size in sizes.items():
        drafts = [Draft(body=bytes([number]) * size) for number in range(30)]
        ids = await backend.publish(queue, drafts)
        client.config_resetstat()
        if how == "find":
            found = await backend.find(queue, [*ids, "absent", *ids])
        else:
            (part,) = await backend.parts(queue, State.READY, 1)
            found = [each async for page in backend.browse(queue, Query(State.READY, part=part)) for each in page]
        assert sorted(one.message.body for one in found) == [draft.body for draft in drafts]
        if how == "find":
            assert [one.message.id for one in found] == ids
            assert script_calls(client) == (4 if size > 10 else 1)
        elif scheme == "redis":
            # The first command has 10, because their size is not known then.
            reads = client.info("commandstats")["cmdstat_hmget"]["calls"]
            assert reads > 3 * 3 if size > 10 else reads <= 3 * 3
    await backend.aclose()


async def test_a_count_of_removed_messages_that_is_too_high_hides_no_message(
    server: RedisServer, client: Redis
) -> None:
    backend = open_backend(server.url)
    ids = await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(5)])
    client.hset(queue_key(QUEUE, "meta"), "gone", 100)
    await backend.reap(QUEUE)
    assert [lease.message.id for lease in await backend.lease(QUEUE, 10, LONG)] == ids
    await backend.reap(QUEUE)
    assert client.hget(queue_key(QUEUE, "meta"), "gone") is None
    await backend.aclose()
