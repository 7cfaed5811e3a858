"""A unique key is held by at most one message, and no death of a process leaves it taken."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, Selection, State
from qworker.testing import wait_until
from qworker.unique import Unique
from tests.fault.harness import ANY_CALL, KILL, MARKS, MOVES, QUEUE, Launcher, ack, fault, strays
from tests.fault.programs import APP_KEY, OTHER
from tests.support.depth import DEEP
from tests.support.pending import pending
from tests.support.servers import RedisServer
from tests.support.waiting import Stalls

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# Some of the steps: together they take minutes.
STEPS = range(1, 2000, 1 if DEEP else 211)


async def check_key(url: str) -> None:
    """At most one message has the key, another one is not stored, and the key is free when that one has ended."""
    backend = open_backend(url)
    draft = Draft(body=b"x", unique_key="k")
    await backend.create(QUEUE)
    found = await pending(backend, QUEUE)
    assert len(found) <= 1
    (holder,) = await backend.publish(QUEUE, [draft])
    after = await pending(backend, QUEUE)
    assert holder in after
    if all(stored.message.unique is None for stored in found.values()):
        assert len(after) == 1
    # Otherwise the key of the first one was free from its lease on.
    assert len(after) <= 1 + len(found)
    await backend.reap(QUEUE)
    assert await backend.settle([ack(lease) for lease in await backend.lease(QUEUE, 10, 60.0)]) == []
    assert await pending(backend, QUEUE) == {}
    (free,) = await backend.publish(QUEUE, [draft])
    assert free != holder
    for state in State:
        await backend.remove(QUEUE, Selection(state=state))
    await backend.aclose()


def test_a_key_is_held_by_one_message_and_free_after_it_if_a_process_dies_at_any_step(
    tmp_path: Path, launcher: Launcher
) -> None:
    statuses: list[int] = []
    for step in STEPS:
        root = tmp_path / str(step)
        url = f"file://{root}/spool?sync=off"
        statuses.append(launcher.run("unique", url, root / "ledger", fault=fault(KILL, step, kinds=ANY_CALL | MARKS)))
        asyncio.run(check_key(url))
        assert strays(root / "spool") == [], step
        if statuses[-1] == 0:
            break
    assert -signal.SIGKILL in statuses
    assert statuses[-1] == 0, f"the program has more than {len(STEPS)} steps: {launcher.errors()}"


def test_a_message_that_waits_is_replaced_or_stays_if_the_publisher_dies_at_any_step(
    tmp_path: Path, launcher: Launcher
) -> None:
    statuses: list[int] = []
    bodies: set[bytes] = set()
    for step in range(1, 40):
        root = tmp_path / str(step)
        url = f"file://{root}/spool?sync=off"
        stored = asyncio.run(publish_old(url))
        statuses.append(launcher.run("replace", url, root / "ledger", fault=fault(KILL, step, kinds=MOVES)))
        bodies.add(asyncio.run(check_replaced(url, stored)))
        assert strays(root / "spool") == [], step
        if statuses[-1] == 0:
            break
    assert set(statuses[:-1]) == {-signal.SIGKILL}
    assert statuses[-1] == 0, launcher.errors()
    assert bodies == {b"old", b"new"}


async def publish_old(url: str) -> str:
    backend = open_backend(url)
    (stored,) = await backend.publish(QUEUE, [Draft(body=b"old", unique_key="k")])
    await backend.aclose()
    return stored


async def check_replaced(url: str, stored: str) -> bytes:
    """One message waits with the key and can be found, replaced and run. Return the body that it had."""
    backend = open_backend(url)
    found = await pending(backend, QUEUE)
    assert list(found) == [stored]
    body = found[stored].message.body
    assert [each.message.body for each in await backend.find(QUEUE, [stored])] == [body]
    assert await backend.publish(QUEUE, [Draft(body=b"x", unique_key="k")]) == [stored]
    assert (await pending(backend, QUEUE))[stored].message.body == body
    last = Draft(body=b"last", unique_key="k", unique=Unique(again="replace"))
    assert await backend.publish(QUEUE, [last]) == [stored]
    leases = await backend.lease(QUEUE, 10, 60.0)
    assert [(lease.message.id, lease.message.body) for lease in leases] == [(stored, b"last")]
    await backend.settle([ack(leases[0])])
    assert await pending(backend, QUEUE) == {}
    (free,) = await backend.publish(QUEUE, [last])
    assert free != stored
    await backend.remove(QUEUE, Selection(ids=[free]))
    await backend.aclose()
    return body


def test_a_key_of_the_app_is_held_by_one_message_of_all_queues_if_the_publisher_dies_at_any_step(
    tmp_path: Path, launcher: Launcher
) -> None:
    outcomes: set[bool] = set()
    status = -1
    for step in range(1, 40, 1 if DEEP else 2):
        root = tmp_path / str(step)
        url = f"file://{root}/spool?sync=off"
        status = launcher.run("app_key", url, root / "ledger", fault=fault(KILL, step, kinds=MOVES))
        outcomes.add(asyncio.run(check_app_key(url)))
        if status == 0:
            break
    assert status == 0, launcher.errors()
    assert outcomes == {False, True}


async def check_app_key(url: str) -> bool:
    """One message of both queues gets the key, and frees it at its end. Return whether that of the program had it."""
    backend = open_backend(url)
    draft = Draft(body=b"y", unique_key="k", unique=APP_KEY)
    await backend.create(OTHER)
    found = [stored.message.id for stored in await list_messages(backend, OTHER, Query(State.READY))]
    (holder,) = await backend.publish(QUEUE, [draft])
    assert found in ([], [holder])
    where = OTHER if found else QUEUE
    assert await backend.publish(OTHER, [draft]) == [holder]
    (lease,) = await backend.lease(where, 10, 60.0)
    await backend.settle([ack(lease)])
    (free,) = await backend.publish(OTHER, [draft])
    assert free != holder
    await backend.aclose()
    return bool(found)


@pytest.mark.parametrize("store", ["file", "redis"])
def test_of_50_publishers_that_are_killed_never_two_are_pending_and_the_key_is_free_within_2_s(
    store: str, tmp_path: Path, launcher: Launcher
) -> None:
    with ExitStack() as stack:
        url = f"file://{tmp_path}/spool?sync=off" if store == "file" else stack.enter_context(RedisServer()).url
        # Otherwise each of the 50 imports it.
        launcher.load(f"qworker_{store}.backend")
        children = [launcher.start("contend", url, tmp_path / "ledger") for _ in range(50)]
        try:
            with Stalls() as stalls:
                asyncio.run(end_while_others_die(url, launcher, children, stalls))
        finally:
            for child in children:
                launcher.kill(child)


async def end_while_others_die(url: str, launcher: Launcher, children: list[int], stalls: Stalls) -> None:
    backend = open_backend(url)
    await backend.create(QUEUE)
    chance = random.Random(7)
    await wait_until(lambda: has_any(backend))
    for _ in range(10):
        (holder,) = await pending(backend, QUEUE)
        leases = await backend.lease(QUEUE, 10, 60.0)
        assert [lease.message.id for lease in leases] == [holder] == list(await pending(backend, QUEUE))
        await backend.settle([ack(leases[0])])
        ended = time.monotonic() - stalls.seconds
        # While they all want the key.
        for _ in range(2):
            launcher.kill(children.pop(chance.randrange(len(children))))
        # Free again: another one stores its message.
        await wait_until(lambda: has_any(backend))
        assert time.monotonic() - stalls.seconds - ended < 2.0
    await backend.aclose()


async def has_any(backend: Backend) -> bool:
    return bool(await pending(backend, QUEUE))
