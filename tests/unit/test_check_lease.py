"""`Context.check_lease`: a handler learns that its lease is lost before its worker has cancelled it."""

from __future__ import annotations

import time

import pytest

from qworker import Context, LeaseLost, State
from qworker.message import Lease, Message
from qworker.testing import wait_until
from qworker.worker.delivery import Delivery
from tests.support.waiting import block_for

MODULE = """
from qworker import Context

def work(ctx: Context, path: str) -> None:
    ctx.check_lease()
    ctx.check_lease()
    open(path, "w").write("held")
"""


def until_it_is_lost(ctx: Context) -> None:
    """Block the thread as a suspended process does."""
    ctx.check_lease()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ctx.check_lease()
        block_for(0.01)


async def test_an_async_handler_that_has_blocked_the_loop_hears_that_its_lease_has_expired(app):
    heard = []

    @app.task
    async def work(ctx: Context) -> None:
        with pytest.raises(LeaseLost, match=f"the lease of message {ctx.message.id} is lost"):
            until_it_is_lost(ctx)
        heard.append(ctx.message.id)

    app.store.broken = {"extend"}
    job = await work.enqueue()
    async with app.working(visibility_timeout=0.6):
        await wait_until(lambda: heard)
    assert heard[0] == job.id


async def test_a_handler_in_a_thread_hears_that_its_lease_has_expired(app):
    heard = []

    @app.task
    def work(ctx: Context) -> None:
        try:
            until_it_is_lost(ctx)
        except LeaseLost as error:
            heard.append(error)
            raise

    app.store.broken = {"extend"}
    await work.enqueue()
    async with app.working(visibility_timeout=0.6):
        await wait_until(lambda: heard)


async def test_a_thread_that_outlives_the_timeout_of_its_message_hears_that_its_delivery_is_over(app):
    heard = []

    @app.task(timeout=0.05, max_tries=1)
    def work(ctx: Context) -> None:
        try:
            until_it_is_lost(ctx)
        except LeaseLost:
            heard.append(ctx.token)

    await work.enqueue()
    await app.burst()
    await wait_until(lambda: heard)
    (failed,) = await app.found(State.FAILED)
    assert failed.error == "code: timeout\ntimed out after 0.05 seconds"


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "lease_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import lease_functions

    return lease_functions


async def test_a_handler_in_a_process_asks_its_worker(app, functions, tmp_path, monkeypatch):
    work = app.task(process=True, max_tries=1)(functions.work)
    await work.enqueue(str(tmp_path / "out"))
    assert (await app.burst()).counts.acked == 1
    assert (tmp_path / "out").read_text() == "held"

    monkeypatch.setattr(Delivery, "is_lost", lambda _run, _now: True)
    await work.enqueue(str(tmp_path / "never"))
    assert (await app.burst()).counts.failed == 1
    (failed,) = await app.found(State.FAILED)
    assert "LeaseLost: the lease of message" in failed.error
    assert not (tmp_path / "never").exists()


async def test_a_lease_that_is_held_and_a_direct_call_pass(app):
    @app.task
    async def work(ctx: Context) -> int:
        ctx.check_lease()
        return ctx.attempt

    await work.enqueue()
    assert (await app.burst()).counts.acked == 1
    assert await work() == 1
    lease = Lease(message=Message(id="a", queue="q", body=b""), token=0, expires_at=0.0)
    Context(lease=lease, task="work").check_lease()
