"""Calls on Redis that are cancelled at any moment: no later call gets an answer of theirs, and nothing is left held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from tests.fault.loops import both_loops
from tests.support.depth import DEPTH
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import let_pass

pytestmark = pytest.mark.fault

CANCELS = 2000
LONG = 1000.0
# Connections that a backend at rest may keep, after up to six calls at once.
MOST_CONNECTIONS = 12
FIXED = {f"fixed-{n}": n for n in (1, 2, 3)}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


class Calls:
    """Calls of the contract, each of which checks its answer.

    The queues of `FIXED` never change, so each answer about one of them is known. Messages of `live` come and go.
    """

    def __init__(self, backend: Backend, draw: random.Random) -> None:
        self._backend = backend
        self._draw = draw
        self._ids: dict[str, str] = {}
        self._held: list[Lease] = []
        self.asked: set[str] = set()
        self.confirmed: set[str] = set()
        self.acked: set[str] = set()
        self.perhaps_acked: set[str] = set()
        # What a call has leased, until its settlement has returned.
        self.unsettled: dict[str, Lease] = {}

    async def prepare(self) -> None:
        for name, count in FIXED.items():
            bodies = [f"{name}/{number}" for number in range(count + 1)]
            ids = await self._backend.publish(name, [Draft(body=body.encode()) for body in bodies])
            (lease,) = await self._backend.lease(name, 1, LONG)
            failure = Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=name)
            assert await self._backend.settle([failure]) == []
            self._ids |= dict(zip(bodies, ids, strict=True))
        for name in ("live", "empty", "switched"):
            await self._backend.create(name)
        await self._backend.publish("held", [Draft(body=b"held/0"), Draft(body=b"held/1")])
        self._held = await self._backend.lease("held", 2, LONG)

    def all(self) -> list[Callable[[], Awaitable[None]]]:
        """Every call, the frequent ones more than once."""
        often = [self.publish, self.publish, self.publish, self.work, self.work, self.work_patiently]
        looks = [self.stats, self.find, self.browse, self.browse_backwards, self.queues, self.parts]
        changes = [self.requeue, self.remove, self.reap, self.create, self.delete, self.pause, self.resume]
        return [*often, *looks, *changes, self.extend, self.lease_from_nothing, self.wait, self.logs]

    def _fixed(self) -> tuple[str, int]:
        return self._draw.choice(list(FIXED.items()))

    # -- looking -----------------------------------------------------------------------------------------------------

    async def stats(self) -> None:
        name, count = self._fixed()
        stats = await self._backend.stats(name)
        assert (stats.queue, stats.ready, stats.failed, stats.leased) == (name, count, 1, 0)

    async def find(self) -> None:
        body, message_id = self._draw.choice(list(self._ids.items()))
        (stored,) = await self._backend.find(body.partition("/")[0], [message_id, "absent"])
        assert (stored.message.id, stored.message.body) == (message_id, body.encode())

    async def browse(self) -> None:
        name, count = self._fixed()
        stored = await list_messages(self._backend, name, Query(State.READY))
        assert [each.message.body.decode() for each in stored] == [f"{name}/{n + 1}" for n in range(count)]

    async def browse_backwards(self) -> None:
        name, count = self._fixed()
        (last,) = await list_messages(self._backend, name, Query(State.READY, newest=True, limit=1))
        (failed,) = await list_messages(self._backend, name, Query(State.FAILED))
        assert (last.message.body.decode(), failed.error) == (f"{name}/{count}", name)

    async def queues(self) -> None:
        assert await self._backend.queues() == sorted([*FIXED, "held", "live", "empty", "switched"])

    async def parts(self) -> None:
        name, count = self._fixed()
        parts = await self._backend.parts(name, State.READY, 2)
        found = [
            each.message.body.decode()
            for part in parts
            for each in await list_messages(self._backend, name, Query(State.READY, part=part))
        ]
        assert sorted(found) == [f"{name}/{n + 1}" for n in range(count)]

    async def logs(self) -> None:
        assert isinstance(await self._backend.history.logs(), list)

    # -- changing what is not there, or not again --------------------------------------------------------------------

    async def requeue(self) -> None:
        name, _ = self._fixed()
        assert await self._backend.requeue(name, Selection(ids=[self._ids[f"{name}/1"]])) == 0
        assert await self._backend.requeue("live", Selection(state=State.FAILED)) >= 0

    async def remove(self) -> None:
        name, _ = self._fixed()
        other = self._ids["fixed-1/1" if name != "fixed-1" else "fixed-2/1"]
        assert await self._backend.remove(name, Selection(ids=[other])) == 0

    async def reap(self) -> None:
        assert (await self._backend.reap(self._draw.choice(list(FIXED)))).returned == 0

    async def create(self) -> None:
        assert await self._backend.create(self._fixed()[0]) is None

    async def delete(self) -> None:
        assert await self._backend.delete("absent") is None

    async def pause(self) -> None:
        assert await self._backend.pause("switched") is None

    async def resume(self) -> None:
        assert await self._backend.resume("switched") is None

    # -- working -----------------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        body = f"live/{len(self.asked)}"
        self.asked.add(body)
        (message_id,) = await self._backend.publish("live", [Draft(body=body.encode())])
        assert message_id not in self._ids.values()
        self.confirmed.add(body)

    async def work(self) -> None:
        await self._settle(await self._backend.lease("live", 2, LONG))

    async def work_patiently(self) -> None:
        await self._settle(await self._backend.lease("live", 2, LONG, 0.05))

    async def _settle(self, leases: list[Lease]) -> None:
        bodies = [lease.message.body.decode() for lease in leases]
        assert set(bodies) <= self.asked
        self.unsettled |= dict(zip(bodies, leases, strict=True))
        action = self._draw.choice([*SettleAction, SettleAction.ACK])
        if action is SettleAction.ACK:
            self.perhaps_acked.update(bodies)
        assert await self._backend.settle([Settlement(lease=lease, action=action) for lease in leases]) == []
        if action is SettleAction.ACK:
            self.acked.update(bodies)
        for body, lease in zip(bodies, leases, strict=True):
            # Another call may have leased a message that was released, before the answer to its release was read.
            if self.unsettled.get(body) is lease:
                del self.unsettled[body]

    async def extend(self) -> None:
        assert await asyncio.to_thread(self._backend.extend, self._held, LONG) == []

    async def lease_from_nothing(self) -> None:
        assert await self._backend.lease("empty", 2, LONG, self._draw.choice([0.0, 0.02])) == []

    async def wait(self) -> None:
        assert await self._backend.wait(["empty", self._fixed()[0]], 0.02) is None


async def cancel_some(calls: Calls, draw: random.Random) -> int:
    """Start some calls at once, cancel some of them, check the others, and return how many were cancelled."""
    running = [asyncio.ensure_future(call()) for call in draw.choices(calls.all(), k=draw.randrange(1, 7))]
    for _ in range(draw.randrange(12)):
        await asyncio.sleep(0)
    if draw.random() < 0.5:
        await let_pass(draw.random() * 0.002)
    cancelled = sum(task.cancel() for task in draw.sample(running, draw.randrange(1, len(running) + 1)))
    await asyncio.wait(running)
    for task in running:
        if not task.cancelled():
            task.result()
    return cancelled


@both_loops
@pytest.mark.parametrize("scheme", ["redis", "rfq"])
async def test_2000_cancels_over_every_call_mix_no_answers_up_and_hold_no_connection(
    server: RedisServer, scheme: str
) -> None:
    draw = random.Random(8)
    backend = open_backend(f"{scheme}://127.0.0.1:{server.port}/0")
    calls = Calls(backend, draw)
    await calls.prepare()
    cancels = 0
    while cancels < CANCELS * DEPTH:
        cancels += await cancel_some(calls, draw)
    for call in calls.all():
        await call()
    with server.client() as client:
        # One of them is the one that asks.
        await wait_until(lambda: len(client.client_list(_type="normal")) <= MOST_CONNECTIONS + 1)

        left = list(calls.unsettled.values())
        await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in left])

        async def none_is_leased() -> bool:
            return (await backend.stats("live")).leased == 0

        await wait_until(none_is_leased, what="what a cancelled call has leased is released")
        stored = {
            each.message.body.decode() for state in State for each in await list_messages(backend, "live", Query(state))
        }
        assert stored <= calls.asked
        assert calls.acked & stored == set()
        assert calls.confirmed - stored - calls.perhaps_acked == set()
        await backend.aclose()
        await wait_until(lambda: len(client.client_list(_type="normal")) == 1)
