"""Files that cannot be opened, read or moved: they rest, are reported once, and block nothing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog.testing

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.kit.doctor_check import CheckStatus
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker.testing.clock import FakeClock
from qworker.url import BackendURL
from qworker_file import FileBackend
from tests.support.immutable import make_immutable

BAD = "_20200101000000_000000001_1_host-aaaaaaaa_0"
DAMAGE = [errno.EUCLEAN, errno.EBADMSG, errno.EIO, errno.EPERM]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def backend(tmp_path: Path, clock: FakeClock) -> AsyncIterator[FileBackend]:
    backend = open_backend(f"file://{tmp_path}/spool?sync=off", clock=clock)
    assert isinstance(backend, FileBackend)
    await backend.create("q")
    yield backend
    await backend.aclose()


@pytest.fixture
def queue(tmp_path: Path, backend: FileBackend) -> Path:
    del backend
    return tmp_path / "spool" / "q"


class Refusal:
    """Makes the calls on one file fail, as the kernel does for a damaged inode or an immutable file."""

    def __init__(self, patched: pytest.MonkeyPatch, calls: tuple[str, ...], number: int, name: str = BAD) -> None:
        self.tried = 0
        self.number: int | None = number
        for call in calls:
            patched.setattr(f"os.{call}", self._refusing(getattr(os, call), name))

    def _refusing(self, call: Any, bad: str) -> Any:
        def refuse(name: Any, *arguments: Any, **options: Any) -> Any:
            if self.number is not None and isinstance(name, str) and bad in name:
                self.tried += 1
                raise OSError(self.number, os.strerror(self.number), name)
            return call(name, *arguments, **options)

        return refuse


async def lease(backend: FileBackend) -> list[bytes]:
    return [lease.message.body for lease in await leases(backend)]


async def leases(backend: FileBackend) -> list[Lease]:
    return await backend.lease("q", 10, 3600.0)


@pytest.mark.parametrize("number", DAMAGE, ids=[errno.errorcode[number] for number in DAMAGE])
@pytest.mark.parametrize("calls", [("rename",), ("open", "rename")], ids=["rename", "open"])
@pytest.mark.parametrize("place", ["queue", "delay"])
async def test_a_file_that_cannot_be_moved_blocks_nothing_and_is_reported_once(
    backend: FileBackend,
    queue: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    calls: tuple[str, ...],
    number: int,
) -> None:
    (queue / place / (BAD if place == "queue" else f"0000000000001.{BAD}")).write_bytes(b"bad")
    await backend.publish("q", [Draft(body=b"%d" % one) for one in range(5)])
    refusal = Refusal(monkeypatch, calls, number)
    with structlog.testing.capture_logs() as lines:
        assert await lease(backend) == [b"%d" % one for one in range(5)]
        tried = refusal.tried
        for _ in range(3):
            assert await lease(backend) == []
        assert refusal.tried == tried, "it was tried again without a pause"
        for pause in (1.0, 2.0, 4.0):
            clock.advance(pause)
            assert await lease(backend) == []
            assert refusal.tried > tried
            tried = refusal.tried
    assert [line["event"] for line in lines] == ["message_blocked"]
    assert os.strerror(number) in lines[0]["reason"]
    assert (await backend.stats("q")).blocked == 1
    refusal.number = None
    clock.advance(60.0)
    assert await lease(backend) == [b"bad"]
    assert (await backend.stats("q")).blocked == 0


async def test_the_doctor_says_which_file_blocks_and_why(
    backend: FileBackend, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (queue / "queue" / BAD).write_bytes(b"bad")
    url = BackendURL.parse(f"file://{queue.parent}")
    with monkeypatch.context() as patched:
        Refusal(patched, ("rename",), errno.EPERM)
        assert await lease(backend) == []
    (found,) = [check for check in await FileBackend.doctor(url) if check.name == "blocked message"]
    assert found.health is CheckStatus.WARN
    assert found.detail == f"q/queue/{BAD}: Operation not permitted"
    (queue / "queue" / BAD).unlink()
    await backend.reap("q")
    assert [check.detail for check in await FileBackend.doctor(url) if check.name == "blocked messages"] == ["none"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.ESTALE])
async def test_an_error_of_the_store_blocks_no_file(
    backend: FileBackend, queue: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    with monkeypatch.context() as patched:
        Refusal(patched, ("rename",), number, name="_")
        with pytest.raises(BackendUnavailable if number in {errno.EMFILE, errno.ESTALE} else Exception):
            await lease(backend)
    assert await lease(backend) == [b"x"]
    assert not (queue / ".blocked").exists()


async def test_an_error_that_every_file_has_is_one_of_the_store(
    backend: FileBackend, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    with monkeypatch.context() as patched:
        Refusal(patched, ("rename",), errno.EIO, name="")
        with pytest.raises(BackendUnavailable):
            await lease(backend)
    assert await lease(backend) == [b"x"]
    assert not (queue / ".blocked").exists()


async def test_a_lease_that_cannot_be_moved_does_not_keep_the_others(
    backend: FileBackend, queue: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (queue / "lease" / f"{BAD}.1.gone-1-1-1").write_bytes(b"bad")
    await backend.publish("q", [Draft(body=b"x")])
    await leases(backend)
    Refusal(monkeypatch, ("rename",), errno.EPERM)
    await backend.reap("q")
    clock.advance(3601.0)
    assert (await backend.reap("q")).returned == 1
    assert await lease(backend) == [b"x"]
    assert (await backend.stats("q")).blocked == 1


@pytest.mark.parametrize("name", ["1" * 22, "1" * 19, "9" * 60, "99", "1795158698000000"])
async def test_a_strange_due_time_stops_no_retry(
    backend: FileBackend, queue: Path, clock: FakeClock, name: str
) -> None:
    (queue / "delay" / f"{name}.{BAD}").write_bytes(b"strange")
    await backend.publish("q", [Draft(body=b"late", delay=5.0)])
    clock.advance(5.0)
    found = await leases(backend)
    bodies = {lease.message.body for lease in found}
    if int(name) < clock.time() * 1000:
        assert bodies == {b"late", b"strange"}
    else:
        assert bodies == {b"late"}
        (failed,) = await list_messages(backend, "q", Query(State.FAILED))
        assert failed.error is not None
        assert "due time" in failed.error
    ends = [Settlement(lease=lease, action=SettleAction.ACK) for lease in found]
    assert await backend.settle(ends) == []


async def test_a_due_time_of_more_digits_waits_in_its_order(
    backend: FileBackend, queue: Path, clock: FakeClock
) -> None:
    far = int(clock.time() * 1000) * 10
    (queue / "delay" / f"{far}.{BAD}").write_bytes(b"far")
    await backend.publish("q", [Draft(body=b"late", delay=5.0)])
    clock.advance(5.0)
    assert await lease(backend) == [b"late"]
    assert os.listdir(queue / "delay") == [f"9999999999999.{BAD}"]


async def test_a_name_without_a_due_time_is_set_aside_with_its_reason(backend: FileBackend, queue: Path) -> None:
    (queue / "delay" / "stray").write_bytes(b"?")
    assert await lease(backend) == []
    (failed,) = await list_messages(backend, "q", Query(State.FAILED))
    assert failed.error is not None
    assert "due time" in failed.error


@pytest.mark.parametrize("number", [errno.EUCLEAN, errno.EBADMSG, errno.EIO])
async def test_an_item_of_fsq_that_cannot_be_opened_blocks_nothing(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    backend = open_backend(f"fsq://{tmp_path}/fsq?sync=off", clock=clock)
    await backend.create("q")
    queue = tmp_path / "fsq" / "q" / "queue"
    await backend.publish("q", [Draft(body=b"bad")])
    (bad,) = os.listdir(queue)
    await backend.publish("q", [Draft(body=b"%d" % one) for one in range(5)])
    refusal = Refusal(monkeypatch, ("open",), number, name=bad)
    with structlog.testing.capture_logs() as lines:
        found = await backend.lease("q", 10, 3600.0)
        assert [lease.message.body for lease in found] == [b"%d" % one for one in range(5)]
        for pause in (1.0, 2.0, 4.0):
            clock.advance(pause)
            assert await backend.lease("q", 10, 3600.0) == []
    assert [line["event"] for line in lines] == ["message_blocked"]
    assert (await backend.stats("q")).blocked == 1
    refusal.number = None
    clock.advance(60.0)
    assert [lease.message.body for lease in await backend.lease("q", 10, 3600.0)] == [b"bad"]
    assert (await backend.stats("q")).blocked == 0
    await backend.aclose()


@pytest.mark.parametrize("number", DAMAGE, ids=[errno.errorcode[number] for number in DAMAGE])
@pytest.mark.parametrize("scheme", ["vsqs", "mq"])
async def test_a_message_of_another_protocol_that_cannot_be_moved_blocks_nothing(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, scheme: str, number: int
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/store", clock=clock)
    await backend.create("q")
    (bad,) = await backend.publish("q", [Draft(body=b"bad")])
    await backend.publish("q", [Draft(body=b"%d" % one) for one in range(5)])
    refusal = Refusal(monkeypatch, ("rename",), number, name=bad)
    with structlog.testing.capture_logs() as lines:
        found = await backend.lease("q", 10, 5.0)
        assert sorted(lease.message.body for lease in found) == [b"%d" % one for one in range(5)]
        tried = refusal.tried
        clock.advance(1.0)
        assert await backend.lease("q", 10, 5.0) == []
        assert refusal.tried > tried
    assert [line["event"] for line in lines] == ["message_blocked"]
    refusal.number = None
    clock.advance(2.0)
    assert [lease.message.body for lease in await backend.lease("q", 10, 5.0)] == [b"bad"]
    await backend.aclose()


@pytest.mark.parametrize("scheme", ["vsqs", "mq"])
async def test_a_lease_of_another_protocol_that_cannot_be_moved_does_not_keep_the_others(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/store", clock=clock)
    await backend.create("q")
    bad, *_ = await backend.publish("q", [Draft(body=b"%d" % one) for one in range(5)])
    assert len(await backend.lease("q", 10, 5.0)) == 5
    await backend.reap("q")
    refusal = Refusal(monkeypatch, ("rename",), errno.EPERM, name=bad)
    clock.advance(6.0)
    assert (await backend.reap("q")).returned == 4
    assert refusal.tried
    refusal.number = None
    clock.advance(2.0)
    assert (await backend.reap("q")).returned == 1
    await backend.aclose()


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[None]:
    make_immutable(path, True)
    try:
        yield
    finally:
        make_immutable(path, False)


async def test_everything_behind_an_immutable_file_runs(backend: FileBackend, queue: Path, clock: FakeClock) -> None:
    await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])
    blocked = queue / "queue" / BAD
    blocked.write_bytes(b"blocked")
    with immutable(blocked):
        assert await lease(backend) == [b"1", b"2"]
        assert (await backend.stats("q")).blocked == 1
    clock.advance(60.0)
    assert await lease(backend) == [b"blocked"]


async def test_a_file_with_the_name_of_a_blocked_one_is_leased_at_once(backend: FileBackend, queue: Path) -> None:
    blocked = queue / "queue" / BAD
    blocked.write_bytes(b"blocked")
    with immutable(blocked):
        assert await lease(backend) == []
    new = queue / "tmp" / BAD
    new.write_bytes(b"new")
    new.rename(blocked)
    assert await lease(backend) == [b"new"]
    assert (await backend.stats("q")).blocked == 0


async def test_a_new_message_of_mq_that_cannot_be_moved_does_not_keep_the_others(
    tmp_path: Path, clock: FakeClock
) -> None:
    backend = open_backend(f"mq://{tmp_path}/store", clock=clock)
    await backend.create("q")
    new = tmp_path / "store" / "new"
    for name in ("1", "2", "3"):
        (new / f"q:{name}").write_bytes(name.encode())
    first = os.listdir(new)[0]
    with immutable(new / first), structlog.testing.capture_logs() as lines:
        await backend.reap("q")
        assert len(await backend.lease("q", 10, 60.0)) == 2
    assert [(line["event"], line["file"]) for line in lines] == [("message_blocked", f"new/{first}")]
    clock.advance(2.0)
    await backend.reap("q")
    assert [b"q:" + lease.message.body for lease in await backend.lease("q", 10, 60.0)] == [first.encode()]
    await backend.aclose()
