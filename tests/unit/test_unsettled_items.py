"""Messages whose outcome cannot be stored because of their own file: they do not run again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog.testing

from qworker import Tasks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import BackendError
from qworker.kit.doctor_check import CheckStatus
from qworker.message import Draft, Lease, Message, SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker.url import BackendURL
from qworker.worker import Worker, WorkerOptions
from qworker_fsq import FsqBackend
from tests.support.immutable import make_immutable

# Long enough for the settler's last try, short enough for a test.
VISIBLE = 0.6
# Where everything can be settled: a worker that stands still for a second loses no lease.
LONG = 60.0


@pytest.fixture(params=["file", "fsq", "mq", "vsqs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    # A lease of mq is known by its file's change time, so one that `chattr` has touched is one of another program.
    return f"{request.param}://{tmp_path}/spool" + ("?delay=1s" if request.param == "mq" else "")


def files_of(url: str, body: bytes) -> list[Path]:
    root = Path(BackendURL.parse(url).path)
    return [path for path in root.rglob("*") if path.is_file() and path.read_bytes().endswith(body)]


@contextlib.contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    for path in paths:
        make_immutable(path, True)
    try:
        yield
    finally:
        for path in paths:
            make_immutable(path, False)


@contextlib.asynccontextmanager
async def store(url: str) -> AsyncIterator[Backend]:
    backend = open_backend(url)
    try:
        yield backend
    finally:
        await backend.aclose()


async def run_until_done(url: str) -> None:
    """Work until `bad` has run."""
    tasks, ran = Tasks(url), asyncio.Event()

    @tasks.raw_handler(queue="q")
    async def run(message: Message) -> None:
        assert message.body == b"bad"
        ran.set()

    worker = Worker(tasks, WorkerOptions(visibility_timeout=LONG))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(40):
            await ran.wait()
    finally:
        worker.drain()
        await running
        await tasks.aclose()


async def burst(url: str, *, freeze: bool = False, visible: float = VISIBLE) -> tuple[list[bytes], list[str]]:
    """Work until nothing is left. The bodies that ran, and the logged events.

    Args:
        url: The store.
        freeze: Whether the file of `bad` becomes immutable while it runs.
        visible: The visibility timeout.
    """
    tasks, ran = Tasks(url), list[bytes]()

    @tasks.raw_handler(queue="q")
    async def run(message: Message) -> None:
        ran.append(message.body)
        if freeze and message.body == b"bad":
            for path in files_of(url, b"bad"):
                make_immutable(path, True)

    with structlog.testing.capture_logs() as lines:
        async with asyncio.timeout(40):
            await Worker(tasks, WorkerOptions(burst=True, visibility_timeout=visible)).run()
    await tasks.aclose()
    return ran, [line["event"] for line in lines]


@pytest.mark.parametrize("others", [[], [b"1", b"2"]], ids=["alone", "with others"])
async def test_a_burst_ends_and_says_what_it_left_if_an_immutable_message_cannot_be_settled(
    url: str, others: list[bytes]
) -> None:
    async with store(url) as backend:
        await backend.publish("q", [Draft(body=body) for body in (b"bad", *others)])
        with immutable(*files_of(url, b"bad")):
            ran, events = await burst(url)
            assert set(others) <= set(ran)
            assert ran.count(b"bad") <= 1, "a message whose lease is a lock runs before it is known"
            assert "message_blocked" in events
            assert "messages_left" in events
            assert (await backend.stats("q")).blocked == 1
            # Also after a restart: it does not run again.
            ran, events = await burst(url)
            assert ran == []
            assert "messages_left" in events
        ran, events = await burst(url, visible=LONG)
        assert ran == [b"bad"]
        assert "messages_left" not in events
        stats = await backend.stats("q")
        assert (stats.ready, stats.leased, stats.blocked) == (0, 0, 0)


async def test_a_message_that_becomes_immutable_while_it_runs_ends_a_burst_and_runs_once_more_when_it_can(
    url: str,
) -> None:
    async with store(url) as backend:
        await backend.publish("q", [Draft(body=b"bad"), Draft(body=b"other")])
        try:
            ran, events = await burst(url, freeze=True)
            # A worker that stands still may lose the short lease of the other one, and run it again.
            assert (ran.count(b"bad"), set(ran)) == (1, {b"bad", b"other"})
            assert "messages_left" in events
            assert (await backend.stats("q")).blocked == 1
            assert (await burst(url))[0] == []
        finally:
            for path in files_of(url, b"bad"):
                make_immutable(path, False)
        # On mq it is blocked until a mover's delay is over, and a burst does not wait for that.
        await run_until_done(url)
        # A new process removes the records of other processes with its first reaping.
        async with store(url) as another:
            await another.reap("q")
        stats = await backend.stats("q")
        assert (stats.ready, stats.leased, stats.blocked) == (0, 0, 0)


# -- fsq: the lock is the lease --------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "q" / "queue"


@pytest_asyncio.fixture
async def fsq(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Backend]:
    async with contextlib.AsyncExitStack() as stack:
        backend = open_backend(f"fsq://{tmp_path}/spool?sync=off", clock=clock)
        stack.push_async_callback(backend.aclose)
        await backend.create("q")
        yield backend


async def leased(backend: Backend) -> list[Lease]:
    return await backend.lease("q", 10, 30.0)


async def cannot_ack(backend: Backend, lease: Lease) -> None:
    with pytest.raises(BackendError):
        await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)])


async def test_an_item_that_cannot_be_settled_rests_longer_and_longer_and_then_counts_one_try(
    fsq: Backend, queue: Path, clock: FakeClock
) -> None:
    await fsq.publish("q", [Draft(body=b"bad")])
    (item,) = queue.iterdir()
    with immutable(item):
        (lease,) = await leased(fsq)
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                await cannot_ack(fsq, lease)
                clock.advance(1.0)
                # It is still leased.
                await fsq.reap("q")
                assert (await fsq.stats("q")).leased == 1
            clock.advance(30.0)
            assert (await fsq.reap("q")).returned == 0
            assert (await fsq.stats("q")).leased == 0
            for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
                assert await leased(fsq) == []
                clock.advance(pause)
        assert [line["event"] for line in lines] == ["message_blocked"]
    clock.advance(60.0)
    (lease,) = await leased(fsq)
    assert (lease.message.body, lease.message.tries) == (b"bad", 1)
    assert await fsq.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
    stats = await fsq.stats("q")
    assert (stats.ready, stats.done, stats.blocked) == (0, 1, 0)


async def test_an_item_that_can_be_settled_again_before_its_lease_ends_is_done(
    fsq: Backend, queue: Path, clock: FakeClock
) -> None:
    await fsq.publish("q", [Draft(body=b"bad")])
    (item,) = queue.iterdir()
    (lease,) = await leased(fsq)
    with immutable(item):
        await cannot_ack(fsq, lease)
        assert (await fsq.stats("q")).blocked == 1
    assert await fsq.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
    clock.advance(60.0)
    assert await leased(fsq) == []
    assert (await fsq.stats("q")).blocked == 0


async def test_another_worker_of_the_queue_does_not_run_an_item_that_cannot_be_settled(
    fsq: Backend, queue: Path, clock: FakeClock, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        other = open_backend(f"fsq://{tmp_path}/spool?sync=off", clock=clock)
        stack.push_async_callback(other.aclose)
        await fsq.publish("q", [Draft(body=b"bad")])
        (item,) = queue.iterdir()
        with immutable(item):
            (lease,) = await leased(fsq)
            # It finds the item locked.
            assert await leased(other) == []
            await cannot_ack(fsq, lease)
            clock.advance(31.0)
            await fsq.reap("q")
            await fsq.aclose()
            # Longer than the pause of a locked item.
            assert await other.lease("q", 10, 30.0, 3.0) == []
            (found,) = [
                check
                for check in await FsqBackend.doctor(BackendURL.parse(f"fsq://{tmp_path}/spool"))
                if check.name == "blocked message"
            ]
            assert found.health is CheckStatus.WARN
            assert found.detail == f"q/queue/{item.name}: Operation not permitted"


async def test_an_error_of_the_directory_blocks_no_item(fsq: Backend, queue: Path) -> None:
    await fsq.publish("q", [Draft(body=b"x")])
    (lease,) = await leased(fsq)
    with immutable(queue):
        await cannot_ack(fsq, lease)
        assert (await fsq.stats("q")).blocked == 0
    assert await fsq.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
