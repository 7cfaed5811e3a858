"""A sealed load is part of its queue: it is leased, counted, read and removed where it was staged."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from qworker import bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.bulk import Manifest, StagedPartition, message_id
from qworker.bulk.load_files import LoadFiles
from qworker.clock import SYSTEM_CLOCK
from qworker.kit.directory import in_use
from qworker.kit.directory.blocked import BlockedRecords
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker_file.layout import open_queue
from qworker_file.load_window import LoadWindow
from qworker_file.loads import staged_files
from tests.support.waiting import give_turns

PARTS, ROWS = 3, 300


class Spool:
    """One directory, and as many processes' views of it as a test wants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.queue = root / "q"
        self._opened: list[Backend] = []

    def open(self, options: str = "") -> Backend:
        self._opened.append(open_backend(f"file://{self.root}?sync=off{options}"))
        return self._opened[-1]

    async def load(self, name: str = "job", parts: int = PARTS, rows: int = ROWS, options: str = "") -> None:
        writer = bulk.open(self.open(options), "q", name)
        await writer.commit(0, await stage(writer, parts, rows))

    def staged(self) -> list[Path]:
        return [path for path in self.queue.glob("load-*/*/*/*") if path.is_file()]

    async def aclose(self) -> None:
        for backend in self._opened:
            await backend.aclose()


async def stage(writer: bulk.BulkWriter, parts: int = PARTS, rows: int = ROWS) -> list[StagedPartition]:
    return [
        await writer.stage(
            "r1", part, "a", [[Draft(body=f"{writer.name}.{part}.{row}".encode()) for row in range(rows)]]
        )
        for part in range(parts)
    ]


def rows_of(name: str = "job", parts: int = PARTS, rows: int = ROWS) -> list[str]:
    return [f"{name}.{part}.{row}" for part in range(parts) for row in range(rows)]


def bodies(leases: list[Lease]) -> list[str]:
    return [lease.message.body.decode() for lease in leases]


async def take(backend: Backend, limit: int = 10_000) -> list[str]:
    leases = await backend.lease("q", limit, 60.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    return bodies(leases)


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = Spool(tmp_path / "spool")
    try:
        yield spool
    finally:
        await spool.aclose()


# -- consuming ---------------------------------------------------------------------------------------------------------


async def test_a_commit_moves_no_message_and_a_lease_takes_each_from_where_it_was_staged(spool: Spool) -> None:
    await spool.load()
    assert len(spool.staged()) == PARTS * ROWS
    assert not os.listdir(spool.queue / "queue")
    assert await take(spool.open()) == rows_of()
    assert not list(spool.queue.glob("load-*")), "nothing of a finished load is left"
    assert not list(spool.queue.glob(".gone-*"))


async def test_messages_of_loads_and_others_are_leased_in_the_order_of_publishing(spool: Spool) -> None:
    backend = spool.open()
    await backend.publish("q", [Draft(body=b"before")])
    await spool.load("one", 1, 3)
    await backend.publish("q", [Draft(body=b"between")])
    await spool.load("two", 1, 3)
    await backend.publish("q", [Draft(body=b"after")])
    expected = ["before", *rows_of("one", 1, 3), "between", *rows_of("two", 1, 3), "after"]
    assert await take(spool.open()) == expected


async def test_a_load_is_found_in_a_queue_that_was_closed_because_others_are_used(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "_MOST_OPEN", 8)
    backend = spool.open()
    others = [f"other-{number}" for number in range(20)]
    for queue in ("q", *others):
        await backend.create(queue)
        assert await backend.lease(queue, 1, 60.0) == []
    # Twice: the second time, the queue is known to be empty.
    for _ in range(2):
        assert await backend.lease("q", 1, 60.0) == []
        for queue in others:
            assert await backend.lease(queue, 1, 60.0) == []
    await spool.load("job", 1, 3)
    assert await take(backend) == rows_of("job", 1, 3)


async def test_a_waiting_worker_is_woken_by_the_seal(spool: Spool) -> None:
    backend = spool.open()
    await backend.create("q")
    waiting = asyncio.create_task(backend.lease("q", 10, 60.0, timeout=60.0))
    await give_turns()
    await spool.load("job", 1, 3)
    assert bodies(await waiting) == rows_of("job", 1, 3)


async def test_a_worker_with_a_backlog_finds_a_new_load(spool: Spool) -> None:
    backend = spool.open()
    await backend.publish("q", [Draft(body=b"a")])
    assert await take(backend, 1) == ["a"]
    await spool.load("job", 1, 200)
    assert await take(backend, 50) == rows_of("job", 1, 200)[:50]
    await backend.publish("q", [Draft(body=b"z")])
    assert await take(backend) == [*rows_of("job", 1, 200)[50:], "z"]


async def test_a_load_that_no_watch_reports_is_found_by_a_listing(spool: Spool) -> None:
    # As one of another host, on a shared file system.
    await spool.open().create("q")
    root = os.open(spool.root, os.O_RDONLY)
    files = open_queue(root, "q")
    assert files is not None
    try:
        window = LoadWindow(files, SYSTEM_CLOCK, BlockedRecords(files.base), local_time=False)
        window.refresh(1e9)
        await spool.load("job", 1, 3)
        window.refresh(1e9)
        assert window.first() is None
        window.refresh(0.0)
        first = window.first()
        assert first is not None
        assert "~job:0:0:0_" in first[0]
        window.close()
    finally:
        files.close()
        os.close(root)


async def test_workers_that_share_a_load_take_each_message_once(spool: Spool) -> None:
    await spool.load(rows=1000)
    workers = [spool.open() for _ in range(4)]
    taken: Counter[str] = Counter()

    async def work(backend: Backend) -> None:
        while True:
            leases = await backend.lease("q", 7, 60.0)
            taken.update(bodies(leases))
            await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
            if not leases and not (await backend.stats("q")).ready:
                return
            await asyncio.sleep(0)

    await asyncio.gather(*map(work, workers))
    assert taken == Counter(rows_of(rows=1000))


async def test_a_message_of_a_load_that_is_released_or_retried_returns_as_any_other(spool: Spool) -> None:
    await spool.load("job", 1, 3)
    backend = spool.open()
    released, retried, failed = await backend.lease("q", 3, 60.0)
    await backend.settle(
        [
            Settlement(lease=released, action=SettleAction.RELEASE),
            Settlement(lease=retried, action=SettleAction.FAIL_TMP, error="e"),
            Settlement(lease=failed, action=SettleAction.FAIL_PERM, error="e"),
        ]
    )
    again = await spool.open().lease("q", 3, 60.0)
    assert [(lease.message.id, lease.message.tries) for lease in again] == [
        (message_id("job", 0, 0, 0), 0),
        (message_id("job", 0, 0, 1), 1),
    ]
    assert (await backend.stats("q")).failed == 1


async def test_a_file_of_a_load_that_is_too_large_waits_and_blocks_nothing(spool: Spool) -> None:
    await spool.load("job", 1, 3)
    next(path for path in spool.staged() if path.name.startswith("000000001")).write_bytes(b"x" * 100)
    assert await take(spool.open("&max_body=50")) == ["job.0.0", "job.0.2"]
    assert await take(spool.open()) == ["x" * 100]


async def test_a_damaged_seal_blocks_only_its_load(spool: Spool) -> None:
    await spool.load("bad", 1, 3)
    next(spool.queue.glob("load-bad*/seal")).write_bytes(b"{")
    await spool.load("good", 1, 3)
    assert await take(spool.open()) == rows_of("good", 1, 3)
    assert len(spool.staged()) == 3


async def test_a_listing_of_a_load_lets_other_tasks_run_between_its_chunks(spool: Spool) -> None:
    writer = bulk.open(spool.open(), "q", "job")
    await writer.commit(0, await stage(writer, 12, 1))
    queue = open_queue(os.open(spool.root, os.O_RDONLY), "q")
    assert queue is not None
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count_turns())
    chunks = 0
    with queue:
        async for _ in staged_files(queue.base, local_time=False, on_trouble=lambda _path, _reason: None):
            chunks += 1
    task.cancel()
    assert (chunks, turns >= chunks) == (12, True)


@pytest.mark.parametrize("damage", ["seal", "partition"])
async def test_a_load_that_cannot_be_read_hides_no_other_message(spool: Spool, damage: str) -> None:
    await spool.load("bad", 1, 3)
    path = next(spool.queue.glob("load-bad*/seal" if damage == "seal" else "load-bad*/0*"))
    if damage == "partition":
        path.rename(path.with_name("elsewhere"))
        path.write_bytes(b"")
    else:
        path.write_bytes(b"{")
    await spool.load("good", 1, 1)
    backend = spool.open()
    ids = await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2"), Draft(body=b"3")])
    with structlog.testing.capture_logs() as logs:
        stats = await backend.stats("q")
    assert (stats.ready, stats.blocked) == (4, 1)
    assert [line["event"] for line in logs] == ["message_blocked"]
    assert [stored.message.id for stored in await backend.find("q", ids)] == ids
    assert [one.id for one in await backend.cancel("q", Selection(ids=ids[:1]))] == ids[:1]
    assert await backend.remove("q", Selection(ids=ids[1:2])) == 1
    assert await backend.remove("q", Selection(state=State.READY)) == 2
    assert len(list(spool.queue.glob("load-bad*/*/*/*"))) == 3


# -- reading and changing ----------------------------------------------------------------------------------------------


async def test_stats_browse_parts_and_find_see_the_messages_of_a_sealed_load(spool: Spool) -> None:
    await spool.load()
    backend = spool.open()
    assert (await backend.stats("q")).ready == PARTS * ROWS
    found = [each async for page in backend.browse("q", Query(State.READY)) for each in page]
    assert [each.message.body.decode() for each in found] == rows_of()
    newest = [each async for page in backend.browse("q", Query(State.READY, newest=True, limit=1)) for each in page]
    assert [each.message.body.decode() for each in newest] == rows_of()[-1:]
    shares = [
        each.message.body.decode()
        for part in await backend.parts("q", State.READY, 4)
        async for page in backend.browse("q", Query(State.READY, part=part))
        for each in page
    ]
    assert sorted(shares) == sorted(rows_of())
    [one] = await backend.find("q", [message_id("job", 0, 2, 7)])
    assert (one.message.body, one.state) == (b"job.2.7", State.READY)


async def test_an_id_of_a_sealed_load_is_taken(spool: Spool) -> None:
    await spool.load("job", 1, 3)
    backend = spool.open()
    await backend.publish("q", [Draft(body=b"other", id=message_id("job", 0, 0, 1))])
    assert await take(backend) == rows_of("job", 1, 3)


async def test_messages_of_a_sealed_load_can_be_removed_and_the_rest_is_leased(spool: Spool) -> None:
    await spool.load("job", 1, 3)
    backend = spool.open()
    assert await backend.remove("q", Selection(ids=[message_id("job", 0, 0, 1)])) == 1
    assert await take(backend, 1) == ["job.0.0"]
    assert await backend.remove("q", Selection(state=State.READY)) == 1
    assert await take(spool.open()) == []
    assert not list(spool.queue.glob("load-*"))


async def test_messages_of_a_sealed_load_can_be_cancelled_and_the_rest_is_leased(spool: Spool) -> None:
    await spool.load("job", 1, 4)
    backend = spool.open()
    one = Selection(ids=[message_id("job", 0, 0, 1)])
    assert [found.state for found in await backend.cancel("q", one)] == [State.READY]
    assert await take(backend, 1) == ["job.0.0"]
    assert len(await backend.cancel("q", Selection(state=State.READY))) == 2
    assert await take(spool.open()) == []
    assert (await backend.stats("q")).failed == 3
    assert [found.state for found in await backend.cancel("q", one)] == [State.FAILED]


# -- programs that see only queue/ and delay/ --------------------------------------------------------------------------


async def test_with_fsq_the_commit_renames_every_message_into_the_queue(spool: Spool) -> None:
    await spool.load(options="&fsq=1")
    assert len(os.listdir(spool.queue / "queue")) == PARTS * ROWS
    assert not list(spool.queue.glob("load-*"))
    assert await take(spool.open()) == rows_of()


async def test_a_reaper_with_fsq_moves_a_load_that_another_process_has_sealed(spool: Spool) -> None:
    await spool.load()
    taken = await take(spool.open(), 10)
    mover = spool.open("&fsq=1")
    while list(spool.queue.glob("load-*")):
        await mover.reap("q")
    assert len(os.listdir(spool.queue / "queue")) == PARTS * ROWS - 10
    assert taken + await take(spool.open()) == rows_of()


async def test_what_is_no_message_of_a_load_is_set_aside_and_the_mover_ends(spool: Spool) -> None:
    await spool.load("job", 1, 3)
    (chunk,) = spool.queue.glob("load-*/*/*")
    (chunk / "note.txt").write_bytes(b"by a user")
    (chunk.parent / "strange").write_bytes(b"no directory")
    mover = spool.open("&fsq=1")
    async with asyncio.timeout(20):
        while list(spool.queue.glob("load-*")):
            await mover.reap("q")
    assert await take(spool.open()) == rows_of("job", 1, 3)
    found = [each for each in (spool.queue / "fail").iterdir() if not each.name.endswith(".reason")]
    assert sorted(each.read_bytes() for each in found) == [b"by a user", b"no directory"]


async def test_a_damaged_seal_does_not_keep_a_reaper_with_fsq_from_expired_leases(spool: Spool) -> None:
    holder = spool.open()
    await holder.publish("q", [Draft(body=b"held")])
    assert bodies(await holder.lease("q", 1, 60.0)) == ["held"]
    await spool.load("bad", 1, 3)
    next(spool.queue.glob("load-bad*/seal")).write_bytes(b"{")
    await holder.aclose()
    mover = spool.open("&fsq=1")
    await wait_until(lambda: mover.reap("q"))
    assert await take(mover) == ["held"]


async def test_a_mover_and_workers_share_a_load_and_each_message_is_leased_once(spool: Spool) -> None:
    await spool.load(rows=1000)
    mover, workers = spool.open("&fsq=1"), [spool.open() for _ in range(2)]
    taken: Counter[str] = Counter()

    async def work(backend: Backend) -> None:
        while (await backend.stats("q")).ready:
            leases = await backend.lease("q", 7, 60.0)
            taken.update(bodies(leases))
            await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
            await asyncio.sleep(0)

    await asyncio.gather(mover.reap("q"), *map(work, workers))
    assert taken == Counter(rows_of(rows=1000))


async def test_a_seal_of_an_older_release_which_does_not_say_what_is_delayed_is_moved(spool: Spool) -> None:
    writer = bulk.open(spool.open(), "q", "job")
    parts = [await writer.stage("r1", 0, "a", [[Draft(body=b"later", delay=900), Draft(body=b"now")]])]
    older = [StagedPartition(run="r1", partition=0, attempt="a", count=2)]
    manifest = await writer.seal(0, older)
    assert manifest is not None
    assert parts[0].delayed == 1
    await writer.publish(manifest)
    assert await take(spool.open()) == ["now"]
    assert len(await list_messages(spool.open(), "q", Query(State.DELAYED))) == 1


# -- crashes and other processes ---------------------------------------------------------------------------------------


async def test_a_late_publisher_of_a_load_that_workers_have_finished_adds_nothing(spool: Spool) -> None:
    writer = bulk.open(spool.open(), "q", "job")
    manifest = await writer.seal(0, await stage(writer))
    assert manifest is not None
    await writer.publish(manifest)
    assert await take(spool.open()) == rows_of()
    for _ in range(2):
        await bulk.open(spool.open(), "q", "job").publish(manifest)
    assert await take(spool.open()) == []
    assert not list(spool.queue.glob("load-*"))


async def test_an_attempt_that_still_writes_after_the_seal_is_never_seen(spool: Spool) -> None:
    backend = spool.open()
    writer = bulk.open(backend, "q", "job")
    counting = await stage(writer, 1, 3)
    await writer.stage("r1", 0, "lost", [[Draft(body=b"zombie")]])
    await writer.commit(0, counting)
    # An attempt that has the directory of the run open writes where it is now.
    run = next(spool.queue.glob("load-*"))
    (run / "0.late" / "000000000").mkdir(parents=True)
    (run / "0.late" / "000000000" / "000000000.0_0").write_bytes(b"zombie")
    # Another one creates the run again.
    await writer.stage("r1", 0, "later", [[Draft(body=b"zombie")]])
    assert (await backend.stats("q")).ready == 3
    assert await take(spool.open()) == rows_of("job", 1, 3)
    assert not list(spool.queue.glob("load-*"))
    assert await take(spool.open()) == []


async def test_a_run_that_was_partly_moved_by_an_older_release_is_completed(spool: Spool) -> None:
    writer = bulk.open(spool.open(), "q", "job")
    manifest = await writer.seal(0, await stage(writer))
    assert isinstance(manifest, Manifest)
    backend = spool.open()
    mover = bulk.open(spool.open("&fsq=1"), "q", "job")
    moving = asyncio.create_task(mover.publish(manifest))
    while not os.listdir(spool.queue / "queue"):
        await asyncio.sleep(0)
    await writer.publish(manifest)
    await moving
    assert sorted(await take(backend)) == sorted(rows_of())


async def test_the_clean_up_of_an_older_release_removes_nothing_of_a_sealed_load(spool: Spool) -> None:
    # It removes the run and the seal of each step that has a mark, and old runs.
    await spool.load()
    opened = os.open(spool.queue / "tmp", os.O_RDONLY)
    marks = os.open(spool.queue / "names", os.O_RDONLY)
    try:
        files = LoadFiles(opened, marks, "job", mode=0o700, durable=False)
        manifest = Manifest(
            step=0, sealed_at=1.0, partitions=tuple(await stage(bulk.open(spool.open(), "q", "job"), 1, 1))
        )
        files.clean(manifest)
        files.discard("r1")
    finally:
        os.close(opened)
        os.close(marks)
    assert await take(spool.open()) == rows_of()
