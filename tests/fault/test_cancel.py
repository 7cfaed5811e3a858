"""A cancel next to everything else: deaths at each step, and holders that end or extend their leases at the moment."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.failure_text import CANCELLED, code_of
from qworker.message import Draft, Query, Selection, SettleAction, Settlement, State, StoredMessage
from tests.fault.harness import KILL, Books, Launcher, fault, kill, start
from tests.support.depth import DEPTH, WITH_SYNC
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import PATIENCE, let_pass, wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

QUEUE = "work"
STEPS = range(1, 60 * DEPTH)
WAITING = {State.READY, State.DELAYED, State.LEASED}


async def everything(url: str) -> list[StoredMessage]:
    backend = open_backend(url)
    try:
        if QUEUE not in await backend.queues():
            return []
        return [one for state in State for one in await list_messages(backend, QUEUE, Query(state))]
    finally:
        await backend.aclose()


def cancelled_of(stored: list[StoredMessage]) -> set[str]:
    return {
        one.message.body.decode() for one in stored if one.state is State.FAILED and code_of(one.error) == CANCELLED
    }


@pytest.mark.parametrize("sync", WITH_SYNC)
def test_a_canceller_that_dies_at_any_step_loses_nothing_and_its_repetition_cancels_all(
    tmp_path: Path, launcher: Launcher, sync: str
) -> None:
    statuses = []
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync={sync}", root / "ledger"
        assert launcher.run("publish", url, ledger, 5, 5) == 0, launcher.errors()
        statuses.append(launcher.run("cancel", url, ledger, fault=fault(KILL, step)))
        books = Books(ledger)
        stored = asyncio.run(everything(url))
        assert sorted(one.message.body.decode() for one in stored) == sorted(books.attempted), step
        assert set(books.read("cancelled")) <= cancelled_of(stored), step
        assert all(code_of(one.error) == CANCELLED for one in stored if one.state is State.FAILED), step
        assert launcher.run("cancel", url, ledger) == 0, launcher.errors()
        assert cancelled_of(asyncio.run(everything(url))) == books.attempted, step
        names = sorted(path.name for path in (root / "spool" / QUEUE / "fail").iterdir())
        assert [name for name in names if not name.startswith(".")] == [
            name[1 : -len(".reason")] for name in names if name.startswith(".")
        ], step
        if statuses[-1] == 0:
            break
    assert -signal.SIGKILL in statuses
    assert statuses[-1] == 0, f"a canceller has more than {len(STEPS)} steps: {launcher.errors()}"


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/spool?sync=off"
        return
    with RedisServer(port=free_port()) as server:
        yield server.url


def test_a_message_is_acked_by_a_process_or_cancelled_by_another_and_never_both(url: str, tmp_path: Path) -> None:
    """1,000 messages, ten at a time, which two processes lease and ack while this one cancels them."""
    ledger = tmp_path / "ledger"
    books = Books(ledger)
    workers = [start("ack", url, ledger) for _ in range(2)]
    cancelled: set[str] = set()
    published: set[str] = set()
    try:
        asyncio.run(_warm_up(url, published))
        wait_for(lambda: set(books.read("settled")) == published, "the workers")
        asyncio.run(_race(url, books, cancelled, published))
        wait_for(lambda: len(set(books.read("settled")) | cancelled) == len(published), "every message")
    finally:
        for worker in workers:
            kill(worker)
    settled = books.read("settled")
    assert len(settled) == len(set(settled))
    assert set(settled) & cancelled == set()
    assert min(len(settled), len(cancelled)) > 20, "one of them was always faster"
    assert cancelled_of(asyncio.run(everything(url))) == cancelled


async def _warm_up(url: str, published: set[str]) -> None:
    """Publish what shows that a worker has started."""
    backend = open_backend(url)
    published.update(await backend.publish(QUEUE, [Draft(body=b"first", id="first")]))
    await backend.aclose()


async def _race(url: str, books: Books, cancelled: set[str], published: set[str]) -> None:
    """At least 1,000 messages, and more while one of both has had hardly any: on a busy machine it may not have run."""
    backend = open_backend(url)
    draw, deadline = random.Random(7), time.monotonic() + PATIENCE
    for first in itertools.count(0, 10):
        if first >= 1000 and (min(len(books.read("settled")), len(cancelled)) > 20 or time.monotonic() > deadline):
            break
        names = [f"m-{number}" for number in range(first, first + 10)]
        published.update(names)
        await backend.publish(QUEUE, [Draft(body=name.encode(), id=name) for name in names])
        draw.shuffle(names)
        await let_pass(draw.choice((0, 0.001, 0.003, 0.01)))
        for at in range(0, 10, 5):
            found = await backend.cancel(QUEUE, Selection(ids=names[at : at + 5]), "race")
            cancelled.update(one.id for one in found if one.state in WAITING)
    await backend.aclose()


def test_a_holder_that_extends_and_ends_in_any_way_is_refused_or_wins(url: str) -> None:
    """1,000 rounds of one thread that leases, extends and settles, and another one that cancels."""
    asyncio.run(_publish_all(url))
    ends: dict[str, list[SettleAction]] = {}
    cancelled: dict[str, State] = {}
    done = threading.Event()
    threads = [
        threading.Thread(target=lambda: asyncio.run(_hold(url, ends, done))),
        threading.Thread(target=lambda: asyncio.run(_cancel_all(url, cancelled, done))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    stored = {one.message.id: one for one in asyncio.run(everything(url))}
    last = {name: actions[-1] for name, actions in ends.items()}
    for number in range(1000):
        name = f"m-{number}"
        if name in cancelled:
            assert last.get(name) not in {SettleAction.ACK, SettleAction.FAIL_PERM}, name
            assert stored[name].state is State.FAILED, name
            assert code_of(stored[name].error) == CANCELLED, name
        else:
            assert last.get(name) in {SettleAction.ACK, SettleAction.FAIL_PERM}, name
            assert (name in stored) is (last[name] is SettleAction.FAIL_PERM), name
    assert {State.LEASED, State.READY} <= set(cancelled.values())
    assert len(cancelled) < 1000


async def _publish_all(url: str) -> None:
    backend = open_backend(url)
    drafts = [Draft(body=b"x", id=f"m-{number}") for number in range(1000)]
    await backend.publish(QUEUE, drafts)
    await backend.aclose()


async def _hold(url: str, ends: dict[str, list[SettleAction]], done: threading.Event) -> None:
    backend = open_backend(url)
    draw = random.Random(11)
    while True:
        leases = await backend.lease(QUEUE, 3, 60.0)
        if not leases and done.is_set():
            break
        for _ in range(draw.randrange(3)):
            backend.extend(leases, 60.0)
        lost = {(one.id, one.token) for one in (await backend.reap(QUEUE)).lost if one.cancelled}
        for lease in leases:
            # Whatever comes back ends for good the next time.
            final = lease.message.id in ends or draw.random() < 0.7
            ways = (
                (SettleAction.ACK, SettleAction.FAIL_PERM) if final else (SettleAction.FAIL_TMP, SettleAction.RELEASE)
            )
            settlement = Settlement(lease=lease, action=draw.choice(ways), error="broken")
            if not await backend.settle([settlement]):
                assert (lease.message.id, lease.token) not in lost, "a cancelled lease was settled"
                ends.setdefault(lease.message.id, []).append(settlement.action)
    await backend.aclose()


async def _cancel_all(url: str, cancelled: dict[str, State], done: threading.Event) -> None:
    backend = open_backend(url)
    draw = random.Random(13)
    # The holder leases the oldest first: this thread stays near it.
    names = [f"m-{number}" for number in range(1000)]
    for first in range(0, 1000, 20):
        some = names[first : first + 20]
        draw.shuffle(some)
        for name in some[:12]:
            for one in await backend.cancel(QUEUE, Selection(ids=[name]), "race"):
                if one.state in WAITING:
                    cancelled[name] = one.state
            if draw.random() < 0.3:
                await let_pass(0.002)
    done.set()
    await backend.aclose()
