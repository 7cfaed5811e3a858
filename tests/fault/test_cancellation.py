"""C14: calls that are cancelled at any moment, on every backend that needs no server."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, State
from tests.fault import harness
from tests.fault.harness import QUEUE

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

CANCELS = 2000


async def _cancelled(call: asyncio.Future, turns: int) -> object:
    """Cancel a call after some turns of the loop; what it gave, when it was quicker."""
    for _ in range(turns):
        if call.done():
            break
        await asyncio.sleep(0)
    call.cancel()
    try:
        return await call
    except asyncio.CancelledError:
        return None


@pytest.mark.parametrize("url", ["memory://cancelled", "file://{root}/spool", "file://{root}/spool?sync=off"])
async def test_2000_cancelled_calls_lose_no_message_and_hold_none(tmp_path: Path, url: str) -> None:
    backend = open_backend(url.format(root=tmp_path))
    await backend.create(QUEUE)
    draw = random.Random(14)
    acked: set[str] = set()
    published: set[str] = set()
    for number in range(CANCELS):
        choice = draw.randrange(4)
        turns = draw.randrange(6)
        if choice == 0:
            name = f"n{number}"
            published.add(name)
            await _cancelled(asyncio.ensure_future(backend.publish(QUEUE, [Draft(body=b"x", id=name)])), turns)
        elif choice == 1:
            await _cancelled(asyncio.ensure_future(backend.wait([QUEUE], 0.01)), turns)
        elif choice == 2:
            call = asyncio.ensure_future(backend.lease(QUEUE, 3, 1000.0, 0.01))
            await _settle_some(backend, await _cancelled(call, turns), turns, acked)
        else:
            call = asyncio.ensure_future(backend.lease(QUEUE, 3, 1000.0))
            await _settle_some(backend, await _cancelled(call, turns), turns, acked)
    stored = {each.message.id for each in await list_messages(backend, QUEUE, Query(State.READY))}
    assert await list_messages(backend, QUEUE, Query(State.LEASED)) == [], "a cancelled call holds a lease"
    assert stored | acked <= published
    certain = f"certain-{len(published)}"
    assert await backend.publish(QUEUE, [Draft(body=b"x", id=certain)]) == [certain]
    assert len(await backend.find(QUEUE, [certain])) == 1
    await backend.aclose()


async def _settle_some(backend: Backend, leases: object, turns: int, acked: set[str]) -> None:
    """Ack leases by a call that is cancelled, and then by one that is not: the first may have happened."""
    if not leases:
        return
    assert isinstance(leases, list)
    settlements = [harness.ack(lease) for lease in leases]
    await _cancelled(asyncio.ensure_future(backend.settle(settlements)), turns)
    await backend.settle(settlements)
    acked.update(lease.message.id for lease in leases)
