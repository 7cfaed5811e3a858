"""Jobs of handlers in processes, parents that wait for children of each kind, and twins after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker import Tasks
from qworker.errors import JobCancelled
from tests.support.job_app import tasks as job_app
from tests.support.waiting import PATIENCE, let_pass
from tests.unit.test_jobs import wait_reason, waits_are_noted_at_once, working

__all__ = ["waits_are_noted_at_once"]

ROOT = Path(__file__).parents[2]
KINDS = ("async", "thread", "process")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Tasks]:
    job_app._replace_url(f"file://{tmp_path}/spool?sync=off")
    yield job_app
    job_app._replace_url(None)


@pytest.mark.parametrize("parent", KINDS)
@pytest.mark.parametrize("child", KINDS)
async def test_a_parent_of_any_kind_waits_for_a_child_of_any_kind_in_a_worker_with_one_consumer(app, parent, child):
    async with working(app, concurrency=1):
        job = await app[f"parent_{parent}"].enqueue(f"add_{child}", 4)
        assert await job.result(timeout=40) == 5
    await app.aclose()


@pytest.mark.usefixtures("waits_are_noted_at_once")
async def test_explain_names_the_job_that_a_process_waits_for(app):
    async with working(app, concurrency=1):
        job = await app["parent_process"].enqueue("sleep_process", 1)
        while not (text := await wait_reason(app, job)).endswith(" s)"):
            await let_pass(0.02)
        assert " in queue default (running for " in text
    await app.aclose()


async def test_the_progress_of_a_process_reaches_its_followers(app):
    async with working(app, concurrency=1):
        job = await app["walk_process"].enqueue()
        found = [progress async for progress in job.progress()]
        pid = await job.result(timeout=40)
    assert [progress.done for progress in found] == [1, 2, 3]
    assert {progress.data["pid"] for progress in found} == {pid}
    assert pid != os.getpid()
    await app.aclose()


async def test_a_process_whose_job_is_cancelled_is_killed(app):
    async with working(app, concurrency=1):
        job = await app["sleep_process"].enqueue()
        while (await job.status()).state != "leased":
            await let_pass(0.02)
        assert await job.cancel() == "running"
        with pytest.raises(JobCancelled):
            await job.result(timeout=PATIENCE)
        # Its consumer is free for the next message, long before the process would have ended.
        assert await (await app["add_async"].enqueue(1)).result(timeout=PATIENCE) == 2
    await app.aclose()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("parent", ["parent_async", "suspect_parent"])
@pytest.mark.parametrize("child", ["add_async", "suspect_child"])
def test_a_parent_and_a_child_on_their_last_attempts_do_not_block_each_other(app, parent, child):
    """The first attempt of a suspect kills its worker, which is started again. The second one is isolated."""
    command = [sys.executable, "-m", "qworker", "run", "tests.support.job_app:tasks", "-c", "1"]
    job = app[parent].enqueue_sync(child, 4)
    # Up to five processes start one after the other.
    end = time.monotonic() + 2 * PATIENCE
    starts = 0
    worker: subprocess.Popen[bytes] | None = None
    try:
        while True:
            assert time.monotonic() < end
            if worker is None or worker.poll() is not None:
                starts += 1
                worker = subprocess.Popen(command, env={**os.environ, "QWORKER_URL": app.url}, cwd=ROOT)
            try:
                assert job.result_sync(timeout=0.5) == 5
                break
            except TimeoutError:
                pass
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait(PATIENCE)
    assert starts == 1 + ("suspect" in parent) + ("suspect" in child)


def test_a_twin_works_after_a_fork_although_another_thread_held_the_lock(app):
    from qworker.enqueue import portal

    first = app["add_async"].enqueue_sync(1)
    assert first.status_sync().state == "ready"
    with portal._background.lock:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                again = app["add_async"].job(first.id)
                code = 0 if again.status_sync().state == "ready" and again.cancel_sync() == "waiting" else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert first.status_sync().code == "cancelled"
