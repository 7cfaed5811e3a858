"""`explain` says why a message is not running, from every state that it can be in."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import pytest
import pytest_asyncio

from qworker import Draft, Tasks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.kit.retention import KEEP_ALL
from qworker.message import Selection, SettleAction, Settlement, State
from qworker.testing import FakeClock
from qworker.tools.explain import Explanation, explain
from qworker_memory import MemoryBackend
from tests.support.servers import RedisServer

QUEUE = "jobs"
_names = itertools.count()

tasks = Tasks("memory:")


@tasks.task(queue=QUEUE)
def add(a: int) -> None:
    """Something to call."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def backend(clock: FakeClock) -> MemoryBackend:
    return MemoryBackend(f"explain-{next(_names)}", clock=clock, keep_done=KEEP_ALL)


def codes(found: Explanation) -> list[str]:
    return [reason.code for reason in found.reasons]


async def test_waiting_tells_behind_how_many_and_that_nobody_works(backend: MemoryBackend, clock: FakeClock) -> None:
    await backend.publish(QUEUE, [Draft(body=b"", id=str(n)) for n in range(2500)])
    for number, ahead in ((1, "is 1 message"), (1000, "are 1,000 messages"), (1001, "are more than 1,000 messages")):
        found = await explain(backend, QUEUE, str(number), clock=clock)
        assert codes(found) == ["ready"]
        assert found.reasons[0].text == f"it is ready. There {ahead} ahead of it."
    clock.advance(60)
    assert codes(await explain(backend, QUEUE, "0", clock=clock)) == ["ready", "no-worker"]


async def test_each_state_has_its_reason(backend: MemoryBackend, clock: FakeClock) -> None:
    async def now() -> list[str]:
        return codes(await explain(backend, QUEUE, "m", clock=clock))

    await backend.publish(QUEUE, [Draft(body=b"", id="m", delay=10)])
    assert await now() == ["delayed"]
    await backend.pause(QUEUE)
    assert await now() == ["paused", "delayed"]
    await backend.resume(QUEUE)
    clock.advance(11)
    [lease] = await backend.lease(QUEUE, 1, 30)
    assert await now() == ["leased"]
    clock.advance(31)
    assert await now() == ["expired"]
    await backend.reap(QUEUE)
    assert await now() == ["ready", "no-worker", "suspect"]
    [lease] = await backend.lease(QUEUE, 1, 30)
    error = "Traceback (most recent call last):\n  File\nValueError: no\nmore"
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, delay=5, error=error)])
    found = await explain(backend, QUEUE, "m", clock=clock)
    assert codes(found) == ["retrying"]
    assert "failed 2 times" in found.reasons[0].text
    assert found.reasons[0].text.endswith("ValueError: no")
    assert found.error == error
    clock.advance(6)
    [lease] = await backend.lease(QUEUE, 1, 30)
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="worn out")])
    found = await explain(backend, QUEUE, "m", clock=clock)
    assert codes(found) == ["failed"]
    assert "worn out" in found.reasons[0].text
    await backend.requeue(QUEUE, Selection(state=State.FAILED))
    [lease] = await backend.lease(QUEUE, 1, 30)
    await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)])
    assert await now() == ["done"]
    assert codes(await explain(backend, QUEUE, "other", clock=clock)) == ["not-found"]


@pytest.mark.parametrize(
    ("queue", "body", "code"),
    [
        (QUEUE, b'{"task": "add", "args": [1]}', None),
        (QUEUE, b'{"task": "add", "args": ["x"]}', "bad-arguments"),
        (QUEUE, b'{"task": "subtract"}', "unknown-task"),
        (QUEUE, b'{"task": "add", "args": 7}', "invalid-envelope"),
        (QUEUE, b"hello", "no-handler"),
        ("elsewhere", b'{"task": "add", "args": [1]}', "wrong-queue"),
    ],
)
async def test_with_the_app_it_says_whether_the_message_can_run(
    backend: MemoryBackend, clock: FakeClock, queue: str, body: bytes, code: str | None
) -> None:
    await backend.publish(queue, [Draft(body=body, id="m")])
    found = await explain(backend, queue, "m", tasks, clock=clock)
    assert codes(found) == ["ready", *([code] if code else [])]


# -- holds, and long queues --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def never_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real clock: a test that stands still for seconds does not look as if there were no worker."""
    monkeypatch.setattr("qworker.tools.explain._ABANDONED_S", 3600.0)


@pytest_asyncio.fixture(params=["memory", "file", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, never_abandoned: None) -> AsyncIterator[Backend]:
    urls = {"memory": f"memory://explain-{next(_names)}", "file": f"file://{tmp_path}/root?sync=off"}
    url = urls.get(request.param) or request.getfixturevalue("server").url
    backend = open_backend(url)
    await backend.open()
    yield backend
    await backend.delete(QUEUE)
    await backend.aclose()


def holds(found: Explanation) -> list[str]:
    return [reason.text for reason in found.reasons if reason.code == "held"]


async def test_a_hold_is_explained_while_the_message_is_stored_and_when_it_is_gone(store: Backend) -> None:
    await store.publish(QUEUE, [Draft(body=b"", id="order-17", hold=86400.0), Draft(body=b"", id="other")])
    found = await explain(store, QUEUE, "order-17")
    assert codes(found)[0] == "ready"
    (text,) = holds(found)
    assert text.startswith("its id is held until 20")
    assert text.endswith("Z: another message with it is not stored before, also when the message is gone")
    assert holds(await explain(store, QUEUE, "other")) == []
    leases = await store.lease(QUEUE, 2, 60)
    assert len(holds(await explain(store, QUEUE, "order-17"))) == 1
    await store.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    found = await explain(store, QUEUE, "order-17")
    assert found.state is None
    assert codes(found) == ["not-found", "held"]
    assert holds(found) == [text.removesuffix(", also when the message is gone")]
    assert codes(await explain(store, QUEUE, "other")) == ["not-found"]


@pytest.mark.parametrize("how", ["ids", "state"])
@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_a_message_that_is_removed_before_its_first_lease_keeps_no_hold(
    store: Backend, how: str, delay: float
) -> None:
    draft = Draft(body=b"", id="order-17", hold=86400.0, delay=delay)
    await store.publish(QUEUE, [draft])
    state = State.DELAYED if delay else State.READY
    chosen = Selection(ids=["order-17"]) if how == "ids" else Selection(state=state)
    assert await store.remove(QUEUE, chosen) == 1
    assert codes(await explain(store, QUEUE, "order-17")) == ["not-found"]
    await store.publish(QUEUE, [draft])
    assert codes(await explain(store, QUEUE, "order-17")) == ["delayed" if delay else "ready", "held"]


async def test_a_cancelled_message_says_when_and_by_whom(store: Backend) -> None:
    (message_id,) = await store.publish(QUEUE, [Draft(body=b"x")])
    await store.cancel(QUEUE, Selection(ids=[message_id]), "deploy")
    found = await explain(store, QUEUE, message_id)
    assert codes(found) == ["cancelled"]
    text = found.reasons[0].text
    assert re.match(r"it was cancelled at \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ by deploy; `qworker requeue`", text), text


async def test_a_message_that_may_kill_workers_says_how_it_is_requeued(store: Backend) -> None:
    (message_id,) = await store.publish(QUEUE, [Draft(body=b"x")])
    (lease,) = await store.lease(QUEUE, 1, 30)
    await store.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="code: poison\nit died")])
    (reason,) = (await explain(store, QUEUE, message_id)).reasons
    assert reason.text.endswith(": it died; it may kill workers, so `qworker requeue` needs its id or --code poison")


async def test_a_message_that_is_removed_after_a_failed_attempt_keeps_its_hold(store: Backend) -> None:
    await store.publish(QUEUE, [Draft(body=b"", id="order-17", hold=86400.0)])
    [lease] = await store.lease(QUEUE, 1, 60)
    await store.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, delay=60)])
    assert await store.remove(QUEUE, Selection(ids=["order-17"])) == 1
    assert codes(await explain(store, QUEUE, "order-17")) == ["not-found", "held"]


@pytest.mark.usefixtures("never_abandoned")
@pytest.mark.parametrize("delay", [0.0, 3600.0])
async def test_in_a_long_directory_only_its_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    backend = open_backend(f"file://{tmp_path}/root?sync=off")
    await backend.open()
    await backend.publish(QUEUE, [Draft(body=b"", delay=delay)] * 3000)
    await backend.publish(QUEUE, [Draft(body=b"", id="last", delay=delay)])
    read: list[str] = []
    scandir = os.scandir

    class Entries:
        """The entries of a directory. It records their names."""

        def __init__(self, where: int) -> None:
            self._entries = scandir(where)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *exception: object) -> None:
            self._entries.close()

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            for entry in self._entries:
                read.append(entry.name)
                yield entry

    monkeypatch.setattr(os, "scandir", Entries)
    found = await explain(backend, QUEUE, "last")
    assert codes(found) == ["delayed" if delay else "ready"]
    assert delay or found.reasons[0].text.endswith(
        "More than 1,000 messages wait in this queue, so those ahead of it are not counted."
    )
    assert codes(await explain(backend, QUEUE, "absent")) == ["not-found"]
    assert 0 < len(read) < 2500
    await backend.aclose()
