"""The native directory: what its files say in each state, strangers, dead holders, wake-ups and the end of a disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import (
    BackendError,
    FormatTooNew,
    InvalidURL,
    NotSupported,
    PublishUncertain,
    StorageFull,
)
from qworker.kit.directory.window import Window
from qworker.kit.files import read_all
from qworker.kit.group_commit import GroupCommit
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.names import new_id
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from qworker_file import FileBackend
from qworker_file.names import parse_delay, parse_item, parse_lease
from tests.support.archives import unpack

FIXTURE = Path(__file__).parent.parent / "fixtures" / "fsq.tar.gz"
LONG = 3600.0


async def test_a_name_that_is_too_long_for_a_mark_is_cancelled_and_so_is_what_is_behind_it(tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/spool?sync=off")
    await backend.publish("q", [Draft(body=b"behind")])
    directory = tmp_path / "spool" / "q"
    # An item of fsq with a long argument.
    (directory / "queue" / f"_20261121071038_123456789_4242_host_0_{'x' * 210}").write_bytes(b"long")
    assert len(await backend.cancel("q", Selection(state=State.READY))) == 2
    (directory / "fail" / "~cancelled").write_bytes(b"by another user")
    found = await list_messages(backend, "q", Query(State.FAILED))
    assert sorted(each.message.body for each in found) == [b"behind", b"by another user", b"long"]
    await backend.aclose()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def backend(root: Path, clock: FakeClock) -> AsyncIterator[FileBackend]:
    async with opened(root, clock=clock) as backend:
        await backend.create("q")
        yield backend


@contextlib.asynccontextmanager
async def opened(root: Path, options: str = "?sync=off", clock: FakeClock | None = None) -> AsyncIterator[FileBackend]:
    url = f"file://{root}{options}"
    backend = open_backend(url) if clock is None else open_backend(url, clock=clock)
    assert isinstance(backend, FileBackend)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.aclose()


async def returned(backend: FileBackend) -> int:
    return (await backend.reap("q")).returned


async def lease(backend: FileBackend, limit: int = 10, visibility: float = LONG) -> list[Lease]:
    return await backend.lease("q", limit, visibility)


async def settle(backend: FileBackend, leases: list[Lease], how: SettleAction, **options: object) -> None:
    ends = [Settlement(lease=one, action=how, **options) for one in leases]
    assert await backend.settle(ends) == []


def names(root: Path, part: str) -> list[str]:
    return sorted(os.listdir(root / "q" / part))


def drop(root: Path, name: str, body: bytes = b"x") -> Path:
    """What a program does that knows the rule: write elsewhere, then rename."""
    source = root / "q" / "tmp" / ("tmp-" + name[:100])
    source.write_bytes(body)
    target = root / "q" / "queue" / name
    source.rename(target)
    return target


# -- what ls shows ---------------------------------------------------------------------------------------------------


async def test_each_state_is_a_directory_and_a_name(root: Path, backend: FileBackend, clock: FakeClock) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"body", task="thumbnail")])
    (item,) = names(root, "queue")
    assert item == f"_{message_id}_0_thumbnail"
    assert (root / "q" / "queue" / item).read_bytes() == b"body"

    leases = await lease(backend)
    parsed = parse_lease(names(root, "lease")[0])
    assert parsed is not None
    assert parsed[0] == item
    assert abs(parsed[1] / 1000 - clock.time() - LONG) < 1
    assert names(root, "workers") == [parsed[2]]
    assert len(parsed[2]) <= 40
    assert "." not in parsed[2]

    await settle(backend, leases, SettleAction.FAIL_TMP, delay=60.0)
    delayed = parse_delay(names(root, "delay")[0])
    assert delayed is not None
    assert abs(delayed[0] / 1000 - clock.time() - 60) < 1
    assert delayed[1] == f"_{message_id}_1_thumbnail"

    clock.advance(61)
    await settle(backend, await lease(backend), SettleAction.FAIL_PERM, error="no such file")
    assert names(root, "fail") == [f"._{message_id}_1_thumbnail.reason", f"_{message_id}_1_thumbnail"]
    assert (root / "q" / "fail" / f"._{message_id}_1_thumbnail.reason").read_text() == "no such file"

    assert await backend.requeue("q", Selection(state=State.FAILED)) == 1
    assert names(root, "fail") == []
    assert names(root, "queue") == [f"_{message_id}_0_thumbnail"]

    await settle(backend, await lease(backend), SettleAction.ACK)
    assert [names(root, part) for part in ("tmp", "queue", "lease", "delay", "done", "fail")] == [[]] * 6


async def test_what_is_done_is_kept_as_long_as_was_asked(root: Path, clock: FakeClock) -> None:
    async with opened(root, "?sync=off&keep_done=2-messages&keep_failed=1h", clock) as backend:
        await backend.publish("q", [Draft(body=b"%d" % number) for number in range(5)])
        await settle(backend, await lease(backend, 4), SettleAction.ACK)
        await settle(backend, await lease(backend, 1), SettleAction.FAIL_PERM, error="no")
        assert (await backend.stats("q")).done == 4
        await backend.reap("q")
        assert [stored.message.body for stored in await list_messages(backend, "q", Query(State.DONE))] == [b"2", b"3"]
        assert (await backend.stats("q")).failed == 1
        clock.advance(7200)
        await backend.reap("q")
        assert names(root, "fail") == []
        retention = (await backend.stats("q")).retention
        assert retention["done"] == "the newest 2 are kept"
        assert retention["failed"] == "kept for 1h"


async def test_nobody_else_may_look_into_a_queue(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [Draft(body=b"secret")])
    assert stat.S_IMODE((root / "q").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "q" / "queue" / names(root, "queue")[0]).stat().st_mode) & 0o077 == 0


async def test_a_long_label_is_left_out_and_long_arguments_are_refused(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [Draft(body=b"x", task="t" * 200)])
    assert len(names(root, "queue")[0]) < 100
    with pytest.raises(NotSupported, match="argv"):
        await backend.publish("q", [Draft(body=b"x", argv=("a" * 200,))])
    assert names(root, "tmp") == []


async def test_arguments_are_kept(backend: FileBackend) -> None:
    await backend.publish("q", [Draft(body=b"x", argv=("a_b", "100%", "x/y", ""))])
    (one,) = await lease(backend)
    assert one.message.argv == ("a_b", "100%", "x/y", "")


# -- strangers -------------------------------------------------------------------------------------------------------


async def test_a_queue_of_fsq_is_taken_whole(root: Path) -> None:
    root.mkdir()
    unpack(FIXTURE, root)
    async with opened(root / "fsq" / "root") as backend:
        assert await backend.queues() == ["a_queue", "downed", "hosted", "trig"]
        before = await backend.stats("a_queue")
        assert (before.ready, before.done, before.failed) == (9, 1, 1)
        leases = await backend.lease("a_queue", 100, LONG)
        assert len(leases) == 9
        found = {one.message.argv: one.message for one in leases}
        assert found["t",].tries == 2
        assert ("a_b", "100%", "x/y", "") in found
        assert found["café",].body != b""
        assert found[()].body == b""
        await settle(backend, list(leases), SettleAction.ACK)
        assert (await backend.stats("a_queue")).leased == 0
        assert await backend.requeue("a_queue", Selection(state=State.FAILED)) == 1
        assert (await backend.stats("downed")).paused is True
        assert await backend.lease("downed", 1, LONG) == []
        await backend.resume("downed")
        assert len(await backend.lease("downed", 1, LONG)) == 1


async def test_a_strangers_file_of_any_name_is_a_message(root: Path, backend: FileBackend) -> None:
    strange = ["README.txt", "a b", "-rf", "x.1763700000000.holder", "%zz", "_", "é" * 20, "new\nline", "~"]
    for name in strange:
        drop(root, name, name.encode())
    leases = await lease(backend, 100)
    assert {one.message.argv[0]: one.message.body for one in leases} == {name: name.encode() for name in strange}
    assert len({one.message.id for one in leases}) == len(strange)
    await settle(backend, leases, SettleAction.FAIL_TMP)
    again = await lease(backend, 100)
    assert {one.message.argv[0] for one in again} == set(strange)
    assert {one.message.tries for one in again} == {1}
    await settle(backend, again, SettleAction.ACK)


async def test_the_longest_names_find_room_for_a_lease(root: Path, backend: FileBackend) -> None:
    item = "_20261121082028_5_13635_vm_2_" + "a" * 226
    stranger = "s" * 255
    drop(root, item)
    drop(root, stranger)
    leases = await lease(backend)
    assert {one.message.argv[0] for one in leases} == {"a" * 226, stranger}
    assert {one.message.id for one in leases} >= {"20261121082028_5_13635_vm"}
    assert sorted(one.message.tries for one in leases) == [0, 2]
    await settle(backend, leases, SettleAction.FAIL_TMP)
    again = await lease(backend)
    assert {one.message.argv[0] for one in again} == {"a" * 226, stranger}
    await settle(backend, again, SettleAction.FAIL_PERM, error="no")
    failed = await list_messages(backend, "q", Query(State.FAILED))
    assert [one.error for one in failed] == ["no", "no"]


async def test_what_is_no_regular_file_is_put_aside_with_a_reason(root: Path, backend: FileBackend) -> None:
    queue = root / "q" / "queue"
    secret = root / "secret"
    secret.write_text("do not read")
    (queue / "_20261121082028_0_1_vm_0_link").symlink_to(secret)
    (queue / "dangling").symlink_to("/nowhere")
    (queue / "folder").mkdir()
    os.mkfifo(queue / "fifo")
    drop(root, "good", b"good")
    leases = await lease(backend)
    assert [one.message.body for one in leases] == [b"good"]
    failed = await list_messages(backend, "q", Query(State.FAILED))
    assert {one.message.argv[0] for one in failed} == {
        "_20261121082028_0_1_vm_0_link",
        "dangling",
        "folder",
        "fifo",
    }
    assert all(one.error for one in failed)
    assert {one.message.body for one in failed} == {b""}
    assert secret.read_text() == "do not read"
    assert await backend.remove("q", Selection(state=State.FAILED)) == 4
    assert secret.exists()


async def test_a_file_that_is_still_written_is_left_until_it_is_whole(root: Path, backend: FileBackend) -> None:
    with (root / "q" / "queue" / "upload.csv").open("wb") as file:
        file.write(b"first ")
        file.flush()
        assert await lease(backend) == []
        file.write(b"second")
    (one,) = await wait_until(lambda: lease(backend))
    assert one.message.body == b"first second"


async def test_an_item_that_an_fsq_program_works_on_is_left_alone(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])
    first = root / "q" / "queue" / names(root, "queue")[0]
    with first.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [one.message.body for one in await lease(backend)] == [b"2"]
        assert (await backend.stats("q")).ready == 1
    (one,) = await wait_until(lambda: lease(backend))
    assert one.message.body == b"1"


async def test_an_fsq_program_sees_a_leased_item_nowhere_and_a_released_one_unlocked(
    root: Path, backend: FileBackend
) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    leases = await lease(backend)
    assert names(root, "queue") == []
    with (root / "q" / "lease" / names(root, "lease")[0]).open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await settle(backend, leases, SettleAction.RELEASE)
    with (root / "q" / "queue" / names(root, "queue")[0]).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_hidden_files_are_nobodys_business(root: Path, backend: FileBackend) -> None:
    drop(root, ".part.csv.x7Gh2")
    assert await lease(backend) == []
    assert names(root, "queue") == [".part.csv.x7Gh2"]


async def test_strays_in_lease_and_delay_stop_nothing(root: Path, backend: FileBackend) -> None:
    for part in ("lease", "delay", "done", "fail"):
        (root / "q" / part / "stray").write_text("?")
        (root / "q" / part / "a.b.c").write_text("?")
    await backend.publish("q", [Draft(body=b"x")])
    assert len(await lease(backend)) == 1
    await backend.reap("q")
    assert (await backend.stats("q")).leased == 1


# -- holders ---------------------------------------------------------------------------------------------------------

HOLDER = textwrap.dedent("""
    import asyncio, sys, time
    from qworker.backend.registry import open_backend

    async def main():
        backend = open_backend(sys.argv[1])
        leases = await backend.lease("q", 10, 3600)
        if len(sys.argv) > 2:
            import os
            if os.fork() == 0:
                time.sleep(600)
        print(len(leases), flush=True)
        time.sleep(600)

    asyncio.run(main())
""")


@contextlib.contextmanager
def holding(root: Path, *options: str):
    """Another process that has leased everything."""
    command = [sys.executable, "-c", HOLDER, f"file://{root}?sync=off", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        process.leased = int(process.stdout.readline())  # type: ignore[attr-defined]
        yield process
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            # Its child too, if it forked one.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def test_a_dead_processs_leases_come_back_at_once(root: Path) -> None:
    async with opened(root) as backend:
        await backend.publish("q", [Draft(body=b"%d" % number) for number in range(3)])
        with holding(root) as process:
            assert process.leased == 3
            assert (await backend.reap("q")).returned == 0
            assert await lease(backend) == []
            process.kill()
            process.wait()
            # The kernel knows: no time has to pass.
            assert (await backend.reap("q")).returned == 3
        leases = await lease(backend)
        assert [(one.message.body, one.message.tries) for one in leases] == [(b"0", 1), (b"1", 1), (b"2", 1)]


async def test_a_child_that_the_holder_forked_keeps_nothing_alive(root: Path) -> None:
    async with opened(root) as backend:
        await backend.publish("q", [Draft(body=b"x")])
        with holding(root, "fork") as process:
            process.kill()
            process.wait()
            # The child drops what it was born with as soon as it runs.
            assert await wait_until(lambda: returned(backend)) == 1
            (one,) = await lease(backend)
            assert one.message.tries == 1


async def test_the_files_of_a_dead_holder_are_cleared_away(root: Path, clock: FakeClock) -> None:
    async with opened(root, clock=clock) as backend:
        await backend.publish("q", [Draft(body=b"x")])
        with holding(root) as process:
            (holder,) = names(root, "workers")
            (root / "q" / "tmp" / f"_20261121082028_000000001_1_vm-{holder.rsplit('-', 2)[1]}_0").write_text("half")
            (root / "q" / "tmp" / "_20261121082028_000000001_1_vm-01234567_0").write_text("another's")
            process.kill()
            process.wait()
            assert (await backend.reap("q")).returned == 1
            clock.advance(60)
            await backend.reap("q")
            assert names(root, "workers") == []
            assert names(root, "tmp") == ["_20261121082028_000000001_1_vm-01234567_0"]


async def test_a_step_of_the_clock_takes_no_living_lease(root: Path, clock: FakeClock) -> None:
    async with opened(root, clock=clock) as one, opened(root, clock=clock) as other:
        await one.publish("q", [Draft(body=b"x")])
        leases = await lease(one, visibility=30.0)
        assert (await other.reap("q")).returned == 0
        clock.step(3600)
        assert (await other.reap("q")).returned == (await one.reap("q")).returned == 0
        clock.step(-7200)
        assert (await other.reap("q")).returned == (await one.reap("q")).returned == 0
        clock.advance(31)
        assert (await other.reap("q")).returned == 1
        assert one.extend(leases, 30.0) == leases


# -- wake-ups and windows --------------------------------------------------------------------------------------------


async def test_a_foreign_move_wakes_a_wait(root: Path, backend: FileBackend) -> None:
    assert await lease(backend) == []
    waiting = asyncio.create_task(backend.wait(["q"], 600.0))
    assert await wait_until_blocked(waiting)
    drop(root, "dropped.csv")
    await asyncio.wait_for(waiting, 40)
    assert len(await lease(backend)) == 1


async def test_a_byte_in_the_trigger_wakes_a_wait(root: Path, backend: FileBackend) -> None:
    """What fsq does after an enqueue; on a store whose inotify is used up."""
    assert backend._stores.store is not None
    backend._stores.store._inotify.close()
    waiting = asyncio.create_task(backend.wait(["q"], 600.0))
    assert await wait_until_blocked(waiting)
    drop(root, "dropped.csv")
    trigger = os.open(root / "q" / "trigger-s", os.O_WRONLY | os.O_NONBLOCK)
    os.write(trigger, b"x")
    os.close(trigger)
    await asyncio.wait_for(waiting, 40)
    assert len(await lease(backend)) == 1


async def test_without_trigger_and_inotify_a_rescan_finds_the_work(root: Path) -> None:
    async with opened(root, "?sync=off&poll_interval=1") as backend:
        await backend.create("q")
        assert backend._stores.store is not None
        backend._stores.store._inotify.close()
        waiting = asyncio.create_task(backend.wait(["q"], 600.0))
        assert await wait_until_blocked(waiting)
        drop(root, "dropped.csv")
        await asyncio.wait_for(waiting, 40)
        assert len(await lease(backend)) == 1


async def test_a_queue_without_its_trigger_still_works(root: Path, backend: FileBackend) -> None:
    (root / "q" / "trigger-s").unlink()
    (root / "q" / "trigger-s").write_text("no FIFO")
    async with opened(root) as other:
        await other.publish("q", [Draft(body=b"x")])
        assert len(await lease(other)) == 1


async def test_more_events_than_the_kernel_keeps_lose_nothing(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await lease(backend) == []
    assert backend._stores.store is not None
    await backend.publish("q", [Draft(body=b"%d" % number) for number in range(20)])
    # As the kernel does: the events are gone, and one says so.
    os.read(backend._stores.store._inotify.fd, 1 << 16)
    for tell, _ in tuple(backend._stores.store._inotify._watches.values()):
        tell(None)
    leases = await lease(backend, 100)
    assert [one.message.body for one in leases] == [b"%d" % number for number in range(20)]


async def test_a_window_smaller_than_the_backlog_keeps_the_order(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qworker.kit.directory.window.SIZE", 7)
    bodies = [b"%03d" % number for number in range(100)]
    await backend.publish("q", [Draft(body=body) for body in bodies[:60]])
    taken = [one.message.body for one in await lease(backend, 10)]
    await backend.publish("q", [Draft(body=body) for body in bodies[60:]])
    while leases := await lease(backend, 9):
        taken += [one.message.body for one in leases]
    assert taken == bodies


async def test_a_drained_directory_is_not_listed_at_every_wake_up(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings: list[Window] = []
    listing = Window.list

    async def counted(self: Window) -> None:
        listings.append(self)
        await listing(self)

    monkeypatch.setattr(Window, "list", counted)
    assert await lease(backend) == []
    first = len(listings)
    for _ in range(50):
        await backend.publish("q", [Draft(body=b"x")])
        await backend.wait(["q"], 40.0)
        await settle(backend, await lease(backend, 1), SettleAction.ACK)
    # The first look lists; a rescan may.
    assert len(listings) - first <= 10


# -- durability ------------------------------------------------------------------------------------------------------


async def test_a_publish_whose_sync_fails_shows_nothing_and_syncs_no_file_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(root, "") as backend:
        await backend.create("q")
        synced: list[int] = []

        def broken(fd: int) -> None:
            synced.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", broken)
            patched.setattr("qworker.kit.group_commit.finish_writing", broken)
            patched.setattr("qworker.kit.group_commit.sync_file_system", broken)
            with pytest.raises(PublishUncertain):
                await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])
        assert len(synced) == 1
        assert names(root, "queue") == names(root, "tmp") == []
        await backend.publish("q", [Draft(body=b"3")])
        assert [one.message.body for one in await lease(backend)] == [b"3"]


async def test_a_name_is_shown_only_after_its_data_is_on_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    data, directories, rename = GroupCommit.data, GroupCommit.directories, os.rename

    async def seen_data(self: GroupCommit, files: list[int]) -> None:
        await data(self, files)
        steps.append("data")

    async def seen_directories(self: GroupCommit, found: set[int]) -> None:
        steps.append("directories")
        await directories(self, found)

    def seen_rename(*arguments: object, **options: object) -> None:
        steps.append("rename")
        rename(*arguments, **options)  # type: ignore[arg-type]

    async with opened(root, "") as backend:
        await backend.create("q")
        monkeypatch.setattr(GroupCommit, "data", seen_data)
        monkeypatch.setattr(GroupCommit, "directories", seen_directories)
        monkeypatch.setattr(os, "rename", seen_rename)
        await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])
    assert steps == ["data", "rename", "rename", "directories"]


async def test_calls_at_the_same_time_share_their_commits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    run = GroupCommit._run

    def counted(self: GroupCommit, requests: list[object]) -> None:
        rounds.append(len(requests))
        run(self, requests)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupCommit, "_run", counted)
    async with opened(root, "") as backend:
        await backend.create("q")
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(backend.publish("q", [Draft(body=b"%d" % number)]))
        assert sum(rounds) == 100
        assert len(rounds) < 50
        assert (await backend.stats("q")).ready == 50


async def test_a_lease_comes_after_the_ends_that_were_asked_for_before_it(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qworker_file.settle._TURN", 0.0)
    await backend.publish("q", [Draft(body=b"x") for _ in range(20)])
    ends = [Settlement(lease=one, action=SettleAction.ACK) for one in await backend.lease("q", 10, LONG)]
    settling = asyncio.create_task(backend.settle(ends))
    await asyncio.sleep(0)
    assert len(await backend.lease("q", 10, LONG)) == 10
    assert len(list((root / "q" / "lease").iterdir())) == 10, (
        "a crash now would repeat more than a worker has consumers"
    )
    assert await settling == []


async def test_a_full_disk_is_one_clear_error_and_nothing_partial(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish("q", [Draft(body=b"before")])

    def full(fd: int, body: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("qworker_file.publish.write_all", full)
        with pytest.raises(StorageFull, match="free some space"):
            await backend.publish("q", [Draft(body=b"x")])
    assert names(root, "tmp") == []
    leases = await lease(backend)
    assert [one.message.body for one in leases] == [b"before"]
    await settle(backend, leases, SettleAction.ACK)


async def test_no_descriptors_left_costs_no_message_a_try(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])

    def none_left(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("qworker_file.open_queue.claim", none_left)
        with pytest.raises(BackendError):
            await lease(backend)
    assert [(one.message.body, one.message.tries) for one in await lease(backend)] == [(b"1", 0), (b"2", 0)]


# -- ids that publishers chose ---------------------------------------------------------------------------------------


async def test_a_chosen_id_is_free_again_after_its_message_is_gone(root: Path, backend: FileBackend) -> None:
    for _ in range(3):
        assert await backend.publish("q", [Draft(body=b"x", id="order-1")]) == ["order-1"]
        assert await backend.publish("q", [Draft(body=b"x", id="order-1")]) == ["order-1"]
        leases = await lease(backend)
        assert len(leases) == 1
        await settle(backend, leases, SettleAction.ACK)
    assert names(root, "names") == []


async def test_a_publish_that_died_half_way_does_not_keep_its_id(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [Draft(body=b"x", id="order-1")])
    (item,) = names(root, "queue")
    # As after a crash between the link and the rename.
    (root / "q" / "queue" / item).rename(root / "q" / "tmp" / "_20261121082028_000000001_1_vm-01234567_0")
    assert await backend.publish("q", [Draft(body=b"again", id="order-1")]) == ["order-1"]
    assert [one.message.body for one in await lease(backend)] == [b"again"]
    assert names(root, "tmp") == []


async def test_an_id_that_the_backend_made_is_known_when_it_is_given_back(backend: FileBackend) -> None:
    (message_id,) = await backend.publish("q", [Draft(body=b"x")])
    assert await backend.publish("q", [Draft(body=b"x", id=message_id)]) == [message_id]
    assert len(await lease(backend)) == 1


# -- the store -------------------------------------------------------------------------------------------------------


async def test_a_newer_format_is_refused_in_one_line(root: Path, backend: FileBackend) -> None:
    (root / "q" / "format").write_text("qworker directory 99\n")
    async with opened(root) as other:
        with pytest.raises(FormatTooNew, match="upgrade") as caught:
            await other.publish("q", [Draft(body=b"x")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "?sync=maybe",
        "?keep_done=soon",
        "?keep_failed=0",
        "?timezone=gmt",
        "?poll_interval=0",
        "?dir_mode=0777",
        "?nope=1",
    ],
)
def test_a_wrong_option_is_one_line(root: Path, options: str) -> None:
    with pytest.raises(InvalidURL) as caught:
        open_backend(f"file://{root}{options}")
    assert "\n" not in str(caught.value)


async def test_a_linked_queue_is_none(root: Path, backend: FileBackend, tmp_path: Path) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    (root / "linked").symlink_to(root / "q")
    assert await backend.queues() == ["q"]
    async with opened(root) as other:
        with pytest.raises(BackendError):
            await other.publish("linked", [Draft(body=b"y")])
    assert len(names(root, "queue")) == 1


async def test_local_time_is_written_and_read_as_such(root: Path) -> None:
    async with opened(root, "?sync=off&timezone=local") as backend:
        await backend.publish("q", [Draft(body=b"x")])
        (one,) = await lease(backend)
        stored = os.stat(root / "q" / "lease" / names(root, "lease")[0])
        assert abs(one.message.enqueued_at - stored.st_ctime) < 60


def test_a_file_that_grew_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_all(fd, 10) == b"x" * 5000
    finally:
        os.close(fd)


def test_new_ids_are_items() -> None:
    assert parse_item(f"_{new_id()}_0") is not None
