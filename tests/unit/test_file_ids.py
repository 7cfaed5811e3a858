"""Ids that publishers choose on `file:`: found by name and inode, whatever else has links to the files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, Selection, SettleAction, Settlement, State
from qworker.names import new_id
from qworker.testing import wait_until
from qworker.testing.clock import FakeClock
from qworker_file import FileBackend
from qworker_file.holds import is_held, keep_hold
from qworker_file.id_index import clean_up_index
from qworker_file.id_place import replace_link
from qworker_file.layout import QueueDir
from qworker_file.names import (
    MAX_OWN,
    byte_length,
    given_id,
    hold_end_ms,
    hold_name,
    index_name,
    item_name,
    key_link_name,
    key_mark,
    key_record_name,
    may_lack_link,
    parse_id,
    parse_item,
    place_name,
    stem_for,
    with_tries,
)
from tests.support.old_code import FIRST, unpack_commit
from tests.support.waiting import PATIENCE

ID = "order-17"
DRAFT = Draft(body=b"x", id=ID)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest_asyncio.fixture
async def backend(root: Path) -> AsyncIterator[FileBackend]:
    backend = open_backend(f"file://{root}?sync=off&keep_done=all", clock=FakeClock())
    assert isinstance(backend, FileBackend)
    await backend.create("q")
    try:
        yield backend
    finally:
        await backend.aclose()


@pytest_asyncio.fixture
async def forgetful(root: Path, backend: FileBackend) -> AsyncIterator[FileBackend]:
    """The same queue, whose acked messages are removed."""
    other = open_backend(f"file://{root}?sync=off", clock=FakeClock())
    assert isinstance(other, FileBackend)
    await other.open()
    try:
        yield other
    finally:
        await other.aclose()


def backup(root: Path, name: str = "backup") -> None:
    subprocess.run(["cp", "-al", root, root.parent / name], check=True)


def files_of(backend: FileBackend) -> QueueDir:
    opened = backend._stores.open().get("q")  # pyright: ignore[reportPrivateUsage]
    assert opened is not None
    return opened.files


async def lease(backend: FileBackend) -> Lease:
    (lease,) = await backend.lease("q", 10, 60.0)
    return lease


async def end(backend: FileBackend, how: SettleAction, **options: object) -> None:
    settlement = Settlement(lease=await lease(backend), action=how, **options)  # type: ignore[arg-type]
    assert await backend.settle([settlement]) == []


async def states(backend: FileBackend) -> list[State]:
    return [found.state for found in await backend.find("q", [ID])]


async def count(backend: FileBackend) -> int:
    stats = await backend.stats("q")
    return stats.ready + stats.leased + stats.delayed + stats.done + stats.failed


def count_listings(monkeypatch: pytest.MonkeyPatch, backend: FileBackend) -> list[str]:
    """Record which directories of messages are listed from now on."""
    listed: list[str] = []
    scandir = os.scandir
    inodes = {os.fstat(getattr(files_of(backend), part)).st_ino: part for part in ("queue", "delay", "fail", "done")}

    def record(fd: int) -> object:
        part = inodes.get(os.fstat(fd).st_ino)
        if part is not None:
            listed.append(part)
        return scandir(fd)

    monkeypatch.setattr(os, "scandir", record)
    return listed


# -- backups -----------------------------------------------------------------------------------------------------------


async def test_an_id_is_free_after_an_ack_although_a_backup_has_links_to_its_files(
    root: Path, forgetful: FileBackend
) -> None:
    await forgetful.publish("q", [DRAFT])
    backup(root)
    await end(forgetful, SettleAction.ACK)
    await forgetful.publish("q", [DRAFT])
    assert await states(forgetful) == [State.READY]


async def test_an_id_is_free_after_a_kill_before_its_link_was_removed_although_a_backup_has_links_to_its_files(
    root: Path, forgetful: FileBackend
) -> None:
    await forgetful.publish("q", [DRAFT])
    backup(root)
    (name,) = os.listdir(root / "q" / "queue")
    os.unlink(root / "q" / "queue" / name)
    assert await states(forgetful) == []
    await forgetful.publish("q", [DRAFT])
    assert await states(forgetful) == [State.READY]


async def test_an_id_of_a_publisher_that_died_is_free_although_a_backup_has_links_to_its_files(
    root: Path, forgetful: FileBackend
) -> None:
    await forgetful.publish("q", [DRAFT])
    (name,) = os.listdir(root / "q" / "queue")
    os.rename(root / "q" / "queue" / name, root / "q" / "tmp" / "_20260101000000_000000001_1_host-aaaaaaaa_0")
    backup(root)
    await forgetful.publish("q", [DRAFT])
    assert await states(forgetful) == [State.READY]
    assert os.listdir(root / "q" / "tmp") == []


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize(
    ("how", "options", "state"),
    [
        (SettleAction.ACK, {}, State.DONE),
        (SettleAction.FAIL_PERM, {}, State.FAILED),
        (SettleAction.FAIL_TMP, {"delay": 60.0}, State.DELAYED),
        (SettleAction.RELEASE, {}, State.READY),
        (None, {}, State.LEASED),
    ],
)
async def test_a_message_keeps_its_id_in_every_state(
    root: Path,
    backend: FileBackend,
    monkeypatch: pytest.MonkeyPatch,
    how: SettleAction | None,
    options: dict[str, object],
    state: State,
    is_recorded: bool,
) -> None:
    """Older releases and fsq programs move messages without a record of their place."""
    await backend.publish("q", [DRAFT])
    if how is None:
        await lease(backend)
    else:
        await end(backend, how, **options)
    backup(root)
    if not is_recorded:
        os.unlink(root / "q" / "names" / place_name(ID))
    listed = count_listings(monkeypatch, backend)
    await backend.publish("q", [DRAFT])
    # lease/ has only as many names as messages are leased.
    assert bool(listed) == (not is_recorded and how is not None)
    monkeypatch.undo()
    assert await states(backend) == [state]
    assert await count(backend) == 1


async def test_a_record_is_correct_after_a_requeue_and_after_an_expired_lease(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish("q", [DRAFT])
    await end(backend, SettleAction.FAIL_PERM, error="no")
    listed = count_listings(monkeypatch, backend)
    assert await backend.requeue("q", Selection(ids=[ID])) == 1
    await backend.publish("q", [DRAFT])
    assert listed == []
    assert await states(backend) == [State.READY]


async def test_a_wrong_record_is_corrected(root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stale holder, which wrote the record of a move that another process had made."""
    await backend.publish("q", [DRAFT])
    record = root / "q" / "names" / place_name(ID)
    record.unlink()
    record.symlink_to("delay/1.nothing")
    await backend.publish("q", [DRAFT])
    listed = count_listings(monkeypatch, backend)
    await backend.publish("q", [DRAFT])
    assert listed == []
    assert await states(backend) == [State.READY]


async def test_a_record_that_is_no_symlink_is_ignored(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [DRAFT])
    record = root / "q" / "names" / place_name(ID)
    record.unlink()
    record.write_bytes(b"")
    assert await states(backend) == [State.READY]


# -- cost --------------------------------------------------------------------------------------------------------------


async def test_a_publish_and_a_search_of_an_id_list_no_messages(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish("q", [Draft(body=b"", id=f"other-{n}") for n in range(3)])
    listed = count_listings(monkeypatch, backend)
    await backend.publish("q", [DRAFT])
    await backend.publish("q", [DRAFT])
    assert await states(backend) == [State.READY]
    assert await backend.find("q", ["absent"]) == []
    assert await backend.remove("q", Selection(ids=[ID])) == 1
    assert listed == []


async def test_a_plain_message_has_no_link_and_no_record(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    backup(root)
    await end(backend, SettleAction.FAIL_TMP, delay=1.0)
    assert os.listdir(root / "q" / "names") == []


# -- ids that may lack a link ------------------------------------------------------------------------------------------


async def test_a_generated_id_is_found_by_listing(backend: FileBackend) -> None:
    (generated,) = await backend.publish("q", [Draft(body=b"x")])
    assert await backend.publish("q", [Draft(body=b"y", id=generated)]) == [generated]
    assert await count(backend) == 1


@pytest.mark.parametrize(
    "message_id",
    ["20261126215135_858902330_7467_vm-5be73c54", "20200101000000_1_2_host", "load:0:12:3", "x-" + "a" * 40],
)
def test_ids_of_qworker_fsq_and_bulk_writes_may_lack_a_link(message_id: str) -> None:
    assert may_lack_link(message_id)


@pytest.mark.parametrize("message_id", ["order-17", "a", "order_17", "cron:daily:1764190000", "0_1"])
def test_other_ids_have_a_link(message_id: str) -> None:
    assert not may_lack_link(message_id)


@pytest.mark.parametrize(
    ("item", "message_id"),
    [
        ("_20200101000000_000000001_0_~order-17_0_task", "order-17"),
        ("_20200101000000_000000001_0_~a+b_3", "a_b"),
        ("_20200101000000_000000001_1_host_0_~0a", None),
        ("_20200101000000_000000001_1_~a_0", None),
        ("anything", None),
        ("", None),
    ],
)
def test_the_given_id_of_an_item_is_in_its_host_field(item: str, message_id: str | None) -> None:
    assert given_id(item) == message_id


# -- cleaning up -------------------------------------------------------------------------------------------------------


async def test_links_and_records_of_messages_that_are_gone_are_removed(root: Path, backend: FileBackend) -> None:
    await backend.publish("q", [DRAFT, Draft(body=b"", id="kept")])
    (name,) = [name for name in os.listdir(root / "q" / "queue") if ID in name]
    os.unlink(root / "q" / "queue" / name)
    (root / "q" / "names" / place_name("lost")).symlink_to("queue/x")
    assert await clean_up_index(files_of(backend), 0.0) == 1
    assert sorted(os.listdir(root / "q" / "names")) == sorted([index_name("kept"), place_name("kept")])


async def test_backups_in_the_middle_of_publishes_lose_and_repeat_nothing(root: Path, forgetful: FileBackend) -> None:
    """Each id is published again and again until it has run twice."""
    runs: dict[str, int] = {f"id-{n}": 0 for n in range(20)}

    async def publish(message_id: str) -> None:
        while runs[message_id] < 2:
            await forgetful.publish("q", [Draft(body=b"", id=message_id)])
            await asyncio.sleep(0)
            assert len(await forgetful.find("q", [message_id])) <= 1

    async def work() -> None:
        while min(runs.values()) < 2:
            leases = await forgetful.lease("q", 5, 60.0, 0.05)
            ids = [lease.message.id for lease in leases]
            assert len(set(ids)) == len(ids)
            for message_id in ids:
                runs[message_id] += 1
            await forgetful.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])

    async def back_up() -> None:
        number = 0
        while min(runs.values()) < 2:
            number += 1
            # A file that is gone meanwhile makes cp fail, which changes nothing here.
            process = await asyncio.create_subprocess_exec(
                "cp", "-al", root, root.parent / f"backup-{number}", stderr=asyncio.subprocess.DEVNULL
            )
            await process.wait()

    await asyncio.gather(work(), back_up(), *map(publish, runs))
    assert min(runs.values()) >= 2


# -- publishers at the same time ---------------------------------------------------------------------------------------


async def test_publishers_of_the_same_ids_under_different_keys_do_not_wait_for_each_other(
    root: Path, backend: FileBackend
) -> None:
    """Each of them has one of the ids if a third one delays both in the middle of their batches."""
    keys = sorted(map(str, range(6)), key=lambda key: key_link_name(key_mark(key, started=False)))
    first, second = (
        [Draft(body=b"", id=draft_id, unique_key=key) for draft_id, key in zip(ids, some, strict=True)]
        for ids, some in ((["x", "xx", "y"], keys[:3]), (["y", "xx", "x"], keys[3:]))
    )
    names, busy = root / "q" / "names", root / "q" / "tmp" / "_20260101000000_000000001_1_host_0"
    with busy.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.link(busy, names / index_name("xx"))
        calls = [asyncio.create_task(backend.publish("q", drafts)) for drafts in (first, second)]
        await wait_until(lambda: {index_name("x"), index_name("y")} & set(os.listdir(names)))
        busy.unlink()
    done, waiting = await asyncio.wait(calls, timeout=PATIENCE)
    for call in waiting:
        call.cancel()
    assert [sorted(call.result()) for call in done] == [["x", "xx", "y"]] * 2
    assert await count(backend) == 3


async def test_a_key_that_an_earlier_message_with_the_same_id_has_left_keeps_no_publisher_waiting(
    forgetful: FileBackend,
) -> None:
    await forgetful.publish("q", [Draft(body=b"", id=ID, unique_key="old")])
    await end(forgetful, SettleAction.FAIL_PERM)
    await forgetful.remove("q", Selection(ids=[ID]))
    names = files_of(forgetful).names
    mark = key_mark("old", started=False)
    os.symlink(ID, key_link_name(mark), dir_fd=names)
    os.symlink("old", key_record_name(ID), dir_fd=names)
    drafts = [Draft(body=b"", id=ID), Draft(body=b"", id="new", unique_key="old")]
    assert await asyncio.wait_for(forgetful.publish("q", drafts), PATIENCE) == [ID, "new"]


# -- holds -------------------------------------------------------------------------------------------------------------

HELD = Draft(body=b"x", id=ID, hold=60.0)


async def test_only_the_lease_makes_a_hold(root: Path, forgetful: FileBackend) -> None:
    """A publisher that dies before its message is visible must not hold its id."""
    await forgetful.publish("q", [HELD])
    assert hold_name(ID) not in os.listdir(root / "q" / "names")
    await forgetful.remove("q", Selection(ids=[ID]))
    await forgetful.publish("q", [HELD])
    await lease(forgetful)
    assert os.readlink(root / "q" / "names" / hold_name(ID)).isdigit()


async def test_a_held_id_is_taken_after_a_kill_before_its_link_was_removed(root: Path, forgetful: FileBackend) -> None:
    await forgetful.publish("q", [HELD])
    await lease(forgetful)
    backup(root)
    (name,) = os.listdir(root / "q" / "lease")
    os.unlink(root / "q" / "lease" / name)
    assert await forgetful.publish("q", [DRAFT]) == [ID]
    assert await count(forgetful) == 0


async def test_a_longer_hold_replaces_a_shorter_one(root: Path, forgetful: FileBackend) -> None:
    await forgetful.publish("q", [HELD])
    await end(forgetful, SettleAction.ACK)
    first = os.readlink(root / "q" / "names" / hold_name(ID))
    forgetful._clock.advance(61.0)  # type: ignore[attr-defined]
    await forgetful.publish("q", [HELD])
    await end(forgetful, SettleAction.ACK)
    assert int(os.readlink(root / "q" / "names" / hold_name(ID))) >= int(first) + 61_000


@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("earlier", [None, "1", "-1"], ids=str)
async def test_a_lease_leaves_a_hold_free_that_was_freed_meanwhile(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch, step: int, earlier: str | None
) -> None:
    """Whether there is a shorter hold of an earlier message, and before whichever step it is freed."""
    files, name, item = files_of(backend), hold_name(ID), f"_{stem_for(ID, new_id(), 2000)}_0"
    if earlier is not None:
        os.symlink(earlier, name, dir_fd=files.names)
    steps = iter(range(step))
    freed: list[str] = []

    def free_before(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if next(steps, None) is None and not freed:
                freed.append(name)
                replace_link(files, "-2000", name)
            return call(*args, **options)

        return wrapped

    for call in ("readlink", "symlink", "rename", "unlink"):
        monkeypatch.setattr(os, call, free_before(getattr(os, call)))
    keep_hold(files, item, now=1.0)
    monkeypatch.undo()
    assert is_held(files, ID, now=1.0) is not bool(freed)


async def test_holds_that_have_ended_are_removed(root: Path, forgetful: FileBackend) -> None:
    await forgetful.publish("q", [HELD, Draft(body=b"", id="other", hold=1e6)])
    leases = await forgetful.lease("q", 2, 60.0)
    await forgetful.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    await clean_up_index(files_of(forgetful), FakeClock().time() + 100.0)
    assert os.listdir(root / "q" / "names") == [hold_name("other")]


@pytest.mark.parametrize("message_id", ["a", "A.b:c_d-e", "0" * 120])
def test_the_mark_of_a_hold_is_not_part_of_the_id(message_id: str) -> None:
    item = item_name(stem_for(message_id, new_id(), 1_764_190_000_000), 2, ("a,h2_b",))
    assert byte_length(item) <= MAX_OWN
    parsed = parse_item(item)
    assert parsed is not None
    assert (parsed.id, parsed.tries, parsed.arguments, parsed.is_own) == (message_id, 2, ("a,h2_b",), True)
    assert parse_id(item) == given_id(item) == message_id
    assert hold_end_ms(item) == hold_end_ms(with_tries(item, 7)) == 1_764_190_000_000


def test_unknown_marks_are_kept_as_they_are() -> None:
    item = "_20200101000000_000000001_0_~order-17,z9,h5,d2_0_task"
    assert parse_id(item) == "order-17"
    assert hold_end_ms(item) == 5
    assert with_tries(item, 3) == "_20200101000000_000000001_0_~order-17,z9,h5,d2_3_task"


def test_a_comma_elsewhere_is_no_mark() -> None:
    assert hold_end_ms("_20200101000000_000000001_1_host,h5_0_task") is None
    assert hold_end_ms("_20200101000000_000000001_0_~a_0_,h5") is None


# -- older releases ----------------------------------------------------------------------------------------------------

OLD = """
import asyncio, sys
from qworker_file import FileBackend
from qworker.message import Draft, Settle, Settlement
async def main(root, message_id):
    backend = FileBackend(root)
    await backend.open()
    assert await backend.publish("q", [Draft(body=b"again", id=message_id)]) == [message_id]
    (lease,) = await backend.lease("q", 10, 60.0)
    assert lease.message.body == b"x", lease
    assert await backend.settle([Settlement(lease=lease, how=Settle.FAIL_TMP)]) == []
    await backend.aclose()
asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_older_release_runs_a_message_with_a_hold_and_keeps_its_id(
    root: Path, forgetful: FileBackend, tmp_path: Path
) -> None:
    await forgetful.publish("q", [HELD])
    folder = tmp_path / "old"
    folder.mkdir()
    environment = unpack_commit(FIRST, folder)
    subprocess.run([sys.executable, "-c", OLD, root, ID], env=environment, cwd=folder, check=True)
    assert await forgetful.publish("q", [DRAFT]) == [ID]
    (found,) = await forgetful.find("q", [ID])
    assert (found.message.id, found.message.tries) == (ID, 1)
    forgetful._clock.advance(1e9)  # type: ignore[attr-defined]
    assert (await lease(forgetful)).message.body == b"x"
