"""A worker's life: what it leases, how it ends, and what it survives."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
import structlog

from qworker import Backoff, Context, Retry, State
from qworker.errors import BackendUnavailable, PermissionDenied, UsageError
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions
from tests.support.waiting import work_for

NOW = Backoff(initial=0.0)


def held_task(app, **options):
    """A task whose runs wait until they are let go, and what they saw."""
    gate = asyncio.Event()
    begun = []

    @app.task(name="held", **options)
    async def held(x: int = 0) -> None:
        begun.append(x)
        await gate.wait()

    return held, gate, begun


async def test_absent_queues_are_created(app):
    @app.task(queue="new")
    async def work() -> None: ...

    await app.burst()
    assert await app.store.queues() == ["new"]


def test_options_that_cannot_work_are_refused(app):
    with pytest.raises(UsageError, match="there is nothing to run"):
        Worker(app)
    for wrong in ({"concurrency": 0}, {"visibility_timeout": 0}, {"max_messages": 0}, {"queues": ("../x",)}):
        with pytest.raises(UsageError):
            WorkerOptions(**wrong)


async def test_no_more_messages_are_leased_than_consumers_are_free(app):
    held, gate, begun = held_task(app)
    for i in range(10):
        await held.enqueue(i)
    async with app.working(concurrency=3) as (worker, _):
        await wait_until(lambda: len(begun) == 3)
        stats = await app.store.stats("default")
        assert (stats.leased, stats.ready) == (3, 7)
        assert [m.task for m in worker.running_messages()] == ["held"] * 3
        assert worker.running_messages()[0].lease_remaining > 0
        gate.set()
        await wait_until(lambda: worker.counts.acked == 10)
    assert begun == list(range(10))


async def test_the_next_messages_run_while_the_store_commits_and_never_more_than_a_second_set(app):
    begun = []

    @app.task
    async def work(x: int) -> None:
        begun.append(x)

    for i in range(10):
        await work.enqueue(i)
    app.store.commits.clear()
    async with app.working(concurrency=3) as (worker, _):
        await wait_until(lambda: len(begun) == 6)
        for _ in range(100):
            # Turns in which a seventh could be leased.
            await asyncio.sleep(0)
        assert (len(begun), worker.counts.acked) == (6, 0)
        app.store.commits.set()
        await wait_until(lambda: worker.counts.acked == 10)
    assert begun == list(range(10))


async def test_every_queue_gets_its_share(app):
    order = []
    for name in ("a", "b", "c"):

        @app.task(name=name, queue=name)
        async def work(ctx: Context) -> None:
            order.append(ctx.message.queue)

        await app.enqueue_many(work.call() for _ in range(30))
    await app.burst(concurrency=3)
    # Each of the first rounds took one from each queue.
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert {order[:30].count(name) for name in "abc"} == {10}


# -- bursts ------------------------------------------------------------------------------------------------------------


async def test_a_burst_runs_a_retry_that_is_due_now_and_leaves_what_is_due_later(app):
    @app.task(retry=NOW)
    async def work(ctx: Context) -> None:
        if ctx.tries < 2:
            raise Retry

    @app.task
    async def later() -> None:
        raise AssertionError("not run")

    await work.enqueue()
    await later.using(delay=3600).enqueue()
    worker = await app.burst()
    assert worker.counts.acked == 1
    assert len(await app.found(State.DELAYED)) == 1


async def test_a_burst_waits_for_what_another_worker_holds(app):
    @app.task
    async def work() -> None:
        seen.append(1)

    seen = []
    await work.enqueue()
    (lease,) = await app.store.lease("default", 1, 0.3)
    await app.burst()
    assert seen == [1]
    assert lease.token == 1


async def test_a_burst_is_not_held_by_a_paused_queue(app):
    @app.task
    async def work() -> None:
        raise AssertionError("not run")

    await work.enqueue()
    await app.store.pause("default")
    await app.burst()
    assert (await app.store.stats("default")).ready == 1


async def test_max_messages_drains_after_so_many(app):
    @app.task
    async def work() -> None:
        seen.append(1)

    seen = []
    await app.enqueue_many(work.call() for _ in range(10))
    worker = Worker(app, WorkerOptions(max_messages=4, concurrency=3))
    async with asyncio.timeout(40):
        assert await worker.run()
    assert (len(seen), worker.counts.acked) == (4, 4)


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_drain_lets_handlers_finish_and_leases_nothing_more(make_app):
    @asynccontextmanager
    async def lifespan(_tasks):
        yield
        order.append("lifespan left")

    app = make_app(lifespan=lifespan)
    order = []
    held, gate, begun = held_task(app)
    await held.enqueue()
    async with app.working() as (worker, running):
        await wait_until(lambda: begun)
        worker.drain()
        worker.drain()
        await held.enqueue()
        gate.set()
        assert await running
        order.append("run returned")
    assert (len(begun), worker.counts.acked) == (1, 1)
    assert (await app.store.stats("default")).ready == 1
    assert order == ["lifespan left", "run returned"]


async def test_a_drained_worker_that_never_began_ends(app):
    held_task(app)
    worker = Worker(app)
    worker.drain()
    async with asyncio.timeout(40):
        assert await worker.run()


async def test_what_is_unfinished_after_the_grace_period_is_released_with_its_tries_unchanged(app):
    held, _, begun = held_task(app)
    cleaned = []

    @app.task
    async def careful() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await work_for(0.01)
            cleaned.append(1)

    await held.enqueue()
    await careful.enqueue()
    async with app.working(shutdown_timeout=0.05) as (worker, running):
        await wait_until(lambda: len(worker.running_messages()) == 2)
        worker.drain()
        assert await running is False
    ready = await app.found(State.READY)
    assert [stored.message.tries for stored in ready] == [0, 0]
    assert (worker.counts.released, cleaned, begun) == (2, [1], [0])


async def test_abort_cancels_and_releases_at_once(app):
    held, _, begun = held_task(app)

    @app.task
    def thread() -> None:
        started.set()
        release.wait(30)

    started, release = threading.Event(), threading.Event()
    await held.enqueue()
    await thread.enqueue()
    async with app.working(shutdown_timeout=3600) as (worker, running):
        await wait_until(lambda: begun and started.is_set())
        worker.cancel_handlers()
        async with asyncio.timeout(40):
            assert await running is False
    release.set()
    assert [stored.message.tries for stored in await app.found(State.READY)] == [0, 0]


async def test_a_handler_that_ignores_its_cancellation_keeps_its_lease_and_is_named(app, monkeypatch):
    monkeypatch.setattr("qworker.worker.worker._CANCEL_PATIENCE", 0.05)
    monkeypatch.setattr("qworker.worker.worker._FLUSH_PATIENCE", 0.5)

    @app.task
    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                pass

    release = asyncio.Event()
    await deaf.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working(shutdown_timeout=0.0) as (worker, running):
            await wait_until(worker.running_messages)
            worker.drain()
            assert await running is False
    release.set()
    assert [line["task"] for line in logs if line["event"] == "handler_stuck"][:1] == ["deaf"]
    assert (await app.store.stats("default")).leased == 1


async def test_a_quiet_worker_finishes_what_it_has_and_stays(app):
    held, gate, begun = held_task(app)
    await held.enqueue()
    async with app.working() as (worker, running):
        await wait_until(lambda: begun)
        worker.quiet()
        await held.enqueue()
        gate.set()
        await wait_until(lambda: worker.counts.acked == 1)
        assert not running.done()
        worker.drain()
        assert await running
    assert (await app.store.stats("default")).ready == 1


async def test_a_cancelled_run_releases_what_it_held(app):
    held, _, begun = held_task(app)
    await held.enqueue()
    async with app.working() as (_, running):
        await wait_until(lambda: begun)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [stored.message.tries for stored in await app.found(State.READY)] == [0]


async def test_a_loop_that_dies_ends_the_worker_loudly_and_releases_what_it_held(app):
    def bug(call):
        if call == "reap" and begun:
            raise ZeroDivisionError("a bug in a backend")

    held, _, begun = held_task(app)
    await held.enqueue()
    app.store.hook = bug
    async with app.working() as (_, running):
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(running), 40)
    assert [stored.message.tries for stored in await app.found(State.READY)] == [0]


# -- outages -----------------------------------------------------------------------------------------------------------


async def test_a_store_that_is_away_at_the_start_is_an_error(app, monkeypatch):
    held_task(app)

    async def away(queue: str) -> None:
        raise BackendUnavailable("away")

    monkeypatch.setattr(app.store, "create", away)
    with pytest.raises(BackendUnavailable):
        await Worker(app).run()


async def test_an_outage_is_told_once_and_survived(app):
    @app.task
    async def work() -> None: ...

    failures = []
    app.store.hook = lambda call: failures.append(call) if call in app.store.broken else None
    with structlog.testing.capture_logs() as logs:
        async with app.working() as (worker, running):
            await work.enqueue()
            await wait_until(lambda: worker.counts.acked == 1)
            app.store.broken = {"lease", "wait"}
            await work.enqueue()
            await wait_until(lambda: len(failures) > 3)
            app.store.broken = set()
            await wait_until(lambda: worker.counts.acked == 2)
            worker.drain()
            assert await running
    told = [line["event"] for line in logs if line.get("loop") == "feeder"]
    assert told == ["backend_unavailable", "backend_recovered"]


async def test_a_queue_in_trouble_does_not_stop_the_others(app, monkeypatch):
    reaped = []
    lease, reap = app.store.lease, app.store.reap

    async def lease_but_a(queue, *rest):
        if queue == "a":
            raise BackendUnavailable("a is damaged")
        return await lease(queue, *rest)

    async def reap_but_a(queue):
        if queue == "a":
            raise BackendUnavailable("a is damaged")
        reaped.append(queue)
        return await reap(queue)

    monkeypatch.setattr(app.store, "lease", lease_but_a)
    monkeypatch.setattr(app.store, "reap", reap_but_a)

    @app.task(queue="b")
    async def work() -> None: ...

    await app.enqueue_many(work.call() for _ in range(50))
    with structlog.testing.capture_logs() as logs:
        async with app.working(queues=("a", "b"), concurrency=4) as (worker, _):
            await wait_until(lambda: worker.counts.acked == 50 and "b" in reaped)
    told = [(line["event"], line["loop"]) for line in logs if "loop" in line]
    assert sorted(told) == [("backend_unavailable", "feeder"), ("backend_unavailable", "reaper")]


async def test_a_queue_that_breaks_while_the_worker_waits_does_not_stop_the_others(app, monkeypatch):
    broken = []
    lease, wait = app.store.lease, app.store.wait

    async def lease_unless_broken(queue, *rest):
        if queue in broken:
            raise PermissionDenied(f"{queue} is broken")
        return await lease(queue, *rest)

    async def wait_unless_broken(queues, timeout):
        if set(broken) & set(queues):
            raise PermissionDenied("a queue is broken")
        await wait(queues, timeout)

    monkeypatch.setattr(app.store, "lease", lease_unless_broken)
    monkeypatch.setattr(app.store, "wait", wait_unless_broken)

    @app.task(queue="b")
    async def work() -> None: ...

    async with app.working(queues=("a", "b")) as (worker, _):
        await work.enqueue()
        await wait_until(lambda: worker.counts.acked == 1)
        broken.append("a")
        await work.enqueue()
        await wait_until(lambda: worker.counts.acked == 2)


async def test_a_burst_ends_though_a_queue_was_deleted(app):
    @app.task(queue="b")
    async def work() -> None:
        await app.store.delete("a")

    await work.enqueue()
    worker = await app.burst(queues=("a", "b"))
    assert worker.counts.acked == 1
