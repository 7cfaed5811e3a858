"""Leases are extended whatever a handler does, and a handler whose lease is lost is told."""

import asyncio
import threading
import time

import pytest
import structlog

from qworker import Context, State
from qworker.context import CancelReason
from qworker.message import Lease, Message, Selection
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.worker.delivery import Delivery
from qworker.worker.lease_extender import LeaseExtender
from tests.support.waiting import let_pass, wait_for
from tests.support.worker_state import make_state


@pytest.mark.usefixtures("quick_renewals")
async def test_a_handler_that_blocks_the_loop_keeps_its_lease(app):
    extensions = []
    app.store.hook = lambda call: extensions.append(call) if call == "extend" else None

    @app.task
    async def block() -> None:
        # Nothing else runs on the loop until two extensions have been seen.
        wait_for(lambda: len(extensions) >= 2, "two extensions")

    await block.enqueue()
    async with app.working(visibility_timeout=60) as (worker, _):
        await wait_until(lambda: worker.counts.acked == 1)
    assert len(extensions) >= 2
    assert [stored.message.tries for stored in await app.found(State.DONE)] == [0]


@pytest.mark.usefixtures("quick_renewals")
async def test_a_thread_that_holds_the_interpreter_keeps_its_lease(app):
    extensions = []
    app.store.hook = lambda call: extensions.append(call) if call == "extend" else None

    @app.task
    def busy() -> None:
        deadline = time.monotonic() + 30
        while len(extensions) < 2 and time.monotonic() < deadline:
            sum(range(1000))

    await busy.enqueue()
    async with app.working(visibility_timeout=60) as (worker, _):
        await wait_until(lambda: worker.counts.acked == 1)
    assert len(extensions) >= 2


@pytest.mark.usefixtures("quick_renewals")
async def test_a_lost_lease_cancels_the_handler_and_its_outcome_does_not_count(app):
    ended = []

    @app.task
    async def work(ctx: Context) -> None:
        try:
            await app.store.remove("default", Selection(ids=[ctx.message.id]))
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    await work.enqueue()
    with structlog.testing.capture_logs() as logs:
        async with app.working(visibility_timeout=60) as (worker, _):
            await wait_until(lambda: worker.counts.lost == 1)
    assert (ended, worker.counts.acked, worker.counts.released) == ([1], 0, 0)
    (line,) = [line for line in logs if line["event"] == "lease_lost"]
    assert (line["task"], line["log_level"]) == ("work", "warning")


async def test_handlers_are_cancelled_and_released_when_their_leases_cannot_be_renewed(app):
    ended = []

    @app.task(max_tries=1000)
    async def work(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(ctx.token)

    async def is_released() -> bool:
        # Not a delivery that was released because it came too late to start.
        events = await app.store.history.for_message("default", job.id)
        return any(event.kind == "released" and event.token in ended for event in events)

    app.store.broken = {"extend"}
    job = await work.enqueue()
    async with app.working(visibility_timeout=1.2) as (worker, _):
        await wait_until(is_released)
        assert worker.counts.released >= 1


async def test_no_handler_starts_when_its_lease_may_have_expired(app, monkeypatch):
    lease, late, started = app.store.lease, [], []

    async def answer_late(*arguments, **options):
        leases = await lease(*arguments, **options)
        if leases and not late:
            late.extend(each.token for each in leases)
            await let_pass(0.6)
        return leases

    @app.task(max_tries=1000)
    async def work(ctx: Context) -> None:
        started.append(ctx.token)

    monkeypatch.setattr(app.store, "lease", answer_late)
    await work.enqueue()
    async with app.working(visibility_timeout=0.6) as (worker, _):
        await wait_until(lambda: worker.counts.acked == 1)
    assert late
    assert not set(late) & set(started)


class Store:
    """A store whose extensions block until they are let go."""

    def __init__(self):
        self.begun = threading.Event()
        self.go = threading.Event()
        self.error = None
        self.loses = False

    def extend(self, leases, visibility):
        self.begun.set()
        assert self.go.wait(30)
        if self.error:
            raise self.error
        return leases if self.loses else []


class ReadClock(FakeClock):
    """Counts its readings: after each of them the keeper does what is due."""

    def __init__(self):
        super().__init__()
        self.readings = 0

    def monotonic(self):
        self.readings += 1
        return super().monotonic()

    async def read_again(self):
        """Wait until the second reading from now: what was due at the first is done by then."""
        wanted = self.readings + 2
        await wait_until(lambda: self.readings >= wanted)


class Held:
    """A lease extender on a clock that stands still, with one lease."""

    def __init__(self, store, visibility=0.6):
        self.clock = ReadClock()
        now = self.clock.monotonic()
        lease = Lease(message=Message(id="a", queue="q", body=b""), token=1, expires_at=0.0)
        self.delivery = Delivery(lease, now, now + visibility)
        state = make_state(store, clock=self.clock, visibility_timeout=visibility)
        state.held.add(self.delivery)
        self.events = state.events
        self.extender = LeaseExtender(state)


async def test_what_cannot_be_renewed_is_cancelled_before_it_expires_by_the_monotonic_clock():
    held = Held(Store())
    watching = asyncio.create_task(held.extender.watch())
    try:
        held.clock.step(3600)
        held.clock.advance(0.45)
        await held.clock.read_again()
        assert held.delivery.cancel_reason is None
        held.clock.advance(0.1)
        await wait_until(lambda: held.delivery.cancel_reason is CancelReason.LEASE_LOST)
        assert held.clock.monotonic() < held.delivery.expires
    finally:
        watching.cancel()


async def test_a_lease_whose_extension_is_under_way_is_not_settled_before_its_end():
    store = Store()
    held = Held(store)
    held.extender.start()
    try:
        held.clock.advance(0.2)
        await wait_until(store.begun.is_set)
        assert held.extender.stop_extending([held.delivery]) == [held.delivery]
        assert not held.delivery.settling
        before = held.delivery.expires
        store.go.set()
        await wait_until(lambda: held.events.count("leases_extended"))
        assert held.delivery.expires > before
        assert held.extender.stop_extending([held.delivery]) == []
        # From here on no extension begins.
        store.begun.clear()
        held.clock.advance(0.3)
        await held.clock.read_again()
        assert not store.begun.is_set()
    finally:
        store.go.set()
        held.clock.advance(0)
        assert await stopped(held.extender)


async def test_what_the_store_calls_lost_is_reported_at_once():
    store = Store()
    store.loses = True
    store.go.set()
    held = Held(store)
    held.extender.start()
    held.clock.advance(0.2)
    await wait_until(lambda: ("leases_missing", [held.delivery]) in held.events.events)
    assert await stopped(held.extender)


async def test_a_bug_in_the_store_ends_the_extender_loudly():
    store = Store()
    store.error = ZeroDivisionError()
    store.go.set()
    held = Held(store)
    held.extender.start()
    held.clock.advance(0.2)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(held.extender.watch(), 30)
    assert await stopped(held.extender)


async def stopped(extender):
    return await extender.stop(30)
