"""`explain` says why a message is not running, from every state that it can be in."""

from __future__ import annotations

import itertools

import pytest

from qworker import Draft, Tasks
from qworker.kit.retention import KEEP_ALL
from qworker.message import Selection, SettleAction, Settlement, State
from qworker.testing import FakeClock
from qworker.tools.explain import Explanation, explain
from qworker_memory import MemoryBackend

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
    found = await explain(backend, QUEUE, "2400", clock=clock)
    assert codes(found) == ["ready"]
    assert found.reasons[0].text == "it is ready. There are 2,400 messages ahead of it."
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
