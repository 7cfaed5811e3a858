"""C3, C4 and C5: calls that fail, a sync that fails, and storage that is full."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import StorageFull
from qworker.message import Draft, Query, State
from tests.fault.harness import (
    FAIL,
    PATIENCE,
    PROGRAMS,
    QUEUE,
    Books,
    Launcher,
    ack,
    check_invariant,
    drain,
    fault,
    strays,
)
from tests.fault.programs import Ledger, publish
from tests.support.depth import DEEP

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.mark.parametrize("error", ["ENOSPC", "EMFILE", "ESTALE", *(["EDQUOT", "EIO", "EROFS"] if DEEP else [])])
def test_a_failed_call_is_never_taken_for_success(tmp_path: Path, launcher: Launcher, error: str) -> None:
    number = getattr(errno, error)
    for step in range(1, 60) if DEEP else (*range(1, 14), 20, 30):
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool", root / "ledger"
        launcher.run("publish", url, ledger, 6, 3, fault=fault(FAIL, step, number=number))
        check_invariant(url, ledger)
        launcher.run("work", url, ledger, 4, fault=fault(FAIL, step, number=number))
        check_invariant(url, ledger)
        drain(url, ledger)
        assert strays(root / "spool") == [], step


SYNCS = "fsync,fdatasync,syncfs,io_getevents,sync_file_range"


def _publish_traced(url: str, ledger: Path, batch: int, trace: Path, *fault: str) -> list[str]:
    """Publish two batches; the sync calls that it took, a line each."""
    command = ["strace", "-f", "-y", "-qq", "-o", str(trace), "-e", f"trace={SYNCS}", *fault]
    command += [sys.executable, str(PROGRAMS), "publish", url, str(ledger), str(2 * batch), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return trace.read_text().splitlines()


@pytest.mark.parametrize("batch", [1, 4, 40], ids=["alone", "few", "many"])
def test_a_failed_sync_fails_the_publish_and_is_never_repeated(tmp_path: Path, batch: int) -> None:
    url, ledger, trace = f"file://{tmp_path}/spool", tmp_path / "ledger", tmp_path / "trace"
    asyncio.run(publish(url, Ledger(ledger), 1, 1))
    # strace counts each call by itself: the first one that this publish makes is the one to fail.
    first = _publish_traced(url, ledger, batch, trace)[0].split()[1].partition("(")[0]
    lines = _publish_traced(url, ledger, batch, trace, "-e", f"inject={first}:error=EIO:when=1")
    assert Books(ledger).read("errors") == ["PublishUncertain"]
    assert len(check_invariant(url, ledger).acked) == 4 * batch + 1
    failed = [number for number, line in enumerate(lines) if "INJECTED" in line]
    assert len(failed) == 1
    target = _target(lines[failed[0]])
    after = [_target(line) for line in lines[failed[0] + 1 :] if "syncfs" not in line]
    assert "/tmp/_" not in target or target not in after, f"{target} was synced again after its sync had failed"
    drain(url, ledger)


def _target(line: str) -> str:
    found = re.search(r"\(\d+<([^>]*)>", line)
    return found.group(1) if found else ""


@pytest.fixture(params=["size=1m", "nr_inodes=50"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.serial
async def test_full_storage_is_one_clear_error_and_everything_stored_can_be_drained(small_disk: Path) -> None:
    backend = open_backend(f"file://{small_disk}/spool")
    stored: list[str] = []

    async def fill() -> None:
        for _ in range(3000):
            stored.extend(await backend.publish(QUEUE, [Draft(body=b"x" * 2000)]))

    with pytest.raises(StorageFull):
        await fill()
    assert stored
    seen = await list_messages(backend, QUEUE, Query(State.READY))
    assert [each.message.id for each in seen] == stored
    assert all(len(each.message.body) == 2000 for each in seen), "a partial message is visible"
    drained: list[str] = []
    while leases := await backend.lease(QUEUE, 10, 30.0):
        drained += [lease.message.id for lease in leases]
        assert await backend.settle([ack(lease) for lease in leases]) == []
    assert drained == stored
    await backend.publish(QUEUE, [Draft(body=b"room again")])
    await backend.aclose()
    assert os.listdir(small_disk / "spool" / QUEUE / "tmp") == []
