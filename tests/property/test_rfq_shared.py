"""Workers of qworker and foreign consumers on one topic: each message is in one place until it is finished."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from redis import Redis

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from tests.support.depth import DEPTH
from tests.support.servers import RedisServer, free_port

TOPIC = "shared"
BACKLOG, NEXTLOG = f"rfq:{TOPIC}:backlog", f"rfq:{TOPIC}:nextlog"
VISIBILITY = 60.0
STEPS = 80


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), stopped_clock=True) as server:
        yield server


class Shared:
    """Two workers and a foreign consumer, and what each of them holds."""

    def __init__(self, server: RedisServer, client: Redis, seed: int) -> None:
        url = f"rfq://127.0.0.1:{server.port}/0"
        self.server, self.client, self.draw = server, client, random.Random(seed)
        self.workers: list[Backend] = [open_backend(url), open_backend(url)]
        self.held: list[tuple[Backend, Lease]] = []
        self.foreign: list[bytes] = []
        self.published: set[str] = set()
        self.finished: set[str] = set()
        self.steps = [
            *[self.publish] * 3,
            *[self.publish_foreign] * 2,
            *[self.lease] * 5,
            *[self.settle] * 6,
            *[self.consume] * 4,
            *[self.commit] * 4,
            *[self.advance] * 2,
            self.reap,
            self.extend,
            self.harvest,
            self.harvest_as_printed,
            self.requeue,
        ]

    # -- qworker -----------------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        delay = self.draw.choice([0.0, 0.0, 0.0, 40.0])
        drafts = [Draft(body=b"x", delay=delay) for _ in range(self.draw.randrange(1, 4))]
        self.published.update(await self.draw.choice(self.workers).publish(TOPIC, drafts))

    async def lease(self) -> None:
        worker = self.draw.choice(self.workers)
        leases = await worker.lease(TOPIC, self.draw.randrange(1, 4), VISIBILITY)
        self.held += [(worker, lease) for lease in leases]

    async def settle(self) -> None:
        if not self.held:
            return
        worker, lease = self.held.pop(self.draw.randrange(len(self.held)))
        how = self.draw.choice(list(SettleAction))
        delay = self.draw.choice([0.0, 30.0]) if how in {SettleAction.FAIL_TMP, SettleAction.RELEASE} else 0.0
        refused = await worker.settle([Settlement(lease=lease, action=how, delay=delay, error="no")])
        if how is SettleAction.ACK and not refused:
            self.finished.add(lease.message.id)

    async def extend(self) -> None:
        for worker in self.workers:
            ours = [lease for by, lease in self.held if by is worker]
            lost = await asyncio.to_thread(worker.extend, ours, VISIBILITY) if ours else []
            self.held = [(by, lease) for by, lease in self.held if lease not in lost]

    async def reap(self) -> None:
        await self.draw.choice(self.workers).reap(TOPIC)

    async def requeue(self) -> None:
        await self.workers[0].requeue(TOPIC, Selection(state=State.FAILED))

    async def advance(self) -> None:
        self.server.advance(self.draw.choice([7.0, 35.0, 70.0]))

    # -- a foreign consumer, with rfq's own commands -----------------------------------------------------------------

    async def publish_foreign(self) -> None:
        name = f"{self.draw.getrandbits(128):032x}"
        with self.client.pipeline() as pipe:
            pipe.hset(f"rfq:{TOPIC}:message:{name}", mapping={"k": "v"})
            (pipe.rpush if self.draw.random() < 0.3 else pipe.lpush)(BACKLOG, name)
            pipe.execute()
        self.published.add(name)

    async def consume(self) -> None:
        name = self.client.rpoplpush(BACKLOG, NEXTLOG)
        if name is not None:
            self.foreign.append(name)

    async def commit(self) -> None:
        if not self.foreign:
            return
        name = self.foreign.pop(self.draw.randrange(len(self.foreign)))
        with self.client.pipeline() as pipe:
            pipe.lrem(NEXTLOG, 1, name)
            pipe.lrem(BACKLOG, 1, name)
            pipe.delete(f"rfq:{TOPIC}:message:{name.decode()}")
            pipe.execute()
        self.finished.add(name.decode())

    async def harvest(self) -> None:
        seen: set[bytes] = set()
        while (name := self.client.rpoplpush(NEXTLOG, BACKLOG)) is not None and name not in seen:
            seen.add(name)

    async def harvest_as_printed(self) -> None:
        for name in self.client.lrange(NEXTLOG, 0, -1):
            self.client.lpush(BACKLOG, name)
            self.client.lrem(NEXTLOG, 1, name)

    # -- what holds --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        own = f"rfq:{TOPIC}:qworker:"
        lists = [*self.client.lrange(BACKLOG, 0, -1), *self.client.lrange(NEXTLOG, 0, -1)]
        sets = [*self.client.zrange(own + "delayed", 0, -1), *self.client.zrange(own + "failed", 0, -1)]
        places = Counter(name.decode() for name in (*lists, *sets))
        stored = {key.decode().rpartition(":")[2] for key in self.client.keys(f"rfq:{TOPIC}:message:*")}
        assert self.published - self.finished <= stored, "lost"
        for name in stored:
            assert places[name] == 1, f"{name} is in {places[name]} places"
        for name in lists:
            assert name.decode() in stored, "a foreign consumer would get an empty map"
        claims = {name.decode() for name in self.client.hkeys(own + "claims")}
        assert claims == {name.decode() for name in self.client.zrange(own + "leased", 0, -1)}

    async def run(self) -> None:
        await self.workers[0].create(TOPIC)
        for _ in range(STEPS):
            await self.draw.choice(self.steps)()
            self.check()
        await self.drain()

    async def drain(self) -> None:
        """In the end workers alone get everything that is left."""
        await self.harvest()
        worker = self.workers[0]
        for _ in range(6):
            self.server.advance(100.0)
            await worker.reap(TOPIC)
            await worker.requeue(TOPIC, Selection(state=State.FAILED))
            while leases := await worker.lease(TOPIC, 50, VISIBILITY):
                assert await worker.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
                self.finished.update(lease.message.id for lease in leases)
        assert self.published - self.finished == set(), "stuck"
        for state in State:
            assert await list_messages(worker, TOPIC, Query(state)) == []

    async def aclose(self) -> None:
        for worker in self.workers:
            await worker.aclose()


@pytest.mark.parametrize("seed", range(12 * DEPTH))
async def test_each_message_is_in_one_place_until_it_is_finished(server: RedisServer, seed: int) -> None:
    with server.client() as client:
        client.flushall()
        shared = Shared(server, client, seed)
        try:
            await shared.run()
        finally:
            await shared.aclose()
