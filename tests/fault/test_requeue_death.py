"""A process that requeues many messages is killed at random, and the same call does the rest: exactly the same set."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qworker import Draft
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Query, Selection, SettleAction, Settlement, State
from tests.support.depth import DEPTH
from tests.support.requeue_program import QUEUE, TASK, asking, by_command, by_ticket
from tests.support.servers import RedisServer
from tests.support.waiting import let_pass

# Jobs, each of which is killed until it ends. `make test-soak` has 500 kills.
JOBS = max(1, int(os.environ.get("QWORKER_TEST_KILLS", "2")) * DEPTH // 2)
# Messages of a job, and those that must not be touched.
MESSAGES = 10_000 if JOBS > 20 else 1_200
NEWER = 20
# The kills of a job, before the run that is left alone.
KILLS = 2
SEED = 7

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300 + 60 * JOBS)]


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/spool?sync=off"
    else:
        with RedisServer() as server:
            yield server.url


@pytest.mark.parametrize("requeue", [by_ticket, by_command])
async def test_a_killed_requeue_is_completed_by_the_same_call(url: str, requeue: Callable[..., None]) -> None:
    draw, backend, kills = random.Random(SEED), open_backend(url), 0
    # On a busy machine a job can end before it is killed: then there is another one.
    for job in itertools.count():
        if job >= JOBS <= kills:
            break
        wanted = [f"{job}-{number}" for number in range(MESSAGES)]
        await fail(backend, wanted, TASK)
        ticket = await ask(backend) if requeue is by_ticket else ""
        # The ticket leaves alone what fails after it, and the filter what is another task.
        newer = [f"{job}-newer-{number}" for number in range(NEWER)]
        await fail(backend, newer, TASK if requeue is by_ticket else "other")
        again: set[str] = set()
        for number in range(KILLS):
            enough = draw.randint(number * MESSAGES // KILLS, (number + 1) * MESSAGES // KILLS)
            kills += await run(backend, requeue, url, ticket, kill_at=enough - len(again))
            if requeue is by_ticket:
                # Some run and fail once more. They are newer then, too.
                again |= {*await fail_ready(backend, 10)}
        assert await run(backend, requeue, url, ticket, kill_at=None) == 0
        ready, failed = await ids(backend, State.READY), await ids(backend, State.FAILED)
        assert ready == sorted({*wanted} - again)
        assert failed == sorted([*newer, *again])
        for state in (State.READY, State.FAILED):
            await backend.remove(QUEUE, Selection(state=state))
    await backend.aclose()
    assert kills >= JOBS


async def ask(backend: Backend) -> str:
    """The ticket of all that has failed so far."""
    async with asking(backend) as client:
        while True:
            found = (await client.get(f"/q/{QUEUE}/requeue", params={"task": TASK})).raise_for_status().json()
            if "ticket" in found:
                assert found["count"] == MESSAGES
                return str(found["ticket"])
            await let_pass(0.1)


async def run(backend: Backend, requeue: Callable[..., None], url: str, ticket: str, *, kill_at: int | None) -> bool:
    """Run it, and kill it when so many messages are ready. Return whether it was killed before its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([requeue.__module__])
    process = context.Process(target=requeue, args=(url, ticket))
    process.start()
    while kill_at is not None and process.is_alive() and (await backend.stats(QUEUE)).ready < kill_at:
        await let_pass(0.001)
    if kill_at is not None:
        process.kill()
    process.join()
    status = process.exitcode
    process.close()
    assert status == 0 or (status == -signal.SIGKILL and kill_at is not None)
    return status != 0


async def fail(backend: Backend, names: list[str], task: str) -> None:
    """Failed messages, although others are ready."""
    body = json.dumps({"task": task}).encode()
    for begin in range(0, len(names), 500):
        await backend.publish(QUEUE, [Draft(body=body, id=name) for name in names[begin : begin + 500]])
        await fail_ready(backend, len(names[begin : begin + 500]))


async def fail_ready(backend: Backend, count: int) -> list[str]:
    """Let the messages fail that are ready, up to a number, and return their ids."""
    found: list[str] = []
    while len(found) < count:
        leases = await backend.lease(QUEUE, count - len(found), 600.0)
        if not leases:
            break
        failed = [Settlement(lease=one, action=SettleAction.FAIL_PERM, error="OSError: no") for one in leases]
        assert await backend.settle(failed) == []
        found += [one.message.id for one in leases]
    return found


async def ids(backend: Backend, state: State) -> list[str]:
    return sorted(one.message.id for one in await list_messages(backend, QUEUE, Query(state)))
