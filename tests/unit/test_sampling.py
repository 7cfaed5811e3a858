"""The sampler: what a count may cost, and what each number says about itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from qworker import Draft
from qworker.backend import Backend
from qworker.backend.offers import samples_of
from qworker.backend.registry import open_backend
from qworker.errors import BackendError, QueueNotFound
from qworker.history.batch import EventBatch
from qworker.history.event import Kind
from qworker.kit.samples import MemorySamples, SampleStore
from qworker.message import Query, State
from qworker.sampling import ErrorCount, Percentiles, QueueSampler, QueueSnapshot, StoreSnapshot, counting
from qworker.sampling.counting import Budget, SharedCount, decode_shared, encode_shared
from qworker.sampling.cpu_time import Timed
from qworker.sampling.flow import percentiles
from qworker.sampling.ring import LEVELS, RING_SIZE
from qworker.testing import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.worker.metrics import SECONDS
from qworker_file.backend import FileBackend
from qworker_file.names import count_labels, item_name, parse_item
from tests.support.servers import RedisServer

QUEUE = "jobs"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    # Its clock stands still: the age of a message is that of the test's steps.
    with RedisServer(stopped_clock=True) as server:
        yield server


@pytest.fixture(params=["memory", "file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return server.url
    return "memory:" if request.param == "memory" else f"file://{tmp_path}/spool"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def backend(url: str, clock: FakeClock) -> AsyncIterator[Backend]:
    backend = open_backend(url, clock=clock)
    await backend.create(QUEUE)
    yield backend
    await backend.delete(QUEUE)
    await backend.aclose()


@pytest_asyncio.fixture
async def directory(tmp_path: Path, clock: FakeClock) -> AsyncIterator[FileBackend]:
    backend = FileBackend(str(tmp_path / "spool"), clock=clock)
    await backend.create(QUEUE)
    yield backend
    await backend.aclose()


def of(snapshot: StoreSnapshot) -> QueueSnapshot:
    (found,) = [one for one in snapshot.queues if one.queue == QUEUE]
    return found


def ready(snapshot: StoreSnapshot) -> int:
    counted = of(snapshot).counted
    assert counted is not None
    return counted.count.stats.ready


def age(snapshot: StoreSnapshot) -> float:
    counted = of(snapshot).counted
    assert counted is not None
    return snapshot.at - counted.at


# -- counts ------------------------------------------------------------------------------------------------------------


async def test_every_number_has_its_age_and_is_counted_again_when_it_is_due(backend: Backend, clock: FakeClock) -> None:
    sampler = QueueSampler(backend, [QUEUE], clock=clock)
    assert ready(await sampler.tick(None)) == 0
    await backend.publish(QUEUE, [Draft(body=b"x"), Draft(body=b"x"), Draft(body=b"x", delay=60.0)])
    clock.advance(1.0)
    early = await sampler.tick(None)
    assert (ready(early), age(early)) == (0, 1.0)
    clock.advance(1.0)
    due = of(await sampler.tick(None))
    assert due.counted is not None
    assert due.counted.exact
    stats = due.counted.stats_at(clock.time() + 7.0)
    assert (stats.ready, stats.delayed, due.counted.backlog_rate) == (2, 1, 1.5)
    assert stats.oldest_age_s is not None
    # The time of Redis is the server's.
    assert 7.0 <= stats.oldest_age_s < 10.0
    await sampler.aclose()


def test_a_count_is_repeated_when_it_has_cost_two_percent_of_a_core() -> None:
    budget = Budget(2.0)
    assert [budget.pause(cost) for cost in (0.0, 0.01, 1.0)] == [2.0, 2.0, 50.0]
    # Ten queues of which each would take its 2 %.
    budget.limit([1.0] * 10)
    assert budget.pause(1.0) == pytest.approx(200.0)
    budget.limit([0.0001] * 500)
    assert budget.pause(1.0) == 50.0
    # Five hundred queues that together would take twice their 5 %.
    budget.limit([0.0004] * 500)
    assert budget.pause(0.0004) == pytest.approx(4.0)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queues in the order in which a directory was listed for them."""
    found: list[str] = []
    count = FileBackend.count

    async def counted(self: FileBackend, queue: str, most: int | None = None) -> object:
        found.append(queue)
        return await count(self, queue, most)

    monkeypatch.setattr(FileBackend, "count", counted)
    return found


async def test_a_directory_that_does_not_change_is_not_listed_again(
    directory: FileBackend, clock: FakeClock, counts: list[str]
) -> None:
    await directory.publish(QUEUE, [Draft(body=b"x"), Draft(body=b"later", delay=60.0)])
    sampler = QueueSampler(directory, clock=clock)
    for _ in range(6):
        snapshot = await sampler.tick(None)
        assert (ready(snapshot), age(snapshot)) == (1, 0.0)
        clock.advance(2.0)
    # The first count may have missed a change in the same moment, so a second one confirms it.
    assert len(counts) == 2
    clock.advance(60.0)
    # What is due is ready, although no file has moved.
    assert ready(await sampler.tick(None)) == 2
    assert len(counts) == 3
    await directory.publish(QUEUE, [Draft(body=b"x")])
    clock.advance(2.0)
    assert ready(await sampler.tick(None)) == 3
    await sampler.aclose()


async def test_a_look_at_whether_a_directory_has_changed_opens_no_queue_and_sees_each_change(
    directory: FileBackend, tmp_path: Path
) -> None:
    base = tmp_path / "spool" / QUEUE
    (base / "done").rmdir()
    looker = FileBackend(str(tmp_path / "spool"))
    seen = [await looker.count_version(QUEUE)]
    for number, part in enumerate(("done", "queue", "delay", "lease", "fail", "done", "format")):
        (base / "done").mkdir(exist_ok=True)
        # Another time than now, as after a change at another time.
        os.utime(base / part, (number + 1, number + 1))
        seen.append(await looker.count_version(QUEUE))
    os.utime(base, (9, 9))
    seen.append(await looker.count_version(QUEUE))
    assert None not in seen
    assert len(set(seen)) == len(seen)
    assert looker._stores.store is not None
    assert looker._stores.store.get_open(QUEUE) is None
    await looker.aclose()
    with pytest.raises(QueueNotFound):
        await directory.count_version("missing")


async def test_a_step_of_the_clock_stops_neither_counts_nor_ages(backend: Backend, clock: FakeClock) -> None:
    sampler = QueueSampler(backend, [QUEUE], clock=clock)
    for step in (0.0, 7200.0, -3600.0):
        clock.step(step)
        for _ in range(2):
            await backend.publish(QUEUE, [Draft(body=b"x")])
            clock.advance(2.0)
            snapshot = await sampler.tick(None)
        assert age(snapshot) == 0.0
    assert ready(snapshot) == 6
    counted = of(snapshot).counted
    assert counted is not None
    assert counted.backlog_rate == 0.5
    await sampler.aclose()


async def test_processes_on_one_directory_count_once_between_them(
    directory: FileBackend, clock: FakeClock, counts: list[str], tmp_path: Path
) -> None:
    others = [FileBackend(str(tmp_path / "spool"), clock=clock) for _ in range(2)]
    samplers = [QueueSampler(backend, clock=clock) for backend in (directory, *others)]
    for number in range(4):
        await directory.publish(QUEUE, [Draft(body=b"x")])
        for sampler in samplers:
            assert ready(await sampler.tick(None)) == number + 1
        clock.advance(2.0)
    assert len(counts) == 4
    # While another process counts, the last numbers stay, and say how old they are.
    await directory.publish(QUEUE, [Draft(body=b"x")])
    with directory.samples().lock(QUEUE) as mine:
        assert mine
        waiting = await samplers[0].tick(None)
        assert (ready(waiting), age(waiting)) == (4, 2.0)
    clock.advance(2.0)
    assert ready(await samplers[0].tick(None)) == 5
    for sampler, backend in zip(samplers, (directory, *others), strict=True):
        await sampler.aclose()
        await backend.aclose()


async def test_a_large_queue_is_counted_by_another_process_for_which_no_page_waits(
    directory: FileBackend, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_MANY", 2)
    await directory.publish(QUEUE, [Draft(body=b"x", task=task) for task in ("a", "a", "b")])
    sampler = QueueSampler(directory, url=directory.describe(), clock=clock)
    assert of(await sampler.tick(600.0)).counted is None
    counted = of(await sampler.tick(None)).counted
    assert counted is not None
    assert (counted.count.stats.ready, counted.count.tasks) == (3, {"a": 2, "b": 1})
    ids = [one.message.id async for page in directory.browse(QUEUE, Query(State.READY)) for one in page]
    assert (counted.count.first, counted.count.last) == (ids, ids[::-1])
    await sampler.aclose()


async def test_a_queue_that_is_gone_is_left_out_and_one_that_cannot_be_used_keeps_its_numbers(
    directory: FileBackend, clock: FakeClock, tmp_path: Path
) -> None:
    await directory.create("gone")
    sampler = QueueSampler(directory, clock=clock)
    assert [one.queue for one in (await sampler.tick(None)).queues] == ["gone", QUEUE]
    await directory.delete("gone")
    clock.advance(2.0)
    assert [one.queue for one in (await sampler.tick(None)).queues] == [QUEUE]
    await directory.aclose()
    (tmp_path / "spool" / QUEUE / "format").write_text("format: 999\n")
    clock.advance(2.0)
    broken = of(await sampler.tick(None))
    assert broken.problem is not None
    assert broken.counted is not None
    assert broken.counted.at == clock.time() - 2.0
    await sampler.aclose()


# -- flow --------------------------------------------------------------------------------------------------------------


async def test_rates_and_times_come_from_the_history_by_task(backend: Backend, clock: FakeClock) -> None:
    sampler = QueueSampler(backend, [QUEUE], clock=clock)
    assert of(await sampler.tick(None)).flow is None
    now = clock.time()
    backend.history.append(
        [
            EventBatch(
                kind="acked",
                queue=QUEUE,
                worker="w",
                at=now,
                id=["a", "b"],
                task="resize",
                duration_us=[2_000, 3_000],
                enqueued_at=now - 2.0,
                begins=True,
                leased_at=now,
            ),
            EventBatch(kind="failed", queue=QUEUE, worker="v", at=now, id=["c", "d"], task=["charge", None], tries=1),
        ]
    )

    async def recorded() -> bool:
        return len(await backend.history.for_message(QUEUE, "d")) == 1

    await wait_until(recorded)
    clock.advance(2.0)
    found = of(await sampler.tick(None))
    assert found.flow is not None
    assert (found.flow.acked, found.flow.failed, found.flow.retried, found.flow.workers) == (1.0, 1.0, 0.0, 2)
    assert found.flow.run is not None
    assert 0.001 < found.flow.run.p50 <= 0.005
    assert found.flow.wait is not None
    assert 1.0 < found.flow.wait.p99 <= 2.5
    assert {task: (flow.acked, flow.failed) for task, flow in found.tasks.items()} == {
        "": (0.0, 0.5),
        "charge": (0.0, 0.5),
        "resize": (1.0, 0.0),
    }
    clock.advance(20.0)
    await sampler.tick(None)
    clock.advance(2.0)
    flow = of(await sampler.tick(None)).flow
    assert flow is not None
    assert (flow.acked, flow.workers, flow.run) == (0.0, 0, None)
    await sampler.aclose()


async def test_errors_of_the_last_hour_are_counted_by_task_without_their_values(
    backend: Backend, clock: FakeClock
) -> None:
    sampler = QueueSampler(backend, [QUEUE], clock=clock)
    await sampler.tick(None)

    async def record(kind: Kind, ids: list[str], task: str | None, errors: list[str | None]) -> None:
        backend.history.append(
            [EventBatch(kind=kind, queue=QUEUE, worker="w", at=clock.time(), id=ids, task=task, error=[*errors])]
        )

        async def recorded() -> bool:
            return len(await backend.history.for_message(QUEUE, ids[-1])) == 1

        await wait_until(recorded)
        clock.advance(2.0)
        await sampler.tick(None)

    await record("retried", ["e1", "e2"], "mail", ["OSError: host 1 refused", "OSError: host 2 refused"])
    await record("failed", ["e3"], "mail", ["OSError: host 3 refused"])
    await record("failed", ["e4"], None, [None])
    assert sampler.errors() == (
        6.0,
        [
            ErrorCount(queue=QUEUE, task="mail", error="OSError: host # refused", failed=1, retried=2),
            ErrorCount(queue=QUEUE, task=None, error="", failed=1, retried=0),
        ],
    )
    clock.advance(3660.0)
    await sampler.tick(None)
    assert sampler.errors() == (3600.0, [])
    await sampler.aclose()


def test_a_percentile_lies_in_its_bucket() -> None:
    buckets = [0] * (len(SECONDS) + 1)
    assert percentiles(buckets) is None
    buckets[SECONDS.index(1.0)] = 100
    assert percentiles(buckets) == Percentiles(0.75, 0.975, 0.995)
    buckets[-1] = 900
    assert percentiles(buckets) == Percentiles(300.0, 300.0, 300.0)


# -- samples -----------------------------------------------------------------------------------------------------------


async def test_each_period_that_was_seen_whole_has_one_sample(backend: Backend, clock: FakeClock) -> None:
    clock.advance(10.0 - clock.time() % 10.0)
    sampler = QueueSampler(backend, [QUEUE], clock=clock)
    for number in range(16):
        if number == 8:
            await backend.publish(QUEUE, [Draft(body=b"x")])
        await sampler.tick(None)
        clock.advance(2.0)
    start = LEVELS[0].start(clock.time())
    past = await sampler.past(QUEUE, LEVELS[0])
    assert [(one.at, one.ready) for one in past] == [(start - 30.0, 0), (start - 20.0, 1), (start - 10.0, 1)]
    # A pause is a gap.
    clock.advance(60.0)
    await sampler.tick(None)
    assert await sampler.past(QUEUE, LEVELS[0]) == past
    await sampler.aclose()


@pytest.fixture
def store(backend: Backend) -> SampleStore:
    return samples_of(backend) or MemorySamples()


async def test_a_block_of_samples_grows_and_goes_with_its_queue(backend: Backend, store: SampleStore) -> None:
    assert await store.read(QUEUE, 0, 10) == b""
    await store.write(QUEUE, 4, b"abc")
    await store.write(QUEUE, 5, b"B")
    assert await store.read(QUEUE, 0, 10) == b"\0\0\0\0aBc"
    assert await store.read(QUEUE, 6, 10) == b"c"
    with store.lock(QUEUE) as mine:
        assert mine
    await backend.delete(QUEUE)
    if not isinstance(store, MemorySamples):
        assert await store.read(QUEUE, 0, 10) == b""


async def test_where_samples_cannot_be_stored_they_are_in_memory_and_the_reason_is_told(
    directory: FileBackend, clock: FakeClock, tmp_path: Path
) -> None:
    (tmp_path / "spool" / ".samples").write_text("not a directory")
    clock.advance(10.0 - clock.time() % 10.0)
    sampler = QueueSampler(directory, clock=clock)
    for _ in range(2):
        snapshot = await sampler.tick(None)
        clock.advance(10.0)
    snapshot = await sampler.tick(None)
    assert snapshot.problem is None
    assert snapshot.samples_problem is not None
    assert ".samples" in snapshot.samples_problem
    assert len(await sampler.past(QUEUE, LEVELS[0])) == 2
    await sampler.aclose()


async def test_nothing_is_written_in_a_store_of_another_program(tmp_path: Path, clock: FakeClock) -> None:
    backend = open_backend(f"fsq://{tmp_path}/spool", clock=clock)
    await backend.publish(QUEUE, [Draft(body=b"x")])
    before = sorted(os.listdir(tmp_path / "spool"))
    clock.advance(10.0 - clock.time() % 10.0)
    sampler = QueueSampler(backend, clock=clock)
    for _ in range(3):
        assert ready(await sampler.tick(None)) == 1
        clock.advance(10.0)
    assert sorted(os.listdir(tmp_path / "spool")) == before
    assert len(await sampler.past(QUEUE, LEVELS[0])) == 2
    await sampler.aclose()
    await backend.aclose()


async def test_a_shared_count_that_is_cut_or_damaged_is_not_used(
    directory: FileBackend, clock: FakeClock, counts: list[str]
) -> None:
    sampler = QueueSampler(directory, clock=clock)
    await sampler.tick(None)
    store = directory.samples()
    stored = await store.read(QUEUE, RING_SIZE, 1 << 17)
    shared = decode_shared(stored)
    assert isinstance(shared, SharedCount)
    assert encode_shared(shared) == stored
    for damaged in (b"", stored[:5], stored[:-1], stored[:20] + b"X" + stored[21:]):
        assert decode_shared(damaged) is None
    await store.write(QUEUE, RING_SIZE, b"\xff" * len(stored))
    other = QueueSampler(directory, clock=clock)
    assert ready(await other.tick(None)) == 0
    assert len(counts) == 2
    await sampler.aclose()
    await other.aclose()


# -- parts -------------------------------------------------------------------------------------------------------------


async def test_only_the_own_steps_of_a_coroutine_are_its_cpu_time() -> None:
    async def burn() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    async def counted() -> str:
        await asyncio.sleep(0)
        await other
        return "done"

    other = asyncio.create_task(burn())
    timed = Timed(counted())
    assert await timed == "done"
    assert timed.cpu_s < 0.04

    cancelled = asyncio.create_task(_await(Timed(_wait_for_ever())))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(BackendError):
        await Timed(_fail())


async def _await(timed: Timed[None]) -> None:
    await timed


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


async def _fail() -> None:
    raise BackendError("no")


_STEM = "20261124120636_637634824_27092_"
_NAMES = st.lists(
    st.one_of(
        st.builds(
            item_name,
            st.sampled_from([f"{_STEM}vm-f13eb7a6", f"{_STEM}vm-0a0a0a0a", "20261124120636_637634824_0_~mine"]),
            st.integers(0, 12),
            st.lists(st.sampled_from(["resize", "a b", "x_y", "50%", "~key"]), max_size=2),
            st.integers(0, 9),
        ),
        st.text("_@#019a%.", min_size=1, max_size=40),
        st.just("_20261124120636_6376348240_0_~mine_0_resize"),
        st.just("_20261124120636_637634_99_host_0_argument"),
    ),
    max_size=12,
)


@given(_NAMES)
def test_the_labels_of_many_names_are_those_of_each(names: list[str]) -> None:
    expected: dict[str, int] = {}
    for name in names:
        item = parse_item(name)
        arguments = () if item is None or not item.is_own else item.arguments
        label = arguments[0] if len(arguments) == 1 and len(arguments[0]) != 65 else ""
        expected[label] = expected.get(label, 0) + 1
    assert count_labels(names) == expected
