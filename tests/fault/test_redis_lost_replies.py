"""Lost replies, lost and half requests, resets and black holes: what was asked for happens once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from tests.fault.loops import both_loops
from tests.support.depth import DEPTH
from tests.support.proxy import Fate, LossyProxy, random_fates
from tests.support.servers import RedisServer, free_port

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0
PUBLISHES = 500
SETTLEMENTS = 200
# The share of what passes, in either direction, that goes wrong.
SHARE = 0.1
ACTIONS = list(SettleAction)

each_protocol = pytest.mark.parametrize("scheme", ["redis", "rfq"])
each_seed = pytest.mark.parametrize("seed", range(2 * DEPTH))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(str(server.socket)) as proxy:
        yield proxy


async def states(server: RedisServer, scheme: str) -> dict[State, list[tuple[str, int]]]:
    """Return the ids of all stored messages with their tries, by state, as a calm network shows them."""
    backend = open_backend(f"{scheme}://127.0.0.1:{server.port}/0")
    found = {state: await list_messages(backend, QUEUE, Query(state)) for state in State}
    await backend.aclose()
    return {state: [(each.message.id, each.message.tries) for each in stored] for state, stored in found.items()}


def through(proxy: LossyProxy, scheme: str) -> Backend:
    return open_backend(f"{scheme}://127.0.0.1:{proxy.port}/0?timeout=0.2&retry_timeout=100")


def check_faults(proxy: LossyProxy) -> None:
    """Check that the network was as bad as it was meant to be."""
    assert all(proxy.fates[fate] > 0 for fate in Fate), proxy.fates
    assert sum(proxy.fates.values()) - proxy.fates[Fate.PASS] > 20, proxy.fates


@both_loops
@each_protocol
@each_seed
async def test_500_publishes_store_500_messages_whatever_the_network_does(
    server: RedisServer, proxy: LossyProxy, scheme: str, seed: int
) -> None:
    backend = through(proxy, scheme)
    proxy.fate = random_fates(seed, SHARE)

    async def publish(first: int) -> list[str]:
        numbers = range(first, PUBLISHES, 5)
        return [(await backend.publish(QUEUE, [Draft(body=b"%d" % number)]))[0] for number in numbers]

    ids = [i for some in await asyncio.gather(*map(publish, range(5))) for i in some]
    await backend.aclose()
    check_faults(proxy)
    found = await states(server, scheme)
    assert len(set(ids)) == PUBLISHES
    assert sorted(found.pop(State.READY)) == sorted((i, 0) for i in ids)
    assert not any(found.values())


@both_loops
@each_protocol
@each_seed
async def test_every_settlement_counts_once_whatever_the_network_does(
    server: RedisServer, proxy: LossyProxy, scheme: str, seed: int
) -> None:
    backend = through(proxy, scheme)
    await backend.publish(QUEUE, [Draft(body=b"%d" % number) for number in range(SETTLEMENTS)])
    leases = await backend.lease(QUEUE, SETTLEMENTS, LONG)
    assert len(leases) == SETTLEMENTS
    proxy.fate = random_fates(seed, SHARE)

    async def settle(leases: list[Lease]) -> None:
        for number, lease in enumerate(leases):
            action = ACTIONS[number % len(ACTIONS)]
            assert await backend.settle([Settlement(lease=lease, action=action, error="error")]) == []

    await asyncio.gather(*[settle(leases[first::5]) for first in range(5)])
    await backend.aclose()
    check_faults(proxy)
    ended = {action: set[str]() for action in ACTIONS}
    for first in range(5):
        for number, lease in enumerate(leases[first::5]):
            ended[ACTIONS[number % len(ACTIONS)]].add(lease.message.id)
    found = await states(server, scheme)
    retried = {(i, 1) for i in ended[SettleAction.FAIL_TMP]}
    assert set(found[State.READY]) == retried | {(i, 0) for i in ended[SettleAction.RELEASE]}
    assert {i for i, _ in found[State.FAILED]} == ended[SettleAction.FAIL_PERM]
    assert not found[State.LEASED] + found[State.DELAYED] + found[State.DONE]
