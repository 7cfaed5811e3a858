from __future__ import annotations

import asyncio
import errno
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import InvalidURL, NotSupported, PublishUncertain, StorageFull
from qworker.kit.segments.state import decode_state
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from qworker_sq import SqBackend, frames

Open = Callable[..., SqBackend]


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[Backend] = []

    def make(query: str = "") -> SqBackend:
        backend = open_backend(f"sq://{tmp_path}/store{query}")
        assert isinstance(backend, SqBackend)
        opened.append(backend)
        return backend

    yield make
    while opened:
        await opened.pop().aclose()


async def publish(backend: Backend, *bodies: bytes, queue: str = "q") -> list[str]:
    return await backend.publish(queue, [Draft(body=body) for body in bodies])


async def take(backend: Backend, limit: int = 100, queue: str = "q") -> list[Lease]:
    return await backend.lease(queue, limit, 1000.0)


async def end(backend: Backend, leases: list[Lease], how: SettleAction = SettleAction.ACK, **options: object) -> None:
    assert await backend.settle([Settlement(lease=one, action=how, **options) for one in leases]) == []  # type: ignore[arg-type]


def bodies(leases: list[Lease]) -> list[bytes]:
    return [lease.message.body for lease in leases]


def topic(tmp_path: Path, queue: str = "q") -> Path:
    return tmp_path / "store" / queue


def state(tmp_path: Path) -> tuple[int, dict[str, int]]:
    write, channels = decode_state((topic(tmp_path) / "state").read_bytes())
    return write, {entry.name.decode(): entry.place for entry in channels.values()}


def segments(tmp_path: Path) -> list[Path]:
    return sorted(topic(tmp_path).glob("*.q"))


async def test_each_channel_gets_every_message_written_after_its_creation(store: Open) -> None:
    first = store("?channel=first")
    await publish(first, b"1")
    second = store("?channel=second")
    await second.create("q")
    await publish(first, b"2", b"3")
    assert bodies(await take(first)) == [b"1", b"2", b"3"]
    assert bodies(await take(second)) == [b"2", b"3"]


async def test_settling_in_one_channel_changes_nothing_in_another(store: Open) -> None:
    first, second = store("?channel=first"), store("?channel=second")
    await second.create("q")
    await publish(first, b"1", b"2")
    await end(first, await take(first))
    assert (await first.stats("q")).ready == 0
    assert (await second.stats("q")).ready == 2
    assert await second.remove("q", Selection(state=State.READY)) == 2


async def test_the_position_moves_past_the_contiguous_acked_prefix_only(store: Open, tmp_path: Path) -> None:
    backend = store()
    ids = await publish(backend, b"1", b"2", b"3", b"4")
    leases = await take(backend)
    offsets = [int(one.partition("-")[2]) for one in ids]
    await end(backend, leases[1:2])
    assert state(tmp_path)[1]["default"] & 0xFFFFFFFF == offsets[0]
    await end(backend, leases[:1])
    assert state(tmp_path)[1]["default"] & 0xFFFFFFFF == offsets[2]
    await end(backend, leases[2:3], SettleAction.FAIL_TMP, delay=500.0)
    await end(backend, leases[3:])
    assert state(tmp_path)[1]["default"] & 0xFFFFFFFF == offsets[2]


async def test_what_was_acked_out_of_order_does_not_come_back_after_a_restart(store: Open) -> None:
    backend = store()
    await publish(backend, b"1", b"2", b"3")
    await end(backend, (await take(backend))[1:2])
    await backend.aclose()
    again = await take(store())
    assert bodies(again) == [b"1", b"3"]
    assert [lease.message.tries for lease in again] == [1, 1]


async def test_a_failed_message_holds_neither_position_nor_segment(store: Open, tmp_path: Path) -> None:
    backend = store("?segment_size=4096")
    await publish(backend, b"bad" * 100)
    await end(backend, await take(backend), SettleAction.FAIL_PERM, error="no")
    for _ in range(5):
        await publish(backend, b"x" * 3000)
        await end(backend, await take(backend))
    await wait_until(lambda: len(segments(tmp_path)) == 1)
    (failed,) = await list_messages(backend, "q", Query(State.FAILED))
    assert (failed.message.body, failed.error) == (b"bad" * 100, "no")
    assert await backend.requeue("q", Selection(state=State.FAILED)) == 1
    await end(backend, await take(backend))
    assert (await backend.stats("q")).failed == 0


async def test_a_full_segment_is_linked_to_the_next(store: Open, tmp_path: Path) -> None:
    backend = store("?segment_size=4096")
    await publish(backend, *[b"%04d" % n * 100 for n in range(20)])
    names = [int(path.stem) for path in segments(tmp_path)]
    assert len(names) == 3
    headers = [struct.unpack_from("<III4xQQ", path.read_bytes()) for path in segments(tmp_path)]
    assert [header[3] for header in headers] == names
    assert [header[4] for header in headers] == [*names[1:], 0]
    assert [header[2] for header in headers] == [32 + 9 * 408, 32 + 9 * 408, 0]
    assert {path.stat().st_size for path in segments(tmp_path)} == {4096}
    assert bodies(await take(backend)) == [b"%04d" % n * 100 for n in range(20)]


async def test_a_segment_lives_until_every_channel_has_left_it(store: Open, tmp_path: Path) -> None:
    fast, slow = store("?segment_size=4096"), store("?segment_size=4096&channel=slow")
    await slow.create("q")
    await publish(fast, *[b"x" * 1000] * 20)
    before = len(segments(tmp_path))
    assert before == 5
    await end(fast, await take(fast))
    assert len(segments(tmp_path)) == before
    await end(slow, await take(slow))
    await wait_until(lambda: len(segments(tmp_path)) == 1)
    await publish(slow, b"after")
    assert bodies(await take(fast)) == bodies(await take(slow)) == [b"after"]


async def test_a_deleted_channel_holds_no_segments(store: Open, tmp_path: Path) -> None:
    gone, backend = store("?segment_size=4096&channel=gone"), store("?segment_size=4096")
    await gone.create("q")
    await publish(backend, *[b"x" * 1000] * 20)
    await end(backend, await take(backend))
    assert len(segments(tmp_path)) == 5
    await gone.delete_channel("q")
    assert len(segments(tmp_path)) == 1
    assert list(state(tmp_path)[1]) == ["default"]


async def test_a_temporary_channel_keeps_no_position(store: Open, tmp_path: Path) -> None:
    backend, watching = store(), store("?temporary=1")
    await publish(backend, b"1")
    assert await take(watching) == []
    await publish(backend, b"2", b"3")
    leases = await take(watching)
    assert bodies(leases) == [b"2", b"3"]
    await end(watching, leases[:1])
    await end(watching, leases[1:], SettleAction.FAIL_PERM, error="no")
    assert [one.error for one in await list_messages(watching, "q", Query(State.FAILED))] == ["no"]
    assert list(state(tmp_path)[1]) == ["default"]
    await watching.aclose()
    assert await take(watching) == []


async def test_a_topic_has_no_more_than_128_channels(store: Open, tmp_path: Path) -> None:
    await store("?sync=off").create("q")
    for number in range(127):
        backend = store(f"?sync=off&channel=c{number}")
        await backend.create("q")
        await backend.aclose()
    with pytest.raises(NotSupported, match="at most 128"):
        await store("?channel=one-too-many").create("q")
    assert len(state(tmp_path)[1]) == 128


async def test_options_that_are_wrong_are_told_in_one_line(tmp_path: Path) -> None:
    for query in (
        "channel=",
        "channel=../x",
        "channel=" + "x" * 33,
        "segment_size=1",
        "segment_size=x",
        "sync=maybe",
        "x=1",
    ):
        with pytest.raises(InvalidURL):
            open_backend(f"sq://{tmp_path}/store?{query}")
    for absent in ({"priority": 1}, {"unique_key": "k"}):
        with pytest.raises(NotSupported):
            await open_backend(f"sq://{tmp_path}/store").publish("q", [Draft(body=b"x", **absent)])  # type: ignore[arg-type]


async def test_a_message_larger_than_a_segment_is_refused_and_costs_no_other(store: Open) -> None:
    backend = store("?segment_size=4096")
    results = await asyncio.gather(publish(backend, b"x" * 5000), publish(backend, b"fits"), return_exceptions=True)
    assert isinstance(results[0], NotSupported)
    assert bodies(await take(backend)) == [b"fits"]
    await publish(backend, b"y" * (4096 - 32 - 8))
    assert bodies(await take(backend)) == [b"y" * 4056]


async def test_records_behind_a_stale_write_position_are_found(store: Open, tmp_path: Path) -> None:
    backend = store("?segment_size=4096")
    await publish(backend, b"0")
    stale = (topic(tmp_path) / "state").read_bytes()[:56]
    await publish(backend, *[b"%d" % n * 500 for n in range(1, 20)])
    await backend.aclose()
    with open(topic(tmp_path) / "state", "r+b") as file:
        file.write(stale)
    again = store()
    await publish(again, b"last")
    assert len(await take(again)) == 21


async def test_a_failed_sync_is_never_called_good(store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = store()
    await publish(backend, b"before")
    (old,) = segments(tmp_path)
    real, failed, synced = os.fdatasync, [], []

    def failing(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name == str(old) and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error")
        synced.append(name)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(PublishUncertain, match="publish it again"):
        await publish(backend, b"unknown")
    await publish(backend, b"after")
    assert failed
    assert str(old) not in synced
    assert len(segments(tmp_path)) == 2
    assert bodies(await take(backend)) == [b"before", b"after"]


async def test_an_ack_whose_sync_failed_can_be_repeated(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = store()
    await publish(backend, b"1")
    leases = await take(backend)
    real = os.fdatasync

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(Exception, match="Input/output error"):
        await end(backend, leases)
    monkeypatch.setattr(os, "fdatasync", real)
    await end(backend, leases)
    await backend.aclose()
    assert await take(store()) == []


async def test_of_a_publish_on_a_full_disk_nothing_appears(
    store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = store("?segment_size=4096")
    await publish(backend, b"before")
    real, writes = os.pwritev, []

    def full(fd: int, buffers: list[bytes], offset: int) -> int:
        writes.append(offset)
        if len(writes) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageFull):
        await publish(backend, *[b"x" * 1000] * 6)
    monkeypatch.setattr(os, "pwritev", real)
    await backend.aclose()
    (topic(tmp_path) / ".qworker" / "boot").unlink()
    again = store()
    assert bodies(await take(again)) == [b"before"]
    await publish(again, b"after")
    assert bodies(await take(again)) == [b"after"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
async def test_a_journal_that_may_grow_no_more_is_rewritten(
    store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    backend = store()
    await publish(backend, b"x")
    leases = await take(backend)
    real, failed = frames.write_all, []

    def full(fd: int, data: bytes, offset: int) -> None:
        if not failed:
            failed.append(fd)
            raise OSError(number, os.strerror(number))
        real(fd, data, offset)

    monkeypatch.setattr(frames, "write_all", full)
    await end(backend, leases)
    assert failed
    await backend.aclose()
    assert await take(store()) == []


PROGRAM = """
import asyncio, sys
from qworker.message import Draft
from qworker.backend.registry import open_backend
async def main(url, what):
    backend = open_backend(url)
    if what == "own":
        leases = await backend.lease("q", 1, 1000.0)
        print(len(leases), flush=True)
        sys.stdin.read()
    else:
        for n in range(int(what)):
            await backend.publish("q", [Draft(body=b"%d" % n)])
        await backend.aclose()
asyncio.run(main(*sys.argv[1:]))
"""


def start(tmp_path: Path, what: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, f"sq://{tmp_path}/store", what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_one_process_leases_and_the_next_takes_over_when_it_dies(store: Open, tmp_path: Path) -> None:
    backend = store()
    await publish(backend, b"1", b"2")
    process = start(tmp_path, "own")
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"1\n"
        assert await take(backend) == []
        assert (await backend.stats("q")).leased == 1
        await publish(backend, b"3")
        process.kill()
        process.wait(30)
        await asyncio.wait_for(backend.wait(["q"], 60.0), 30.0)
        leases = await wait_until(lambda: take(backend))
        assert bodies(leases) == [b"1", b"2", b"3"]
        assert [lease.message.tries for lease in leases] == [1, 0, 0]
    finally:
        process.kill()
        process.communicate()


async def test_processes_that_publish_at_once_lose_and_mix_nothing(store: Open, tmp_path: Path) -> None:
    backend = store("?segment_size=4096")
    await backend.create("q")
    processes = [start(tmp_path, "60") for _ in range(3)]
    try:
        for _ in range(20):
            await publish(backend, b"own")
        for process in processes:
            assert await asyncio.to_thread(process.wait, 50) == 0
        found = bodies(await take(backend, 1000))
        assert len(found) == 200
        assert sorted(found) == sorted([b"own"] * 20 + [b"%d" % n for n in range(60)] * 3)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def test_strangers_in_the_store_are_neither_queues_nor_followed(store: Open, tmp_path: Path) -> None:
    backend = store()
    await publish(backend, b"1")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "state").write_bytes(bytes(129 * 56))
    root = tmp_path / "store"
    (root / "link").symlink_to(outside)
    (root / "plain").mkdir()
    (root / "file").write_text("x")
    (root / "fifo").mkdir()
    os.mkfifo(root / "fifo" / "state")
    (root / "..odd").mkdir()
    (root / "a b").mkdir()
    (root / "a b" / "state").write_bytes(b"")
    assert await backend.queues() == ["q"]
    assert await take(backend, queue="link") == []
    assert await take(backend, queue="fifo") == []
    for name in ("notes.q", "-1.q", "99999999999999999999999.q", "\u0661.q", ".q"):
        (topic(tmp_path) / name).write_bytes(b"strange")
    (topic(tmp_path) / "5.q").symlink_to("/etc/passwd")
    await publish(backend, b"2")
    assert bodies(await take(backend)) == [b"1", b"2"]
    assert sorted(path.name for path in outside.iterdir()) == ["state"]


@pytest.mark.parametrize(
    "content", [b"", b"short", bytes(129 * 56), b"\xff" * (129 * 56)], ids=["empty", "short", "zeros", "ones"]
)
async def test_a_damaged_state_file_breaks_nothing(store: Open, tmp_path: Path, content: bytes) -> None:
    backend = store()
    await publish(backend, b"1", b"2")
    await backend.aclose()
    (topic(tmp_path) / "state").write_bytes(content)
    (topic(tmp_path) / ".qworker" / "boot").unlink()
    again = store()
    if content != b"\xff" * (129 * 56):
        await publish(again, b"3")
        assert bodies(await take(again))[-1] == b"3"
    else:
        with pytest.raises(NotSupported, match="128"):
            await publish(again, b"3")


async def test_a_damaged_record_is_kept_with_its_reason_and_all_others_flow(store: Open, tmp_path: Path) -> None:
    backend = store()
    ids = await publish(backend, b"first", b"second", b"third")
    offset = int(ids[1].partition("-")[2])
    with open(segments(tmp_path)[0], "r+b") as file:
        file.seek(offset + 9)
        file.write(b"E")
    assert bodies(await take(backend)) == [b"first", b"third"]
    (damaged,) = await list_messages(backend, "q", Query(State.FAILED))
    assert damaged.message.id == ids[1]
    assert damaged.message.body.endswith(b"sEcond")
    assert damaged.error is not None
    assert "damaged" in damaged.error
