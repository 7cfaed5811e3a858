"""Outcomes reach the store in batches, through outages, and never beside an extension of the same lease."""

import asyncio
import errno
import os
import threading

import pytest
import structlog

from qworker import Context, Fail, State
from qworker.errors import BackendUnavailable
from qworker.failure_text import summary
from qworker.kit.settle import SettledInPart
from qworker.message import Selection, SettleAction
from qworker.testing.wait_until import wait_until


async def test_the_outcomes_of_one_turn_are_one_batch(app):
    @app.task
    async def work() -> None: ...

    calls = []
    app.store.hook = calls.append
    await app.enqueue_many(work.call() for _ in range(100))
    worker = await app.burst(concurrency=100)
    assert worker.counts.acked == 100
    # A slow machine may cut the turn short; a settlement per message would be 100.
    assert calls.count("settle") <= 50


async def test_settlements_wait_out_an_outage(app):
    @app.task
    async def work() -> None: ...

    failures = []
    app.store.hook = lambda call: failures.append(call) if call in app.store.broken else None
    app.store.broken = {"settle"}
    await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working(visibility_timeout=60) as (worker, _):
            await wait_until(lambda: len(failures) >= 3)
            assert worker.counts.acked == 0
            app.store.broken = set()
            await wait_until(lambda: worker.counts.acked == 1)
    told = [line["event"] for line in logs if line.get("loop") == "settler"]
    assert told == ["backend_unavailable", "backend_recovered"]


async def test_after_an_outage_batches_are_soon_as_large_as_before(app, monkeypatch):
    monkeypatch.setattr("qworker.worker.outage._LONGEST_PAUSE", 0.001)

    @app.task
    async def work() -> None: ...

    failures, calls = [], []
    app.store.hook = lambda call: (failures if call in app.store.broken else calls).append(call)
    app.store.broken = {"settle"}
    await app.enqueue_many(work.call() for _ in range(64))
    async with app.working(visibility_timeout=60, concurrency=64) as (worker, _):
        # By then every batch is a single settlement.
        await wait_until(lambda: len(failures) >= 200)
        app.store.broken = set()
        await wait_until(lambda: worker.counts.acked == 64)
    assert calls.count("settle") <= 16


async def test_what_cannot_be_settled_before_its_lease_expires_is_given_up_loudly(app):
    @app.task(max_tries=1000)
    async def work() -> None: ...

    app.store.broken = {"settle", "extend"}
    await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working(visibility_timeout=0.3) as (worker, _):
            # A lease can also be lost before its handler has an outcome.
            await wait_until(lambda: any(line["event"] == "settlement_abandoned" for line in logs))
            await wait_until(lambda: worker.counts.lost >= 1)
            app.store.broken = set()
            # The store makes it ready again, and it runs to its end.
            await wait_until(lambda: worker.counts.acked == 1)
    assert {line["log_level"] for line in logs if line["event"] == "settlement_abandoned"} == {"error"}


def refuse(store, monkeypatch, number: int, *hows: SettleAction) -> None:
    """Let the store of a test refuse batches with a settlement of these kinds."""
    settle = store.settle

    async def refusing(settlements):
        if any(settlement.action in hows for settlement in settlements):
            raise BackendUnavailable("cannot settle") from OSError(number, os.strerror(number))
        return await settle(settlements)

    monkeypatch.setattr(store, "settle", refusing)


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EFBIG])
async def test_an_outcome_that_the_store_can_never_take_fails_its_message_and_holds_up_no_other(
    app, monkeypatch, number
):
    @app.task
    async def bad() -> None:
        raise ValueError("no luck")

    @app.task
    async def beside() -> None: ...

    refuse(app.store, monkeypatch, number, SettleAction.FAIL_TMP)
    await app.enqueue_many(task.call() for task in (bad, *[beside] * 20, bad))
    worker = await app.burst()
    assert (worker.counts.acked, worker.counts.failed) == (20, 2)
    for failed in await app.found(State.FAILED):
        assert summary(failed.error) == "its outcome (fail_tmp) cannot be stored: cannot settle"
        assert "ValueError: no luck" in failed.error


async def test_a_message_that_the_store_can_end_in_no_way_is_given_up_loudly(app, monkeypatch):
    @app.task
    async def bad() -> None:
        raise ValueError("no luck")

    refuse(app.store, monkeypatch, errno.ENAMETOOLONG, SettleAction.FAIL_TMP, SettleAction.FAIL_PERM)
    await bad.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working() as (worker, _):
            await wait_until(lambda: worker.counts.lost == 1)
    assert [line["log_level"] for line in logs if line["event"] == "settlement_abandoned"] == ["error"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
async def test_one_settlement_that_the_store_does_not_take_now_holds_up_no_other(app, monkeypatch, number):
    @app.task
    async def bad() -> None:
        raise Fail("never")

    @app.task
    async def beside() -> None: ...

    refuse(app.store, monkeypatch, number, SettleAction.FAIL_PERM)
    await app.enqueue_many(task.call() for task in (bad, *[beside] * 20))
    async with app.working() as (worker, _):
        await wait_until(lambda: worker.counts.acked == 20)
        monkeypatch.undo()
        await wait_until(lambda: worker.counts.failed == 1)


async def test_a_stale_holder_can_settle_nothing_and_says_so(app):
    @app.task
    async def work(ctx: Context) -> None:
        await app.store.remove("default", Selection(ids=[ctx.message.id]))

    await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        worker = await app.burst()
    assert (worker.counts.lost, worker.counts.acked) == (1, 0)
    assert [line["task"] for line in logs if line["event"] == "lease_lost"] == ["work"]


@pytest.mark.usefixtures("quick_renewals")
async def test_extending_and_settling_one_lease_never_overlap_and_others_settle_meanwhile(app):
    extending, go = threading.Event(), threading.Event()
    order = []

    def hook(call):
        if call == "extend" and not extending.is_set():
            order.append("extend")
            extending.set()
            assert go.wait(30)
            order.append("extended")
        if call == "settle":
            order.append("settle")

    @app.task
    async def slow() -> None:
        await wait_until(extending.is_set)

    @app.task
    async def quick() -> None: ...

    app.store.hook = hook
    await slow.enqueue()
    try:
        async with app.working(visibility_timeout=60) as (worker, _):
            await wait_until(extending.is_set)
            await quick.enqueue()
            await wait_until(lambda: worker.counts.acked == 1)
            assert order == ["extend", "settle"]
            go.set()
            await wait_until(lambda: worker.counts.acked == 2)
    finally:
        go.set()
    assert order == ["extend", "settle", "extended", "settle"]
    assert len(await app.found(State.DONE)) == 2


async def test_a_drain_waits_for_the_last_settlement(app):
    @app.task
    async def work() -> None:
        done.set()

    done = asyncio.Event()
    settles = []
    app.store.hook = lambda call: settles.append(call) if call == "settle" else None
    app.store.broken = {"settle"}
    await work.enqueue()
    async with app.working() as (worker, running):
        await done.wait()
        worker.drain()
        tried = len(settles)
        await wait_until(lambda: len(settles) >= tried + 2)
        assert not running.done()
        app.store.broken = set()
        assert await running
    assert worker.counts.acked == 1


async def test_a_settlement_that_cannot_be_stored_is_tried_again_alone_while_the_others_end_once(app, monkeypatch):
    settle, batches, tries = app.store.settle, [], []

    async def in_part(settlements):
        bad = [one for one in settlements if b'"bad"' in one.lease.message.body]
        others = [one for one in settlements if one not in bad]
        batches.append([one.lease.message.id for one in others])
        refused = await settle(others) if others else []
        if bad and len(tries) < 5:
            tries.append(bad)
            error = OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            raise BackendUnavailable("cannot settle") from (SettledInPart(error, bad, refused) if others else error)
        return refused + await settle(bad)

    monkeypatch.setattr(app.store, "settle", in_part)

    @app.task
    async def bad() -> None: ...

    @app.task
    async def beside() -> None: ...

    await app.enqueue_many([bad.call(), *[beside.call() for _ in range(50)]])
    with structlog.testing.capture_logs() as logs:
        worker = await app.burst(concurrency=60)
    assert (worker.counts.acked, worker.counts.lost, len(tries)) == (51, 0, 5)
    settled = [message for batch in batches for message in batch]
    assert len(settled) == len(set(settled)) == 50
    assert [line["event"] for line in logs].count("settlement_delayed") == 1
