"""Results while workers are killed: an acked message has its result, and no waiter hangs."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.jobs.records import RESULTS, get_cell
from qworker.message import Query, State
from tests.support.depth import DEPTH
from tests.support.job_app import tasks
from tests.support.servers import RedisServer
from tests.support.waiting import let_pass

# `make test-soak` has 500.
KILLS = int(os.environ.get("QWORKER_TEST_KILLS", "6")) * DEPTH
# Jobs that are enqueued before each kill, and those that have not ended at the most. Workers that die before they have
# done anything end nothing.
JOBS, MOST = 10, 60
# Seconds for the jobs that are left after the last kill, on a busy machine.
PATIENCE = 200.0
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300 + 10 * KILLS)]


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/spool?keep_done=all"
    else:
        with RedisServer() as server:
            yield f"{server.url}?keep_done=all"


def start(url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "qworker", "run", "tests.support.job_app:tasks", "-c", "8"]
    # A Redis learns only by the end of a lease that its worker has died.
    command += ["--visibility-timeout", "5"]
    return subprocess.Popen(command, env={**os.environ, "QWORKER_URL": url}, cwd=ROOT, stderr=subprocess.DEVNULL)


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


async def test_every_message_that_was_acked_has_its_result_although_workers_are_killed(url: str) -> None:
    """Handlers on the loop and in threads. A waiter from the beginning for each fifth job of each kind."""
    tasks._replace_url(url)
    draw = random.Random(7)
    jobs = []
    waiting: dict[int, asyncio.Task[int]] = {}
    checked: set[str] = set()
    workers = [start(url), start(url)]
    try:
        backend = await tasks.backend()
        for kill in range(KILLS):
            for n in range(len(jobs), len(jobs) + JOBS):
                jobs.append(await tasks[("pause_async", "pause_thread")[n % 2]].enqueue(n))
                if n % 10 < 2:
                    waiting[n] = asyncio.create_task(jobs[n].result())
            await let_pass(draw.uniform(0.4, 0.9))
            # In turns, so that each lives long enough to start.
            end(workers[kill % 2])
            checked |= await check_results(backend, checked)
            workers[kill % 2] = start(url)
            while len(jobs) - len(checked) > MOST:
                await let_pass(0.2)
                checked |= await check_results(backend, checked)
        async with asyncio.timeout(PATIENCE):
            for n, job in enumerate(jobs):
                assert await job.result() == n + 1
            for n, one in waiting.items():
                assert await one == n + 1
        # A result is there before its message is acked.
        while len(checked) < len(jobs):
            await let_pass(0.05)
            checked |= await check_results(backend, checked)
    finally:
        for worker in workers:
            end(worker)
        await tasks.aclose()
        tasks._replace_url(None)


async def check_results(backend: Backend, checked: set[str]) -> set[str]:
    """Check that each acked message that was not checked yet has its result, and return their ids."""
    stored = await list_messages(backend, "default", Query(State.DONE))
    acked = sorted({one.message.id for one in stored} - checked)
    replies = await backend.cells("default", [get_cell(RESULTS, one) for one in acked])
    assert [one for one, reply in zip(acked, replies, strict=True) if reply.cell is None] == []
    return set(acked)
