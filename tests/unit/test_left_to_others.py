"""Messages that this worker must leave to others: unknown tasks, and arguments of another version of the app."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest
import structlog

from qworker import Draft, State, Tasks
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cell import Cell, CellOp
from qworker.message import Query, Selection
from qworker.testing import FakeClock, in_memory, run_until_idle
from qworker.tools.explain import explain
from qworker.worker import Worker, WorkerOptions
from qworker.worker.releases import Releases
from tests.support.servers import RedisServer

# -- how long ----------------------------------------------------------------------------------------------------------


def test_a_message_is_released_for_longer_each_time_and_offered_in_between():
    releases, now = Releases(lambda: 0.5), 0.0
    delays, pauses = [], []
    for _ in range(16):
        delay, pause = releases.next("q", "id", now)
        delays.append(delay)
        pauses.append(pause)
        now += max(delay, pause) + 1.0
    assert delays == pytest.approx([0.1, 0, 0.2, 0, 0.4, 0, 0.8, 0, 1.6, 0, 3.2, 0, 6.4, 0, 10, 0])
    assert pauses == pytest.approx([0, 0.15] * 8)


def test_messages_of_others_never_take_more_than_half_of_the_time_of_a_queue():
    releases, step, away = Releases(lambda: 0.99), 0.001, 0.0
    until, now = 0.0, 0.0
    for number in range(20_000):
        now += step
        if now < until:
            away += step
            continue
        for sight in range(2):
            _, pause = releases.next("q", f"id-{number}-{sight}", now)
            _, pause = releases.next("q", f"id-{number}-{sight}", now)
            until = max(until, now + pause)
    assert 0.3 < away / now < 0.7


def test_only_so_many_messages_are_remembered():
    releases = Releases(lambda: 0.0)
    for number in range(25_000):
        releases.next("q", str(number), 0.0)
    assert len(releases._delays) == 10_000
    # One that was forgotten returns as a new one, but not at full speed while there are more than are remembered.
    assert releases.next("q", "0", 0.0)[0] > 0.1
    assert releases.next("q", "1", 1000.0) == (0.1, 0.0)


async def test_what_is_left_to_others_is_counted_without_their_names(app):
    @app.task(name="pay")
    async def pay(order: int) -> None: ...

    # What is released is not due again before the burst ends, however long that takes.
    app.store._clock = FakeClock()
    await app.store.publish("default", [Draft(body=b'{"task":"other"}'), Draft(body=b'{"task":"pay","args":[]}')])
    worker = Worker(app, WorkerOptions(burst=True))
    await worker.run()
    counts = {one.task: one.features for one in worker.features.counts()}
    assert counts == {"": {"releases": {"unknown_task": 1}}, "pay": {"releases": {"arguments": 1}}}


async def test_known_messages_behind_an_unknown_one_are_not_blocked(app):
    @app.task
    async def work() -> None:
        ran.append(1)

    ran: list[int] = []
    await app.store.publish("default", [Draft(body=b'{"task":"other"}')] * 50)
    for _ in range(50):
        await work.enqueue()
    await app.burst(concurrency=1)
    assert len(ran) == 50
    assert [stored.message.tries for stored in await app.waiting()] == [0] * 50


async def test_a_queue_that_is_left_to_others_delays_no_other_queue(app):
    @app.task(queue="b")
    async def work() -> None:
        worker.drain()

    @app.task(queue="a")
    async def never() -> None: ...

    worker = Worker(app, WorkerOptions(concurrency=10), draw=lambda: 0.0)
    running = asyncio.create_task(worker.run())
    try:
        await app.store.publish("a", [Draft(body=b'{"task":"other"}')])
        async with asyncio.timeout(40):
            while worker.counts.released < 2:
                await asyncio.sleep(0)
        assert worker._loops is not None
        worker._loops.feeder.stay_away("a", 3600.0)
        await work.enqueue()
        async with asyncio.timeout(40):
            await running
    finally:
        worker.cancel_handlers()
        await asyncio.wait([running])


async def test_the_log_says_what_to_do(app):
    @app.task
    async def pay(order: int) -> None: ...

    bodies = [b'{"task":"mail.send"}', b'{"task":"pay","args":[1, 2]}']
    await app.store.publish("default", [Draft(body=body) for body in bodies] * 2)
    with structlog.testing.capture_logs() as logs:
        await app.burst()
    (unknown,) = [line for line in logs if line["event"] == "unknown_task"]
    assert (unknown["task"], unknown["queue"]) == ("mail.send", "default")
    assert "give each app its own queue (queue=...)" in unknown["hint"]
    (refused,) = [line for line in logs if line["event"] == "arguments_refused"]
    assert "too many positional arguments" in refused["error"]
    assert "unknown_for" in refused["hint"]


# -- arguments that do not fit -----------------------------------------------------------------------------------------

MISFITS = [[], [1, 2], [1, "x", 3]]


def pay_app(url: str, clock: FakeClock | None = None, **options) -> tuple[Tasks, list[object]]:
    tasks, ran = Tasks(url, **options), []
    if clock is not None:
        tasks.clock = clock

    @tasks.task(max_tries=1)
    async def pay(order: int) -> None:
        ran.append(order)

    return tasks, ran


def body(args: list[object]) -> bytes:
    return json.dumps({"task": "pay", "args": args}).encode()


async def burst(tasks: Tasks, clock: FakeClock) -> Worker:
    worker = Worker(tasks, WorkerOptions(burst=True), clock=clock, draw=lambda: 0.0)
    async with asyncio.timeout(40):
        await worker.run()
    return worker


async def found(tasks: Tasks, state: State) -> list:
    return await list_messages(await tasks.backend(), "default", Query(state))


@pytest.fixture(params=["memory", "file"])
def shared_url(request, tmp_path):
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/spool"


async def test_arguments_of_another_version_stay_for_ten_minutes_with_their_tries_and_then_fail(shared_url):
    clock = FakeClock()
    tasks, ran = pay_app(shared_url, clock)
    backend = await tasks.backend()
    await backend.publish("default", [Draft(body=body(args)) for args in MISFITS])
    for _ in range(4):
        # Another worker each time, as after a restart: the time is that of the first refusal.
        await burst(tasks, clock)
        assert [stored.message.tries for stored in await found(tasks, State.DELAYED)] == [0, 0, 0]
        clock.advance(140)
    clock.advance(60)
    worker = await burst(tasks, clock)
    assert worker.counts.failed == 3
    failed = await found(tasks, State.FAILED)
    assert all("it takes (order: int)" in stored.error for stored in failed)
    assert not ran
    # They get the whole time again if somebody requeues them, and leave no cells.
    (reply,) = await backend.cells("default", [CellOp("close", Cell("misfits", ""))])
    assert reply.empty
    await backend.requeue("default", Selection(ids=[failed[0].message.id]))
    await burst(tasks, clock)
    assert len(await found(tasks, State.DELAYED)) == 1
    await tasks.aclose()


async def test_the_right_version_runs_what_another_one_has_refused(shared_url):
    clock = FakeClock()
    tasks, ran = pay_app(shared_url, clock)
    backend = await tasks.backend()
    await backend.publish("default", [Draft(body=body([1, "x"]))])
    await burst(tasks, clock)
    newer = Tasks(shared_url)
    newer.clock = clock

    @newer.task(name="pay")
    async def pay(order: int, currency: str) -> None:
        ran.append((order, currency))

    clock.advance(20)
    await burst(newer, clock)
    assert ran == [(1, "x")]
    await tasks.aclose()
    await newer.aclose()


@pytest.mark.parametrize("unknown_for", [0, timedelta(0)])
async def test_without_a_time_they_fail_at_once(tmp_path, unknown_for):
    clock = FakeClock()
    tasks, _ = pay_app(f"memory://{tmp_path.name}", clock, unknown_for=unknown_for)
    await (await tasks.backend()).publish("default", [Draft(body=body([]))])
    assert (await burst(tasks, clock)).counts.failed == 1


async def test_in_tests_they_fail_at_once(tmp_path):
    tasks, _ = pay_app(f"file://{tmp_path}/never-made")
    with in_memory(tasks):
        await (await tasks.backend()).publish("default", [Draft(body=body([]))])
        assert (await run_until_idle(tasks)).failed == 1
    assert tasks.unknown_for == 600.0


@pytest.mark.parametrize("scheme", ["fsq", "sq", "vsqs"])
async def test_a_store_without_cells_counts_from_the_first_sight_of_a_worker(tmp_path, scheme):
    clock = FakeClock()
    url = f"{scheme}://{tmp_path}/root"
    tasks, _ = pay_app(url, clock)
    backend = await tasks.backend()
    await backend.create("default")
    await backend.publish("default", [Draft(body=body([]))])
    await burst(tasks, clock)
    clock.advance(3600)
    # Another worker has not seen it yet.
    assert (await burst(tasks, clock)).counts.failed == 0
    await tasks.aclose()


async def test_an_on_failure_task_learns_of_arguments_that_never_fitted(app):
    @app.task
    async def alert(failed: dict) -> None:
        codes.append(failed["code"])

    @app.task(on_failure=alert)
    async def pay(order: int) -> None: ...

    codes: list[str] = []
    app.unknown_for = 0.0
    await app.store.publish("default", [Draft(body=b'{"task":"pay"}')])
    await app.burst()
    assert codes == ["arguments"]


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file", "redis"])
def every_url(request, tmp_path):
    if request.param == "redis":
        with RedisServer() as server:
            yield server.url
    else:
        yield f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/spool"


async def test_explain_says_how_long_a_call_is_retried_and_who_does_not_know_a_task(every_url):
    tasks, _ = pay_app(every_url)
    backend = await tasks.backend()
    unknown, misfit, value = await backend.publish(
        "default", [Draft(body=b'{"task":"mail.send"}'), Draft(body=body([1, 2])), Draft(body=body(["x"]))]
    )

    async def told(message_id: str) -> str:
        found = await explain(backend, "default", message_id, tasks)
        return found.reasons[-1].text

    assert await told(unknown) == (
        "no worker of this app knows task mail.send: it is released and stays in the queue; the app has pay"
    )
    text = "its arguments do not fit pay(order): too many positional arguments; it is retried "
    assert await told(misfit) == f"{text}for 600 s after its first refusal, because a deploy may be running"
    assert (await told(value)).startswith("it will fail permanently: ")
    cell = Cell("misfits", misfit, b"1700000000.0")
    await backend.cells("default", [CellOp("put", cell)])
    assert await told(misfit) == f"{text}until 2023-11-14 22:23:20Z, because a deploy may be running"
    await tasks.aclose()


async def test_explain_knows_no_end_on_a_store_without_cells(tmp_path):
    tasks, _ = pay_app(f"sq://{tmp_path}/root")
    backend = open_backend(tasks.url)
    await backend.create("default")
    (misfit,) = await backend.publish("default", [Draft(body=body([1, 2]))])
    found = await explain(backend, "default", misfit, tasks)
    assert "for 600 s after its first refusal" in found.reasons[-1].text
    await backend.aclose()
