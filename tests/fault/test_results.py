"""Results while workers are killed: an acked message has its result, and no waiter hangs."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.cell import Cell, CellOp
from qworker.message import Query, State
from tests.support.depth import DEPTH
from tests.support.job_app import tasks
from tests.support.waiting import let_pass

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
KILLS = 20 * DEPTH
JOBS = 400 * DEPTH


def start(url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "qworker", "run", "tests.support.job_app:tasks", "-c", "8"]
    return subprocess.Popen(command, env={**os.environ, "QWORKER_URL": url}, cwd=ROOT, stderr=subprocess.DEVNULL)


async def test_every_message_that_was_acked_has_its_result_although_workers_are_killed(tmp_path: Path) -> None:
    """Handlers of every kind. A waiter from the beginning, so that it waits through all kills."""
    url = f"file://{tmp_path}/spool?keep_done=all"
    tasks._replace_url(url)
    draw = random.Random(7)
    names = ("pause_async", "pause_thread")
    jobs = [await tasks[names[n % 2]].enqueue(n) for n in range(JOBS)]
    waiting = [asyncio.create_task(job.result(timeout=400)) for job in jobs[:50]]
    workers = [start(url), start(url)]
    try:
        for _ in range(KILLS):
            await let_pass(draw.uniform(0.8, 1.6))
            victim = draw.randrange(2)
            workers[victim].kill()
            workers[victim].wait()
            backend = await tasks.backend()
            acked = sorted(await done(backend))
            replies = await backend.cells("default", [CellOp("get", Cell("results", one)) for one in acked])
            assert all(reply.done for reply in replies)
            workers[victim] = start(url)
        assert [await one for one in waiting] == [n + 1 for n in range(50)]
        for n, job in enumerate(jobs):
            assert await job.result(timeout=100) == n + 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        await tasks.aclose()
        tasks._replace_url(None)


async def done(backend: Backend) -> set[str]:
    return {one.message.id for one in await list_messages(backend, "default", Query(State.DONE))}
