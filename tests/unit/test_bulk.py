"""Bulk publishing on every backend: all of a job's messages, each once, or none."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from qworker import bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.bulk import BulkWriter, StagedPartition, check_load, message_id
from qworker.bulk.spool import BATCH, SpooledBulkWriter
from qworker.errors import BackendError, BackendUnavailable, InvalidName, NotSupported, UsageError
from qworker.message import Draft, Query, SettleAction, Settlement, State
from qworker.unique import Unique
from qworker_file.bulk import FileBulkWriter
from qworker_redis.bulk import RedisBulkWriter
from tests.support.servers import RedisServer

NATIVE = ("file", "redis")
EVERY = (*NATIVE, "vsqs", "mq", "sq", "memory")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class Store:
    """One store, and as many processes' views of it as a test wants."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._opened: list[Backend] = []

    def backend(self) -> Backend:
        self._opened.append(open_backend(self.url))
        return self._opened[-1]

    def writer(self, name: str = "job", queue: str = "q") -> BulkWriter:
        return bulk.open(self.backend(), queue, name, folder=self.folder)

    async def bodies(self) -> list[str]:
        """What can be seen, in any state."""
        backend = self.backend()
        if "q" not in await backend.queues():
            return []
        found = [each for state in State for each in await list_messages(backend, "q", Query(state))]
        return [each.message.body.decode() for each in found]

    async def take(self, limit: int = 10_000) -> list[str]:
        """Lease and ack."""
        backend = self.backend()
        leases = await backend.lease("q", limit, 60.0)
        await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
        return [lease.message.body.decode() for lease in leases]

    async def aclose(self) -> None:
        for backend in self._opened:
            await backend.aclose()


@contextmanager
def commands(redis: RedisServer) -> Generator[Any]:
    """A client of the server, whose methods have no complete types."""
    with redis.client() as client:
        yield client


@asynccontextmanager
async def opened(kind: str, folder: Path, redis: RedisServer) -> AsyncGenerator[Store]:
    url = {
        "file": f"file://{folder}/spool?sync=off",
        "redis": redis.url,
        "memory": f"memory://{folder.name}",
    }.get(kind, f"{kind}://{folder}/spool")
    if kind == "redis":
        with commands(redis) as client:
            client.flushall()
    store = Store(url, folder / "staged")
    try:
        yield store
    finally:
        await store.aclose()


@pytest.fixture(params=EVERY)
async def store(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path, redis) as store:
        yield store


@pytest.fixture(params=NATIVE)
async def native(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path, redis) as store:
        yield store


def drafts(part: int, rows: int) -> list[list[Draft]]:
    """In batches, as Spark gives them."""
    made = [Draft(body=f"{part}.{row}".encode(), task="thumb") for row in range(rows)]
    return [made[first : first + 40] for first in range(0, rows, 40)]


async def stage(writer: BulkWriter, run: str, parts: int = 3, rows: int = 50) -> list[StagedPartition]:
    return [await writer.stage(run, part, "a", drafts(part, rows)) for part in range(parts)]


def rows_of(parts: int = 3, rows: int = 50) -> list[str]:
    return [f"{part}.{row}" for part in range(parts) for row in range(rows)]


# -- all or nothing ----------------------------------------------------------------------------------------------------


async def test_nothing_is_seen_before_the_commit_and_everything_once_after_it(store: Store) -> None:
    writer = store.writer()
    parts = await stage(writer, "r1")
    assert await store.bodies() == []
    published = await writer.commit(0, parts)
    assert (published.rows, published.step) == (150, 0)
    assert sorted(await store.bodies()) == sorted(rows_of())


async def test_of_two_attempts_of_one_partition_one_counts(store: Store) -> None:
    writer, speculative = store.writer(), store.writer()
    slow, quick = await asyncio.gather(
        writer.stage("r1", 0, "slow", drafts(0, 50)), speculative.stage("r1", 0, "quick", drafts(0, 50))
    )
    assert slow.count == quick.count == 50
    await writer.commit(0, [quick])
    assert sorted(await store.bodies()) == sorted(rows_of(1))


async def test_an_aborted_run_leaves_nothing(native: Store, tmp_path: Path, redis: RedisServer) -> None:
    writer = native.writer()
    await stage(writer, "r1")
    await writer.discard("r1")
    assert await native.bodies() == []
    assert not list(tmp_path.glob("spool/q/tmp/*"))
    with commands(redis) as client:
        assert not [key for key in client.scan_iter() if b":stage:" in key]


async def test_an_attempt_that_fails_leaves_nothing(store: Store, tmp_path: Path) -> None:
    def rows() -> Iterator[Sequence[Draft]]:
        yield from drafts(0, 50)
        raise ValueError("the source ends early")

    writer = store.writer()
    with pytest.raises(ValueError, match="early"):
        await writer.stage("r1", 0, "a", rows())
    assert await store.bodies() == []
    staged = [path for path in (*tmp_path.glob("spool/q/tmp/**/*"), *tmp_path.glob("staged/**/*")) if path.is_file()]
    assert [path.name for path in staged if not path.name.startswith("lock-")] == []


# -- once --------------------------------------------------------------------------------------------------------------


async def test_the_same_job_run_again_doubles_nothing_whatever_it_stages(store: Store) -> None:
    first = store.writer()
    await first.commit(0, await stage(first, "r1"))
    taken = await store.take(20)
    again = store.writer()
    published = await again.commit(0, await stage(again, "r2", parts=5, rows=7))
    assert published.rows == 150
    assert sorted(taken + await store.take()) == sorted(rows_of())


async def test_a_run_that_meets_a_seal_publishes_what_is_sealed_and_discards_its_own(store: Store) -> None:
    dead, alive = store.writer(), store.writer()
    assert await dead.seal(0, await stage(dead, "dead")) is not None
    parts = [await alive.stage("alive", 0, "a", [[Draft(body=b"other")]])]
    await alive.commit(0, parts)
    assert sorted(await store.bodies()) == sorted(rows_of())
    assert await alive.sealed(0) is None
    assert await dead.done(0) is not None


async def test_publishers_of_one_seal_at_the_same_time_double_nothing(store: Store) -> None:
    writer = store.writer()
    manifest = await writer.seal(0, await stage(writer, "r1", parts=4, rows=300))
    assert manifest is not None
    others = [store.writer() for _ in range(3)]
    await asyncio.gather(*[each.publish(manifest) for each in (writer, *others)])
    assert sorted(await store.bodies()) == sorted(rows_of(4, 300))


async def test_a_late_publisher_of_a_seal_that_is_done_adds_nothing(store: Store) -> None:
    writer = store.writer()
    manifest = await writer.seal(0, await stage(writer, "r1"))
    assert manifest is not None
    await writer.publish(manifest)
    assert sorted(await store.take()) == sorted(rows_of())
    await store.writer().publish(manifest)
    assert await store.bodies() == []


async def test_steps_rise_and_a_repetition_of_an_earlier_one_adds_nothing(store: Store) -> None:
    writer = store.writer()
    await writer.commit(4, await stage(writer, "r1", parts=1, rows=5))
    await writer.commit(5, await stage(writer, "r2", parts=1, rows=6))
    for step in (5, 4, 0):
        await writer.commit(step, await stage(writer, f"again-{step}", parts=1, rows=3))
    done = await writer.done(4)
    assert done is not None
    assert done.step == 5
    assert await writer.done(6) is None
    assert len(await store.bodies()) == 11


async def test_jobs_of_other_names_and_queues_are_others(store: Store) -> None:
    for job, queue in (("a", "q"), ("b", "q"), ("a", "q2")):
        writer = store.writer(job, queue)
        await writer.commit(0, await stage(writer, "r1", parts=1, rows=2))
    assert len(await store.bodies()) == 4


async def test_a_job_without_rows_is_done_too(store: Store) -> None:
    writer = store.writer()
    parts = [await writer.stage("r1", 0, "a", [])]
    assert (await writer.commit(0, parts)).rows == 0
    assert await writer.done(0) is not None


async def test_a_commit_whose_staged_rows_are_gone_publishes_nothing_and_says_so(store: Store) -> None:
    writer = store.writer()
    parts = await stage(writer, "r1")
    await writer.discard("r1")
    with pytest.raises(BackendError, match="not staged any more"):
        await writer.commit(0, parts)
    assert await store.bodies() == []
    await writer.commit(0, await stage(writer, "r2"))
    assert len(await store.bodies()) == 150


async def test_a_forgotten_job_s_name_is_free_again(store: Store) -> None:
    writer = store.writer()
    for run in ("r1", "r2"):
        await writer.commit(0, await stage(writer, run, parts=1, rows=2))
        assert await writer.done(0) is not None
        await writer.forget()
        assert await writer.done(0) is None
        assert sorted(await store.take()) == ["0.0", "0.1"]


# -- what the messages are ---------------------------------------------------------------------------------------------


async def test_ids_say_job_step_partition_and_row(native: Store) -> None:
    writer = native.writer("orders.2026")
    await writer.commit(0, await stage(writer, "r1", parts=2, rows=3))
    backend = native.backend()
    ids = [each.message.id for each in await list_messages(backend, "q", Query(State.READY))]
    assert ids == [message_id("orders.2026", 0, part, row) for part in range(2) for row in range(3)]
    (found,) = await backend.find("q", ["orders.2026:0:1:2"])
    assert found.message.body == b"1.2"
    # And so nobody else stores one of them beside it.
    await backend.publish("q", [Draft(body=b"other", id="orders.2026:0:1:2")])
    assert len(await native.bodies()) == 6


async def test_messages_are_leased_in_the_order_of_partitions_and_rows(native: Store) -> None:
    writer = native.writer()
    late_first = [await writer.stage("r1", part, "a", drafts(part, 200)) for part in (2, 0, 1)]
    await writer.commit(0, late_first)
    assert await native.take() == rows_of(3, 200)


async def test_rows_may_be_due_later(native: Store) -> None:
    writer, due = native.writer(), time.time() + 1000
    batch = [
        Draft(body=b"later", due_at=due),
        Draft(body=b"now"),
        Draft(body=b"past", due_at=1.0),
        Draft(body=b"delay", delay=900),
    ]
    await writer.commit(0, [await writer.stage("r1", 0, "a", [batch])])
    backend = native.backend()
    delayed = await list_messages(backend, "q", Query(State.DELAYED))
    assert [each.message.body for each in delayed] == [b"delay", b"later"]
    assert delayed[1].due_at == pytest.approx(due, abs=0.01)
    assert await native.take() == ["now", "past"]


async def test_priorities_and_pending_keys_count_at_the_commit(tmp_path: Path, redis: RedisServer) -> None:
    async with opened("redis", tmp_path, redis) as store:
        with commands(redis) as client:
            # An older release can have left the key of a message that is gone.
            client.hset("{qworker:q}:keys", "k", "gone")
        writer = store.writer()
        batch = [
            Draft(body=b"low", unique_key="k"),
            Draft(body=b"high", priority=9),
            Draft(body=b"second", unique_key="k"),
        ]
        await writer.commit(0, [await writer.stage("r1", 0, "a", [batch])])
        assert await store.take() == ["high", "low"]


async def test_what_a_directory_has_no_place_for_is_refused_while_staging(tmp_path: Path, redis: RedisServer) -> None:
    async with opened("file", tmp_path, redis) as store:
        for draft in (Draft(body=b"", unique_key="k"), Draft(body=b"", fields={"a": "b"})):
            with pytest.raises(NotSupported, match="file: does not support"):
                await store.writer().stage("r1", 0, "a", [[draft]])


async def test_options_of_a_key_are_refused_while_staging(tmp_path: Path, redis: RedisServer) -> None:
    async with opened("redis", tmp_path, redis) as store:
        draft = Draft(body=b"", unique_key="k", unique=Unique(until="started"))
        with pytest.raises(NotSupported, match="redis: does not support options of unique keys in bulk writes"):
            await store.writer().stage("r1", 0, "a", [[draft]])


async def test_big_bodies_and_long_task_names_arrive_whole(native: Store) -> None:
    writer = native.writer()
    batch = [Draft(body=bytes([row]) * 300_000, task="t" * 190) for row in range(65, 85)]
    await writer.commit(0, [await writer.stage("r1", 0, "a", [batch])])
    assert await native.take() == [chr(row) * 300_000 for row in range(65, 85)]


# -- what nobody finishes ----------------------------------------------------------------------------------------------


async def test_what_a_dead_job_staged_is_swept_and_a_living_or_sealed_job_s_is_not(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with opened("file", tmp_path, redis) as store:
        for job in ("dead", "sealed", "alive"):
            writer = store.writer(job)
            parts = await stage(writer, "r1", parts=2, rows=5)
            if job == "sealed":
                await writer.seal(0, parts)
        tmp, long_ago = tmp_path / "spool/q/tmp", time.time() - 40 * 3600
        for path in [*tmp.rglob("*"), tmp / "staged"]:
            os.utime(path, (long_ago, long_ago))
        # One of its tasks is still at work.
        (tmp / "staged/alive/run-r1/1.a/000000000/000000005.0_0_thumb").write_bytes(b"1.5")
        await store.backend().reap("q")
        assert sorted(path.name for path in (tmp / "staged").iterdir()) == ["alive", "sealed"]
        assert (tmp / "staged/alive/run-r1/0.a").exists()
        writer = store.writer("sealed")
        manifest = await writer.sealed(0)
        assert manifest is not None
        await writer.publish(manifest)
        assert sorted(await store.bodies()) == sorted(rows_of(2, 5))


async def test_what_a_dead_job_staged_in_redis_is_forgotten_and_what_is_sealed_is_not(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with opened("redis", tmp_path, redis) as store:
        writer = store.writer()
        parts = await stage(writer, "r1", parts=2, rows=5)
        with commands(redis) as client:
            lists = [b"{qworker:q}:stage:job/r1/%d.a" % part for part in range(2)]
            assert all(0 < client.ttl(key) <= 36 * 3600 for key in lists)
            await writer.seal(0, parts)
            assert [client.ttl(key) for key in lists] == [-1, -1]
            # And with the queue everything goes.
            await store.backend().delete("q")
            assert list(client.scan_iter()) == []


# -- through a folder --------------------------------------------------------------------------------------------------


async def test_a_resumed_commit_through_a_folder_goes_on_behind_what_is_known_to_be_stored(tmp_path: Path) -> None:
    backend = open_backend(f"memory://{tmp_path.name}")
    writer = SpooledBulkWriter(backend, "q", "job", tmp_path)
    manifest = await writer.seal(0, await stage(writer, "r1", parts=2, rows=3 * BATCH))
    assert manifest is not None
    publish, calls = backend.publish, 0

    async def failing(queue: str, batch: Sequence[Draft]) -> list[str]:
        nonlocal calls
        calls += 1
        if calls in {3, 5}:
            raise BackendUnavailable("away")
        return await publish(queue, batch)

    backend.publish = failing  # type: ignore[method-assign]
    taken: list[str] = []
    for _ in range(3):
        try:
            await writer.publish(manifest)
        except BackendUnavailable:
            # Workers go on meanwhile.
            leases = await backend.lease("q", 10_000, 60.0)
            taken += [lease.message.body.decode() for lease in leases]
            await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    taken += [lease.message.body.decode() for lease in await backend.lease("q", 10_000, 60.0)]
    assert sorted(taken) == sorted(rows_of(2, 3 * BATCH))
    assert list((tmp_path / "q").glob("progress-*")) == []
    await backend.aclose()


def test_a_store_that_can_stage_has_a_writer_of_its_own_and_the_others_spool(tmp_path: Path) -> None:
    urls = {"file": f"file://{tmp_path}/f", "redis": "redis://localhost", "rfq": "rfq://localhost", "memory": "memory:"}
    kinds = {name: type(bulk.open(open_backend(url), "q", "load", tmp_path)) for name, url in urls.items()}
    assert kinds == {
        "file": FileBulkWriter,
        "redis": RedisBulkWriter,
        "rfq": SpooledBulkWriter,
        "memory": SpooledBulkWriter,
    }


def test_a_store_without_a_directory_says_that_it_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="the option `staging_dir`"):
        bulk.open(open_backend("mq+http://127.0.0.1:1"), "q", "job")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a:b", "x" * 65, "a b"])
def test_a_load_s_name_cannot_lead_anywhere_else(name: str) -> None:
    with pytest.raises(InvalidName, match="not a valid load name"):
        check_load(name)
