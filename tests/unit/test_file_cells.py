"""The cells of a directory: what others plant, remove or hold there, and what an unused feature costs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qworker.backend import Backend
from qworker.backend.registry import backend_class, open_backend
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.errors import BackendUnavailable
from qworker.kit.doctor_check import CheckStatus
from qworker.kit.files import list_names
from qworker.kit.inotify import Watcher
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.testing.wait_until_blocked import wait_until_blocked
from qworker.url import BackendURL
from qworker_file import FileBackend, cell_hub
from qworker_file.cell_file import file_name
from tests.support.waiting import PATIENCE

QUEUE = "q"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def backend(tmp_path: Path, clock: FakeClock) -> AsyncIterator[FileBackend]:
    backend = open_backend(f"file://{tmp_path}/spool?sync=off", clock=clock)
    assert isinstance(backend, FileBackend)
    yield backend
    await backend.aclose()


async def carry_out(backend: FileBackend, *ops: CellOp) -> list[CellReply]:
    return await backend.cells(QUEUE, ops)


def put(name: str, value: bytes = b"", only: str | None = None, **fields: Any) -> CellOp:
    return CellOp("put", Cell("g", name, value, **fields), only)


async def value_of(backend: FileBackend, name: str) -> bytes | None:
    (reply,) = await carry_out(backend, CellOp("get", Cell("g", name)))
    return None if reply.cell is None else reply.cell.value


@pytest.fixture
def group(tmp_path: Path) -> Path:
    return tmp_path / "spool" / QUEUE / "cells" / "g"


# -- what others do there --------------------------------------------------------------------------------------------


async def test_whatever_else_has_the_name_of_a_cell_is_none_and_is_replaced(
    backend: FileBackend, group: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b'{"version":"1"}\nsecret')
    await carry_out(backend, put("first"))
    os.mkfifo(group / "fifo")
    (group / "link").symlink_to(secret)
    (group / "directory").mkdir()
    (group / "directory" / "file").write_bytes(b"kept")
    for name, content in {"empty": b"", "text": b"text\n", "half": b'{"version":"1"}', "huge": b"x" * 200_000}.items():
        (group / name).write_bytes(content)
    names = ["fifo", "link", "directory", "empty", "text", "half", "huge"]
    assert [await value_of(backend, name) for name in names] == [None] * 7
    (listed,) = await carry_out(backend, CellOp("list", Cell("g", "")))
    assert [cell.name for cell in listed.cells] == ["first"]
    for only in ("", None):
        replies = await carry_out(backend, *[put(name, b"mine", only) for name in names])
        assert [reply.done for reply in replies] == [only is None] * 7 if only is None else [True] * 7
    assert [await value_of(backend, name) for name in names] == [b"mine"] * 7
    assert secret.read_bytes().endswith(b"secret")
    (aside,) = [path for path in group.iterdir() if path.is_dir()]
    assert (aside / "file").read_bytes() == b"kept"
    await carry_out(backend, *[CellOp("delete", Cell("g", name)) for name in [*names, "first"]])
    assert (await carry_out(backend, CellOp("close", Cell("g", ""))))[0].empty


async def test_a_file_in_the_place_of_a_directory_of_cells_is_reported_in_one_line(
    backend: FileBackend, group: Path, tmp_path: Path
) -> None:
    await backend.create(QUEUE)
    group.parent.symlink_to(tmp_path)
    with pytest.raises(BackendUnavailable) as error:
        await carry_out(backend, put("n"))
    assert "\n" not in str(error.value)
    url = BackendURL.parse(f"file://{tmp_path}/spool")
    broken = [check for check in await backend_class("file").doctor(url) if check.name == "cells"]  # type: ignore[attr-defined]
    assert [(check.health, check.detail) for check in broken] == [(CheckStatus.BROKEN, "q/cells is not a directory")]
    group.parent.unlink()
    assert (await carry_out(backend, put("n")))[0].done
    checks = await backend_class("file").doctor(url)  # type: ignore[attr-defined]
    assert not [check for check in checks if check.name == "cells"]


async def test_the_cells_of_a_queue_that_was_deleted_and_made_again_are_the_new_ones(
    backend: FileBackend, tmp_path: Path
) -> None:
    for remove in (QUEUE, f"{QUEUE}/cells", f"{QUEUE}/cells/g", ""):
        assert (await carry_out(backend, put("n", b"old", "")))[0].done
        shutil.rmtree(tmp_path / "spool" / remove)
        assert await value_of(backend, "n") is None
        assert (await carry_out(backend, put("n", b"new", "")))[0].done
        assert await value_of(backend, "n") == b"new"
        shutil.rmtree(tmp_path / "spool" / remove)


async def test_a_process_that_is_frozen_in_the_lock_of_a_group_blocks_that_group_only(
    backend: FileBackend, group: Path
) -> None:
    await carry_out(backend, put("n", b"old"))
    frozen = os.open(group, os.O_RDONLY)
    fcntl.flock(frozen, fcntl.LOCK_EX)
    putting = asyncio.create_task(carry_out(backend, put("n", b"new")))
    await wait_until_blocked(putting)
    assert await value_of(backend, "n") == b"old"
    # Neither takes the lock.
    assert (await carry_out(backend, put("m", b"", "")))[0].done
    assert (await backend.cells(QUEUE, [CellOp("put", Cell("h", "n"))]))[0].done
    assert not putting.done()
    os.close(frozen)
    assert (await putting)[0].done
    assert await value_of(backend, "n") == b"new"


async def test_a_process_that_is_frozen_in_the_lock_of_a_group_stops_no_reaper(
    backend: FileBackend, group: Path, clock: FakeClock
) -> None:
    await carry_out(backend, put("n", ttl=60.0))
    clock.advance(61.0)
    frozen = os.open(group, os.O_RDONLY)
    fcntl.flock(frozen, fcntl.LOCK_EX)
    async with asyncio.timeout(20):
        for _ in range(100):
            await backend.reap(QUEUE)
            clock.advance(1.0)
    assert (group / "n").exists()
    os.close(frozen)
    while (group / "n").exists():
        await backend.reap(QUEUE)
        clock.advance(1.0)


@pytest.mark.parametrize("mode", [0o700, 0o2770])
async def test_cells_have_the_modes_of_their_queue(tmp_path: Path, mode: int) -> None:
    backend = open_backend(f"file://{tmp_path}/spool?sync=off&dir_mode=0{mode:o}")
    await backend.cells(QUEUE, [put("n")])
    group = tmp_path / "spool" / QUEUE / "cells" / "g"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (group.parent, group)] == [mode, mode]
    # As messages are: what more is allowed depends on the umask.
    assert bool((group / "n").stat().st_mode & 0o040) == bool(mode & 0o020)
    assert not (group / "n").stat().st_mode & 0o007
    await backend.aclose()


# -- expiry ----------------------------------------------------------------------------------------------------------


async def test_expired_cells_and_empty_groups_are_swept(backend: FileBackend, group: Path, clock: FakeClock) -> None:
    ops = [CellOp("put", Cell("h", f"{number}", ttl=60.0)) for number in range(500)]
    await backend.cells(QUEUE, [*ops, put("kept"), put("later", ttl=600.0), put("n" * 300, ttl=60.0)])
    clock.advance(61.0)

    async def is_swept() -> bool:
        await backend.reap(QUEUE)
        # One round can remove the group h and leave cells of the other group for the next round.
        names = sorted(path.name for path in group.iterdir())
        return not (group.parent / "h").exists() and names == ["kept", "later"]

    await wait_until(is_swept)
    assert (group / "kept").stat().st_mtime == 0
    clock.advance(600.0)
    while (group / "later").exists():
        await backend.reap(QUEUE)
    assert [path.name for path in group.iterdir()] == ["kept"]


async def test_one_round_of_a_sweep_is_short(
    backend: FileBackend, group: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qworker_file.cell_sweep._ROUND", 0.0)
    monkeypatch.setattr("qworker_file.cell_sweep._SLICE", 10)
    await carry_out(backend, *[put(f"{number}", ttl=60.0) for number in range(100)])
    clock.advance(61.0)
    rounds = 0
    while group.exists():
        before = len(list(group.iterdir()))
        await backend.reap(QUEUE)
        assert not group.exists() or before - len(list(group.iterdir())) <= 10
        rounds += 1
        assert rounds < 100
    assert rounds > 10


async def test_an_unfinished_cell_is_removed_when_it_is_old_and_not_while_it_is_written(
    backend: FileBackend, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.create(QUEUE)
    tmp = tmp_path / "spool" / QUEUE / "tmp"
    for name, at in {".cell-never": 0.0, ".cell-later": time.time() + 1e6, ".cell-soon": time.time()}.items():
        (tmp / name).write_bytes(b"")
        os.utime(tmp / name, (at, at))
    await backend.reap(QUEUE)
    assert len(list(tmp.iterdir())) == 3
    monkeypatch.setattr("qworker_file.reap._STRAY", -10.0)
    clock.advance(601.0)
    await backend.reap(QUEUE)
    assert list(tmp.iterdir()) == []


# -- costs -----------------------------------------------------------------------------------------------------------


async def test_an_iteration_lists_a_group_once_and_gets_every_cell_that_stays(
    backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{number:03}" for number in range(250)]
    await carry_out(backend, *[put(name) for name in names])
    other = open_backend(f"file://{tmp_path}/spool?sync=off")
    listings: list[int] = []

    async def counted(group: int) -> list[str]:
        listings.append(group)
        return await list_names(group)

    monkeypatch.setattr("qworker_file.cells.list_names", counted)

    async def iterate(*between: tuple[Backend, CellOp]) -> list[str]:
        found: list[str] = []
        steps, is_last = list(between), False
        while not is_last:
            (page,) = await carry_out(backend, CellOp("list", Cell("g", found[-1] if found else "")))
            found += [cell.name for cell in page.cells]
            is_last = page.empty
            if steps:
                changed, op = steps.pop(0)
                await changed.cells(QUEUE, [op])
        return found

    assert await iterate() == names
    assert len(listings) == 1
    # Two iterations do not disturb each other, and what others replace or delete meanwhile is as stored.
    replaced = await iterate((other, put("n150", b"new")), (other, CellOp("delete", Cell("g", "n249"))))
    assert replaced == names[:-1]
    # The puts of the same process are there.
    assert await iterate((backend, put("n120x"))) == sorted([*names[:-1], "n120x"])
    await other.aclose()


async def test_a_queue_without_cells_has_no_directory_and_its_messages_no_step_for_them(
    backend: FileBackend, group: Path
) -> None:
    seen: list[object] = []
    is_seen = True

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if is_seen and event in {"open", "os.mkdir", "os.listdir", "os.scandir", "os.link", "os.rename"}:
            seen.extend(one for one in arguments if isinstance(one, str) and one.startswith(("cells", ".cell-")))

    sys.addaudithook(audit)
    await backend.publish(QUEUE, [Draft(body=b"x")] * 3)
    leases = await backend.lease(QUEUE, 3, 60.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    await backend.wait([QUEUE], 0.01)
    is_seen = False
    assert len(leases) == 3
    assert seen == []
    await backend.reap(QUEUE)
    replies = await carry_out(backend, CellOp("get", Cell("g", "n")), CellOp("close", Cell("g", "")))
    assert [reply.done for reply in replies] == [False, True]
    assert not group.parent.exists()


async def test_a_wait_for_a_cell_has_an_inotify_instance_until_shortly_after_it(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close just after the end of a watch would block the loop for milliseconds."""
    watched: list[int] = []
    close = Watcher.close

    def note(watcher: Watcher) -> None:
        watched.append(len(watcher._watches))
        close(watcher)

    monkeypatch.setattr(Watcher, "close", note)
    monkeypatch.setattr(cell_hub, "_CLOSE_AFTER", 60.0)
    await backend.create(QUEUE)

    def instances() -> int:
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        return sum("inotify" in link for link in links)

    def _is_open(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    before = instances()
    waits = [asyncio.create_task(backend.wait([], 60.0, [CellWatch(QUEUE, "g", name)])) for name in ("n", "m")]
    for wait in waits:
        await wait_until_blocked(wait)
    assert instances() == before + 1
    await carry_out(backend, put("n"), put("m"))
    await asyncio.gather(*waits)
    # The next one uses it again.
    monkeypatch.setattr(cell_hub, "_CLOSE_AFTER", 0.01)
    await backend.wait([], 0.0, [CellWatch(QUEUE, "g", "other")])
    assert (instances(), watched) == (before + 1, [])
    await wait_until(lambda: instances() == before)
    assert watched == [0]


async def test_a_close_of_the_backend_ends_its_waits(backend: FileBackend) -> None:
    await backend.create(QUEUE)
    wait = asyncio.create_task(backend.wait([], 60.0, [CellWatch(QUEUE, "g", "n")]))
    await wait_until_blocked(wait)
    await backend.aclose()
    async with asyncio.timeout(PATIENCE):
        await wait
    assert wait.done()


def test_the_names_of_files_are_safe_and_differ() -> None:
    texts = ["n", "N", "a/b", "a%2Fb", "..", ".", "~", "~x", "\0", "é", "x" * 201, "x" * 202, "x" * 1000]
    names = [file_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert all(len(name.encode()) <= 200 and "/" not in name and name[0] != "." for name in names)
