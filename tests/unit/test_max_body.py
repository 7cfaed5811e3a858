"""`max_body`: the option, what a larger stored message costs, and bodies that are read off the loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from qworker import Tasks, bulk
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import InvalidURL, MessageTooLarge, UsageError
from qworker.health.exposition import WorkerCollector, format_metrics
from qworker.kit import body_slices
from qworker.kit.doctor_check import CheckStatus
from qworker.kit.max_body import DEFAULT_MAX_BODY
from qworker.kit.parts import make_shares
from qworker.message import Draft, Message, Query, Selection, SettleAction, Settlement, State, StoredMessage
from qworker.server.app import create_app
from qworker.size import format_size, parse_size
from qworker.testing.harness import Case, Harness
from qworker.tools.doctor import run_checks
from qworker.worker import Worker, WorkerOptions
from tests.support.immutable import make_immutable
from tests.support.servers import RedisServer, free_port

BIG = bytes(range(256)) * (20 << 12)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64KiB", 65536), ("64K", 65536), ("64MiB", 64 << 20), ("512M", 512 << 20), ("2GiB", 2 << 30)],
)
def test_sizes_have_units_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "MiB", "1.5MiB", "-1", "64MB", "64m", " 1", "1 MiB", "9" * 20])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="is not a valid size: use bytes"):
        parse_size(text)


@pytest.mark.parametrize("url", ["file:///tmp/x", "memory:", "redis://localhost"])
def test_max_body_is_64_mib_by_default(url: str) -> None:
    assert open_backend(url).max_body == DEFAULT_MAX_BODY == 64 << 20


@pytest.mark.parametrize("url", ["fsq:///tmp/x", "vsqs:///tmp/x", "mq:///tmp/x", "sq:///tmp/x", "rfq://localhost"])
def test_protocols_have_no_max_body_unless_it_is_set(url: str) -> None:
    assert open_backend(url).max_body is None
    assert open_backend(f"{url}?max_body=1MiB").max_body == 1 << 20


@pytest.mark.parametrize("text", ["0", "x", "64MB"])
def test_a_max_body_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidURL, match="max_body"):
        open_backend(f"file:///tmp/x?max_body={text}")


def test_http_takes_at_most_one_mib_and_never_more_than_max_body() -> None:
    assert create_app(open_backend("memory:")).memory.body_limit == 1 << 20
    assert create_app(open_backend("memory:"), body_limit=1 << 30).memory.body_limit == 64 << 20
    assert create_app(open_backend("memory:?max_body=1KiB")).memory.body_limit == 1024


@pytest_asyncio.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    async with Harness.fake(f"file://{tmp_path}/root") as harness:
        yield Case(harness, await harness.open())


@pytest.mark.parametrize("scheme", ["file", "vsqs"])
async def test_a_load_with_a_body_that_is_too_large_stages_nothing(tmp_path: Path, scheme: str) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/root?max_body=1KiB")
    writer = bulk.open(backend, "work", "load")
    with pytest.raises(MessageTooLarge):
        await writer.stage("run", 0, "attempt", [[Draft(body=b"small")], [Draft(body=b"x" * 1025)]])
    assert not list((tmp_path / "root").rglob("0.attempt*"))
    await backend.aclose()


async def test_a_file_that_is_too_large_is_tried_again_after_growing_pauses(case: Case, tmp_path: Path) -> None:
    limited = await case.open(max_body="1KiB")
    await case.publish(b"x" * 2000)
    with structlog.testing.capture_logs() as logged:
        for pause in (0.0, 1.1, 2.1, 4.1):
            await case.harness.advance(pause)
            assert await case.lease(by=limited) == []
    assert [entry["event"] for entry in logged] == ["message_too_large"]
    (file,) = (tmp_path / "root" / case.queue / "queue").glob("_*")
    os.truncate(file, 1000)
    assert await case.lease(by=limited) == []
    await case.harness.advance(8.1)
    assert len(await case.lease(by=limited)) == 1


async def test_files_that_are_too_large_cost_a_lease_nothing_once_they_are_known(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = await case.open(max_body="1KiB")
    await case.publish(*[b"x" * 2000] * 300)
    assert await case.lease(by=limited) == []
    opened = 0
    real = os.open

    def counted(*args: object, **options: object) -> int:
        nonlocal opened
        opened += 1
        return real(*args, **options)  # type: ignore[arg-type]

    await case.publish(b"small")
    monkeypatch.setattr(os, "open", counted)
    assert [lease.message.body for lease in await case.lease(10, by=limited)] == [b"small"]
    assert opened <= 5


@pytest.mark.parametrize("scheme", ["file", "fsq", "mq", "vsqs"])
async def test_stats_and_the_metric_count_messages_that_are_too_large_as_blocked(scheme: str, tmp_path: Path) -> None:
    backend, limited = [open_backend(f"{scheme}://{tmp_path}/root?max_body={most}") for most in ("none", "1KiB")]
    try:
        large, _ = await backend.publish("q", [Draft(body=b"x" * 2000), Draft(body=b"small")])
        assert [lease.message.body for lease in await limited.lease("q", 10, 30.0)] == [b"small"]
        assert ((await limited.stats("q")).blocked, (await backend.stats("q")).blocked) == (1, 0)
        assert re.search(r"^qworker_queue_blocked\{.*\} 1\.0$", await exposed(limited), re.MULTILINE)
        # Another process does not lose the count, and a message that is gone is not counted.
        await limited.aclose()
        assert (await limited.stats("q")).blocked == 1
        assert await limited.remove("q", Selection(ids=[large])) == 1
        assert (await limited.stats("q")).blocked == 0
    finally:
        await backend.aclose()
        await limited.aclose()


async def exposed(backend: Backend) -> str:
    """Return the metrics of the queue `q`, as the health port shows them."""
    collector = WorkerCollector([], [], [await backend.stats("q")])
    return format_metrics(collector, own_metrics=False)[0].decode()


@pytest.mark.parametrize("scheme", ["redis", "rfq"])
async def test_doctor_finds_messages_that_are_too_large_on_redis(scheme: str) -> None:
    with RedisServer(port=free_port()) as server:
        url = server.tcp_url.replace("redis", scheme, 1)
        backend, limited = open_backend(url), open_backend(f"{url}?max_body=1KiB")
        try:
            # A map has only text, so `rfq:` keeps these bodies in base64.
            fits = bytes(range(128, 256)) * 8
            await backend.publish("q", [Draft(body=body) for body in (fits + b"x", b"x" * 1026, fits)])
            leases = await limited.lease("q", 10, 30.0)
            assert [lease.message.body for lease in leases] == [fits]
            # On `redis:` the check counts the few bytes that are stored with a body.
            await limited.publish("q", [Draft(body=fits if scheme == "rfq" else b"x" * 512, delay=100.0)])
        finally:
            await backend.aclose()
            await limited.aclose()
        checks = await run_checks(f"{url}?max_body=1KiB")
    (check,) = [check for check in checks if check.name == "message sizes"]
    assert check.health is CheckStatus.WARN
    assert check.detail.startswith("2 messages with more than max_body=1KiB not leased")


@pytest_asyncio.fixture(params=["file", "fsq", "mq", "vsqs"])
async def any_case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    async with Harness.fake(f"{request.param}://{tmp_path}/root") as harness:
        yield Case(harness, await harness.open())


async def test_find_returns_a_message_that_is_too_large_without_its_body_and_browse_leaves_it_out(
    any_case: Case,
) -> None:
    case = any_case
    limited = await case.open(max_body="1KiB")
    large, small = await case.publish(b"x" * 2000, b"small")
    (found,) = await limited.find(case.queue, [large])
    assert found.message.body == b""
    assert "2000 bytes" in (found.error or "")
    for query in (Query(State.READY), Query(State.READY, newest=True), Query(State.READY, part=make_shares(1)[0])):
        pages = [page async for page in limited.browse(case.queue, query)]
        assert [stored.message.id for page in pages for stored in page] == [small]
    assert (await limited.stats(case.queue)).ready == 2
    # In other states too.
    leases = await case.lease(2)
    ends = [Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="why") for lease in leases]
    assert [stored.message.id for stored in await case.messages(State.LEASED, by=limited)] == [small]
    assert await case.backend.settle(ends) == []
    assert [stored.message.id for stored in await case.messages(State.FAILED, by=limited)] == [small]
    (found,) = await limited.find(case.queue, [large])
    assert (found.state, found.message.body) == (State.FAILED, b"")
    assert "2000 bytes" in (found.error or "")


@pytest.fixture
def reading_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that have read slices of bodies."""
    threads: set[int] = set()
    real = body_slices._read_slice

    def noted(file: body_slices.OwnDescriptor, offset: int) -> bytes:
        threads.add(threading.get_ident())
        return real(file, offset)

    monkeypatch.setattr(body_slices, "_read_slice", noted)
    return threads


async def test_a_large_body_is_read_off_the_loop_and_whole(any_case: Case, reading_threads: set[int]) -> None:
    case = any_case
    await case.publish(BIG, b"small")
    (lease,) = await case.lease(10)
    assert lease.message.body == BIG
    assert reading_threads
    assert threading.get_ident() not in reading_threads
    assert await case.leased_bodies() == [b"small"]
    assert await case.backend.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []


async def test_browse_and_find_read_a_large_body_off_the_loop_and_whole(
    any_case: Case, reading_threads: set[int]
) -> None:
    case = any_case
    large, small = await case.publish(BIG, b"small")
    queries = [Query(State.READY), Query(State.READY, newest=True), Query(State.READY, part=make_shares(1)[0])]
    for query in queries:
        found = [stored.message async for page in case.backend.browse(case.queue, query) for stored in page]
        assert {message.id: message.body for message in found} == {large: BIG, small: b"small"}
    (one,) = await case.backend.find(case.queue, [large])
    assert one.message.body == BIG
    assert StoredMessage.from_json(one.to_json()) == one
    assert reading_threads
    assert threading.get_ident() not in reading_threads


@pytest.mark.parametrize("scheme", ["file", "mq"])
async def test_a_client_s_lease_with_a_large_body_is_found_without_the_loop(
    scheme: str, tmp_path: Path, reading_threads: set[int]
) -> None:
    backend, other = [open_backend(f"{scheme}://{tmp_path}/root", remote_leases=True) for _ in range(2)]
    try:
        await backend.publish("q", [Draft(body=BIG)])
        (lease,) = await backend.lease("q", 1, 30.0)
        reading_threads.clear()
        assert other.remote_leases is not None
        found = await other.remote_leases.find("q", lease.message.id, lease.token)
        assert found is not None
        assert found.message.body == BIG
        assert reading_threads
        assert threading.get_ident() not in reading_threads
        # Nothing keeps the message's lock.
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
    finally:
        await backend.aclose()
        await other.aclose()


@pytest.mark.parametrize("scheme", ["file", "fsq", "mq", "vsqs"])
async def test_a_large_body_that_cannot_be_read_blocks_nothing_behind_it(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/root")

    def broken(file: body_slices.OwnDescriptor, offset: int) -> bytes:
        raise OSError(errno.EIO, "broken")

    try:
        await backend.publish("q", [Draft(body=BIG), Draft(body=b"small")])
        monkeypatch.setattr(body_slices, "_read_slice", broken)
        leases = await backend.lease("q", 10, 30.0) or await backend.lease("q", 10, 30.0)
        assert [lease.message.body for lease in leases] == [b"small"]
        stats = await backend.stats("q")
        assert (stats.leased, stats.ready + stats.failed) == (1, 1)
    finally:
        await backend.aclose()


async def test_a_lease_that_is_cancelled_while_it_reads_a_large_body_holds_nothing(
    any_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = any_case
    reading, may_read = threading.Event(), threading.Event()
    real = body_slices._read_slice

    def held(file: body_slices.OwnDescriptor, offset: int) -> bytes:
        reading.set()
        assert may_read.wait(30)
        return real(file, offset)

    monkeypatch.setattr(body_slices, "_read_slice", held)
    await case.publish(b"small", BIG)
    before = len(os.listdir("/proc/self/fd"))
    call = asyncio.create_task(case.lease(10))
    assert await asyncio.to_thread(reading.wait, 30)
    call.cancel()
    may_read.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await case.stats()).leased == 0
    monkeypatch.setattr(body_slices, "_read_slice", real)
    assert await case.leased_bodies() == [b"small", BIG]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scheme", ["file", "fsq", "mq", "vsqs", "memory", "redis", "rfq"])
async def test_a_burst_ends_with_a_line_that_counts_the_messages_that_it_cannot_lease(
    scheme: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        url = f"{scheme}://{tmp_path}/root"
        if scheme in {"redis", "rfq"}:
            server = stack.enter_context(RedisServer(port=free_port()))
            url = server.tcp_url.replace("redis", scheme, 1)
        elif scheme == "memory":
            url = f"memory://{tmp_path.name}"
        backend = open_backend(url)
        await backend.publish("q", [Draft(body=b"x" * 2000), Draft(body=b"small"), Draft(body=b"y" * 3000)])
        await backend.aclose()
        tasks = Tasks(f"{url}?max_body=1KiB")
        ran: list[bytes] = []

        @tasks.raw_handler(queue="q")
        async def take(message: Message) -> None:
            ran.append(message.body)

        with structlog.testing.capture_logs() as lines:
            await Worker(tasks, WorkerOptions(burst=True, queues=("q",))).run()
    assert ran == [b"small"]
    (line,) = [line for line in lines if line["event"] == "messages_left"]
    assert (line["queue"], line["blocked"]) == ("q", 2)
    assert "qworker doctor" in line["reason"]


@pytest.mark.timeout(60)
# An item of `fsq:` is not moved when it is leased.
@pytest.mark.parametrize("scheme", ["file", "mq", "vsqs"])
async def test_a_burst_ends_though_a_file_cannot_be_moved(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/root"
    backend = open_backend(url)
    await backend.publish("q", [Draft(body=b"stuck")])
    ready = {"vsqs": "q", "mq": "queues/q"}.get(scheme, "q/queue")
    (stuck,) = [path for path in (tmp_path / "root" / ready).iterdir() if path.is_file()]
    await backend.publish("q", [Draft(body=b"runs")])
    await backend.aclose()
    tasks = Tasks(url)
    ran: list[bytes] = []

    @tasks.raw_handler(queue="q")
    async def take(message: Message) -> None:
        ran.append(message.body)

    make_immutable(stuck, True)
    try:
        with structlog.testing.capture_logs() as lines:
            await Worker(tasks, WorkerOptions(burst=True, queues=("q",))).run()
    finally:
        make_immutable(stuck, False)
    assert ran == [b"runs"]
    assert [line["blocked"] for line in lines if line["event"] == "messages_left"] == [1]
    (check,) = [check for check in await run_checks(url) if check.name == "blocked message"]
    assert stuck.name in check.detail
