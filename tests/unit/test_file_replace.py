"""A call that replaces a waiting one on `file:`, while other programs take, end or lock that one."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.message import Draft
from qworker.testing.clock import FakeClock
from qworker.unique import Unique
from qworker_file import FileBackend, id_reservation, lease, publish, replace
from qworker_file.foreign import ClaimResult
from qworker_file.id_place import Located, Place, record_move
from qworker_file.layout import QueueDir
from qworker_file.names import index_name, key_link_name, key_mark, next_name, swap_name
from qworker_file.unique_keys import Holder, state_of

OLD = Draft(body=b"old", unique_key="k")
NEW = Draft(body=b"new", unique_key="k", unique=Unique(again="replace"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest_asyncio.fixture
async def backend(root: Path) -> AsyncIterator[FileBackend]:
    backend = open_backend(f"file://{root}?sync=off", clock=FakeClock())
    assert isinstance(backend, FileBackend)
    await backend.create("q")
    yield backend
    await backend.aclose()


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def test_a_message_that_fails_while_its_key_is_checked_is_not_replaced(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = await backend.publish("q", [OLD])

    def check_then_fail(files: QueueDir, holder: str, mark: str, located: Located) -> Holder:
        state = state_of(files, holder, mark, located)
        for item in os.listdir(root / "q" / "queue"):
            record_move(files, item, Place("fail", item))
            os.rename(root / "q" / "queue" / item, root / "q" / "fail" / item)
        return state

    monkeypatch.setattr(id_reservation, "state_of", check_then_fail)
    (second,) = await backend.publish("q", [NEW])
    assert second != first
    (failed,) = await backend.find("q", [first])
    assert failed.message.body == b"old"
    assert [one.message.body for one in await backend.lease("q", 10, 60.0)] == [b"new"]


async def test_a_message_that_cannot_be_read_keeps_a_key_that_is_free_when_it_starts(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Draft(body=b"x", unique_key="k", unique=Unique(until="started"))
    (first,) = await backend.publish("q", [draft])

    def refuse(_fd: int, _size: int) -> bytes:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr(lease, "read_all", refuse)
        with pytest.raises(BackendUnavailable, match="memory"):
            await backend.lease("q", 1, 60.0)
    assert await backend.publish("q", [draft]) == [first]
    assert [one.message.id for one in await backend.lease("q", 10, 60.0)] == [first]
    assert await backend.publish("q", [draft]) != [first]


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_no_fsq_program_can_take_the_old_message_under_the_name_of_the_new_one(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    await backend.publish("q", [Draft(body=b"old", unique_key="k", delay=delay)])
    exchange = replace.exchange_names
    seen: list[bool] = []

    def look_then_exchange(swap: str, name: str, names: int, directory: int) -> None:
        seen.append(all(is_locked(path) for path in (root / "q" / "queue").iterdir()))
        exchange(swap, name, names, directory)

    monkeypatch.setattr(replace, "exchange_names", look_then_exchange)
    await backend.publish("q", [NEW])
    assert seen == [True]
    assert [one.message.body for one in await backend.lease("q", 10, 60.0)] == [b"new"]


async def test_a_message_can_be_replaced_while_its_publisher_shows_the_others_of_its_batch(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_TURN", -1.0)
    publishing = asyncio.create_task(backend.publish("q", [OLD, *[Draft(body=b"x")] * 10]))
    while not (shown := list((root / "q" / "queue").iterdir())):
        await asyncio.sleep(0)
    assert not publishing.done()
    assert [is_locked(path) for path in shown] == [False]
    await publishing


async def test_a_message_can_be_replaced_while_its_publisher_waits_for_another_key(
    root: Path, backend: FileBackend
) -> None:
    first, second = sorted(("k", "l"), key=lambda key: key_link_name(key_mark(key, started=False)))
    await backend.publish("q", [Draft(body=b"1", unique_key=first)])
    (taken,) = await backend.publish("q", [Draft(body=b"2", unique_key=second)])
    (used,) = [path for path in (root / "q" / "queue").iterdir() if taken.replace("_", "+") in path.name]
    with used.open("rb") as file:
        # A program of fsq runs it.
        fcntl.flock(file, fcntl.LOCK_EX)
        drafts = [Draft(body=b"new", unique_key=key, unique=NEW.unique) for key in (first, second)]
        publishing = asyncio.create_task(backend.publish("q", drafts))
        while not (shown := [path for path in (root / "q" / "queue").iterdir() if ",r" in path.name]):
            await asyncio.sleep(0)
        assert not publishing.done()
        assert [is_locked(path) for path in shown] == [False]
    await publishing


async def test_files_of_other_programs_with_the_names_of_the_steps_stop_nothing(
    root: Path, backend: FileBackend
) -> None:
    (first,) = await backend.publish("q", [OLD])
    names, index = root / "q" / "names", index_name(first)
    following, swap = names / next_name(index), names / swap_name(index)
    following.touch()
    assert await backend.publish("q", [NEW]) == [first]
    assert [found.message.body for found in await backend.find("q", [first])] == [b"new"]
    os.link(names / index, swap)
    assert await backend.publish("q", [OLD]) == [first]
    assert not swap.exists()
    following.touch()
    await backend.reap("q")
    assert not following.exists()


async def test_a_message_that_took_the_name_of_a_leased_one_is_moved_back_with_its_key(
    root: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Unique(until="started", again="replace")
    drafts = [Draft(body=body, unique_key="k", unique=started) for body in (b"1", b"2")]
    await backend.publish("q", drafts)
    files = backend._stores.open().open_files("q")  # pyright: ignore[reportPrivateUsage]
    assert files is not None
    (item,) = os.listdir(files.queue)
    opened = os.open(item, os.O_RDONLY, dir_fd=files.queue)
    other = root / "other"
    other.write_bytes(b"3")
    other.replace(root / "q" / "queue" / item)

    def open_before(*_: object) -> int:
        return opened

    monkeypatch.setattr(lease, "_open", open_before)
    assert lease.claim(files, files.queue, item, item, ".1.h", now=1.0, local=False) is ClaimResult.BUSY
    (back,) = os.listdir(files.delay)
    assert back.partition(".")[2] == item
