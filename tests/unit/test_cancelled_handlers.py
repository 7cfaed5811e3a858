"""A handler learns that it must stop, and why; and in advance that its worker stops."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time

import pytest
import structlog

from qworker import CancelReason, Context, State
from qworker.context import Stopping
from qworker.failure_text import CANCELLED, code_of
from qworker.message import Selection
from qworker.testing.wait_until import wait_until
from tests.support.waiting import PATIENCE

MODULE = """
import os, time
from qworker import Context

def hang(path: str) -> None:
    open(path, "w").write(str(os.getpid()))
    time.sleep(60)

def save(ctx: Context, path: str) -> None:
    open(path, "w").write("began")
    assert not ctx.cancelled() and ctx.reason is None
    if ctx.stopping.wait_sync(30):
        open(path, "w").write("saved")
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A module that a child process can import."""
    path = tmp_path / "stopped_functions.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("stopped_functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stopped_functions", module)
    spec.loader.exec_module(module)
    return module


def read(path):
    return path.read_text() if path.exists() else ""


async def cancel(app, *ids):
    return await app.store.cancel("default", Selection(ids=ids), "deploy")


@pytest.mark.parametrize("finder", ["extender", "reaper"])
async def test_an_async_handler_of_a_cancelled_message_is_cancelled_and_knows_why(app, finder, request):
    if finder == "extender":
        # It finds the loss before the reaper.
        request.getfixturevalue("quick_renewals")
    begun, reasons = [], []

    @app.task
    async def work(ctx: Context) -> None:
        begun.append(ctx.message.id)
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append((ctx.message.id, ctx.reason, ctx.cancelled()))

    job, other = await work.enqueue(), await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working(visibility_timeout=60) as (worker, _):
            await wait_until(lambda: len(begun) == 2)
            (found,) = await cancel(app, job.id)
            assert found.state is State.LEASED
            await wait_until(lambda: worker.counts.cancelled == 1)
            assert reasons == [(job.id, CancelReason.CANCELLED, True)]
            assert [message.message_id for message in worker.running_messages()] == [other.id]
    assert reasons[1:] == [(other.id, CancelReason.SHUTDOWN, True)]
    assert (worker.counts.lost, worker.counts.failed) == (0, 0)
    (line,) = [line for line in logs if line["event"] == "message_cancelled"]
    assert (line["message_id"], line["log_level"]) == (job.id, "info")
    assert [line for line in logs if line["event"] == "lease_lost"] == []
    (stored,) = await app.found(State.FAILED)
    assert code_of(stored.error) == CANCELLED
    events = await app.store.history.for_message("default", job.id)
    assert events[-1].kind == "cancelled"


async def test_a_cancel_stops_a_handler_within_about_a_second(app):
    begun = []

    @app.task
    async def work() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    async with app.working(visibility_timeout=600) as (worker, _):
        # The machine may stand still for seconds, but not each time.
        for number in range(1, 6):
            job = await work.enqueue()
            await wait_until(lambda number=number: len(begun) == number)
            cancelled_at = time.monotonic()
            await cancel(app, job.id)
            await wait_until(lambda number=number: worker.counts.cancelled == number, timeout=PATIENCE)
            # A reap follows 0.8 s after another one, and a busy machine needs some time.
            if (took := time.monotonic() - cancelled_at) < 5.0:
                break
    assert took < 5.0


async def test_a_handler_in_a_thread_sees_that_its_message_was_cancelled(app):
    seen = []

    @app.task
    def work(ctx: Context) -> None:
        seen.append(ctx.message.id)
        while not ctx.cancelled():
            ctx.stopping.wait_sync(0.01)
        seen.append(ctx.reason)

    job = await work.enqueue()
    async with app.working() as (worker, _):
        await wait_until(lambda: seen)
        await cancel(app, job.id)
        await wait_until(lambda: worker.counts.cancelled == 1 and len(seen) == 2)
    assert seen == [job.id, CancelReason.CANCELLED]


async def test_the_process_of_a_cancelled_message_is_killed(app, functions, tmp_path):
    task = app.task(process=True)(functions.hang)
    job = await task.enqueue(str(tmp_path / "pid"))
    async with app.working() as (worker, _):
        await wait_until(lambda: read(tmp_path / "pid"), timeout=30.0)
        await cancel(app, job.id)
        await wait_until(lambda: worker.counts.cancelled == 1)
        pid = int(read(tmp_path / "pid"))

        def is_over() -> bool:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            return False

        await wait_until(lambda: is_over() or worker.running_count == 0)


async def test_a_timeout_and_a_lost_lease_are_told_too(app):
    reasons = []

    @app.task(timeout=0.05, max_tries=1)
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(ctx.reason)

    @app.task
    async def removed(ctx: Context) -> None:
        try:
            await app.store.remove("default", Selection(ids=[ctx.message.id]))
            await asyncio.Event().wait()
        finally:
            reasons.append(ctx.reason)

    await slow.enqueue()
    async with app.working() as (worker, _):
        await wait_until(lambda: worker.counts.failed == 1)
        await removed.enqueue()
        await wait_until(lambda: worker.counts.lost == 1)
    assert reasons == [CancelReason.TIMEOUT, CancelReason.LEASE_LOST]


async def test_the_next_delivery_of_a_requeued_message_is_not_stopped(app):
    begun, ended = [], []

    @app.task
    async def work(ctx: Context) -> None:
        begun.append(ctx.token)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append((ctx.token, ctx.reason))

    job = await work.enqueue()
    async with app.working() as (worker, _):
        await wait_until(lambda: begun)
        await cancel(app, job.id)
        assert await app.store.requeue("default", Selection(ids=[job.id])) == 1
        await wait_until(lambda: len(begun) == 2 and ended)
        # Two more reaps, which name nothing.
        reaps = []
        app.store.hook = lambda call: reaps.append(call) if call == "reap" else None
        await wait_until(lambda: len(reaps) >= 2)
        assert [token for token, _ in ended] == [begun[0]]
        assert [message.token for message in worker.running_messages()] == [begun[1]]


async def test_a_message_that_is_cancelled_as_its_handler_ends_is_cancelled_and_not_lost(app):
    @app.task
    async def work(ctx: Context) -> None:
        await cancel(app, ctx.message.id)

    await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working() as (worker, _):
            await wait_until(lambda: worker.counts.cancelled + worker.counts.lost == 1)
    assert (worker.counts.cancelled, worker.counts.acked) == (1, 0)
    assert [line["event"] for line in logs if line["event"] in {"message_cancelled", "lease_lost"}] == [
        "message_cancelled"
    ]


# -- notice in advance -----------------------------------------------------------------------------------------------


async def test_a_handler_hears_that_its_worker_stops_and_can_save_its_state(app):
    begun, saved = [], []

    @app.task
    async def work(ctx: Context) -> None:
        begun.append(ctx.stopping.is_set())
        await ctx.stopping.wait()
        saved.append((ctx.stopping.is_set(), ctx.cancelled()))

    @app.task
    def plain(ctx: Context) -> None:
        begun.append(ctx.stopping.is_set())
        if ctx.stopping.wait_sync(30):
            saved.append((ctx.stopping.is_set(), ctx.cancelled()))

    await work.enqueue()
    await plain.enqueue()
    async with app.working(shutdown_timeout=30) as (worker, running):
        await wait_until(lambda: begun == [False, False])
        worker.drain()
        assert await asyncio.wait_for(running, 20)
    assert saved == [(True, False)] * 2
    assert worker.counts.acked == 2


async def test_a_handler_in_a_process_hears_that_its_worker_stops(app, functions, tmp_path):
    task = app.task(process=True)(functions.save)
    await task.enqueue(str(tmp_path / "state"))
    async with app.working(shutdown_timeout=30) as (worker, running):
        await wait_until(lambda: read(tmp_path / "state") == "began", timeout=30.0)
        worker.drain()
        assert await asyncio.wait_for(running, 20)
    assert read(tmp_path / "state") == "saved"
    assert worker.counts.acked == 1


async def test_the_notice_reaches_every_waiter_on_any_loop() -> None:
    stopping = Stopping()
    assert not stopping.wait_sync(0)
    waiting = asyncio.create_task(stopping.wait())
    other = asyncio.create_task(asyncio.to_thread(asyncio.run, stopping.wait()))
    given_up = asyncio.create_task(stopping.wait())
    await wait_until(lambda: len(stopping._waiting) == 3)
    given_up.cancel()
    stopping.set()
    stopping.set()
    await asyncio.wait_for(asyncio.gather(waiting, other), 20)
    await asyncio.wait_for(stopping.wait(), 1)
    assert stopping.wait_sync(0)
    assert given_up.cancelled() or (await asyncio.wait([given_up]))


def test_a_direct_call_of_a_task_is_never_stopped(app) -> None:
    contexts = []

    @app.task
    def work(ctx: Context) -> None:
        contexts.append((ctx.reason, ctx.cancelled(), ctx.stopping.is_set()))

    work()
    assert contexts == [(None, False, False)]
