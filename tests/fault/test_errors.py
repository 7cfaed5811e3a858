"""C3, C4 and C5: calls that fail, a sync that fails, and storage that is full."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.errors import StorageFull
from qworker.message import Draft
from qworker.registry import open_backend
from tests.fault import harness
from tests.fault.harness import MOVES, QUEUE, check_invariant, recover, strays

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

ERRORS = ["ENOSPC", "EDQUOT", "EIO", "EMFILE", "EROFS", "ESTALE"]


@pytest.mark.parametrize("error", ERRORS)
def test_a_failed_call_is_never_taken_for_success(tmp_path: Path, error: str) -> None:
    def at(step: int) -> None:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool", root / "ledger"
        harness.run("publish", url, ledger, 6, 3, inject=f"{MOVES}:error={error}:when={step}")
        check_invariant(url, ledger)
        harness.run("work", url, ledger, 4, inject=f"{MOVES}:error={error}:when={step}")
        check_invariant(url, ledger)
        recover(url, ledger)
        assert strays(root / "spool") == []

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(at, step) for step in (1, 2, 3, 5, 8, 13, 20)]:
            each.result()


@pytest.mark.parametrize("batch", [1, 4, 40], ids=["alone", "few", "many"])
def test_a_failed_sync_fails_the_publish_and_is_never_repeated(tmp_path: Path, batch: int) -> None:
    url, ledger, trace = f"file://{tmp_path}/spool", tmp_path / "ledger", tmp_path / "trace"
    syncs = "fsync,fdatasync,syncfs,io_getevents,sync_file_range"
    assert harness.run("publish", url, ledger, 1, 1).returncode == 0
    command = ["strace", "-f", "-y", "-qq", "-o", str(trace), "-e", f"trace={syncs}"]
    command += ["-e", f"inject={syncs}:error=EIO:when=1"]
    command += [sys.executable, str(harness.PROGRAMS), "publish", url, str(ledger), str(batch), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    books = check_invariant(url, ledger)
    assert books.read("errors") == ["PublishFailed"]
    assert len(books.acked) == batch + 1
    lines = trace.read_text().splitlines()
    failed = [_target(line) for line in lines if "INJECTED" in line]
    assert len(failed) == 1
    again = [line for line in lines if "INJECTED" not in line and "syncfs" not in line and _target(line) == failed[0]]
    assert not (again and "/tmp/" in failed[0]), f"{failed[0]} was synced again after its sync had failed"
    recover(url, ledger)


def _target(line: str) -> str:
    found = re.search(r"\d+<([^>]*)>", line)
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


async def test_full_storage_is_one_clear_error_and_everything_stored_can_be_drained(small_disk: Path) -> None:
    url = f"file://{small_disk}/spool"
    backend = open_backend(url)
    stored: list[str] = []

    async def fill() -> None:
        for _ in range(3000):
            stored.extend(await backend.publish(QUEUE, [Draft(body=b"x" * 2000)]))

    with pytest.raises(StorageFull):
        await fill()
    assert stored
    seen = await backend.browse(QUEUE, harness.State.READY, limit=10_000)
    assert [each.message.id for each in seen] == stored
    assert all(len(each.message.body) == 2000 for each in seen), "a partial message is visible"
    drained: list[str] = []
    while leases := await backend.lease(QUEUE, 10, 30.0):
        drained += [lease.message.id for lease in leases]
        assert await backend.settle([harness.ack(lease) for lease in leases]) == []
    assert drained == stored
    await backend.publish(QUEUE, [Draft(body=b"room again")])
    await backend.aclose()
    assert os.listdir(small_disk / "spool" / QUEUE / "tmp") == []
    await asyncio.sleep(0)
