"""Locks as an NFS 4 client gives them: one process has a file alone only if it has opened it for writing (flock(2))."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.kit.opening import try_lock
from qworker.message import Draft, SettleAction, Settlement
from qworker.tools.doctor import run_checks

_flock = fcntl.flock


@pytest.fixture(autouse=True)
def _nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        is_file = not os.path.isdir(f"/proc/self/fd/{fd}")
        if is_file and operation & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        _flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_the_descriptor_of_a_reader_is_locked_and_still_reads_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"body")
    first, second = (os.open(tmp_path / "a", os.O_RDONLY) for _ in range(2))
    # The name is another file's by now.
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").write_bytes(b"another")
    try:
        assert try_lock(first)
        assert not try_lock(second)
        assert os.read(first, 10) == b"body"
        assert not os.get_inheritable(first)
        _flock(first, fcntl.LOCK_UN)
        assert try_lock(second)
    finally:
        os.close(first)
        os.close(second)


@pytest.mark.parametrize("scheme", ["file", "fsq"])
async def test_messages_are_leased_and_acked(scheme: str, tmp_path: Path) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}?shared=1")
    await backend.publish("inbox", [Draft(body=b"x"), Draft(body=b"y")])
    leases = await backend.lease("inbox", 2, 30.0)
    assert sorted(lease.message.body for lease in leases) == [b"x", b"y"]
    assert not await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    assert (await backend.stats("inbox")).ready == 0
    await backend.aclose()


async def test_doctor_locks_as_a_worker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}"
    (found,) = [check for check in await run_checks(url) if check.name == "flock"]
    assert found.detail.startswith("one holder")
    # A file system whose locks exclude nothing.
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: None)
    (found,) = [check for check in await run_checks(url) if check.name == "flock"]
    assert found.detail == "two holders of one exclusive lock"
