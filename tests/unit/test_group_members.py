"""A directory of a group: who may create files in it may publish, and any member works on what others published."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

# Two users who have no group in common but this one.
WORKER, PUBLISHER, GROUP = 54001, 54002, 54003

# A program becomes its user when it has run once and all is imported: only root may be able to read the interpreter.
BECOME = """
import asyncio, os, sys, tempfile
from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement

async def run_once(url):
    backend = open_backend(url)
    await backend.publish("q", [Draft(body=b"x") for _ in range(3)])
    leases = await backend.lease("q", 3, 30.0)
    hows = (SettleAction.ACK, SettleAction.FAIL_TMP, SettleAction.FAIL_PERM)
    await backend.settle([Settlement(lease=l, action=how, error="no") for l, how in zip(leases, hows)])
    await backend.reap("q")
    await backend.stats("q")
    await backend.aclose()

async def open_as_user():
    with tempfile.TemporaryDirectory() as place:
        await run_once(sys.argv[1].partition(":")[0] + "://" + place + "/spool")
    backend = open_backend(sys.argv[1])
    user, group = map(int, sys.argv[2:])
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    os.umask(0o027)
    return backend
"""
PUBLISH = """
async def main():
    backend = await open_as_user()
    await backend.create("q")
    await backend.publish("q", [Draft(body=body.encode()) for body in ("acked", "retried", "failed")])
    await backend.aclose()

asyncio.run(main())
"""
WORK = """
HOW = {b"acked": SettleAction.ACK, b"moved in": SettleAction.ACK, b"failed": SettleAction.FAIL_PERM}

async def main():
    backend = await open_as_user()
    seen = []
    while leases := await backend.lease("q", 10, 30.0):
        seen += sorted(lease.message.body.decode() for lease in leases)
        again = [lease for lease in leases if lease.message.body == b"retried" and lease.message.tries]
        settlements = [
            Settlement(
                lease=lease,
                action=SettleAction.ACK if lease in again else HOW.get(lease.message.body, SettleAction.FAIL_TMP),
                error="no luck",
            )
            for lease in leases
        ]
        assert await backend.settle(settlements) == []
        await backend.reap("q")
    stats = await backend.stats("q")
    print(sorted(seen), stats.ready, stats.leased, stats.failed)
    await backend.aclose()

asyncio.run(main())
"""


@pytest.fixture
def spool() -> Iterator[Path]:
    # Not below pytest's directory, which other users cannot enter.
    place = Path(tempfile.mkdtemp())
    os.chown(place, 0, GROUP)
    place.chmod(0o2770)
    yield place / "spool"
    shutil.rmtree(place)


def run_as(user: int, program: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BECOME + program, url, str(user), str(GROUP)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("scheme", "options"), [("file", "?dir_mode=02770"), ("fsq", "")])
def test_a_member_of_the_group_works_on_what_another_one_published_and_on_what_root_moved_in(
    scheme: str, options: str, spool: Path
) -> None:
    url = f"{scheme}://{spool}{options}"
    run_as(PUBLISHER, PUBLISH, url)
    moved = spool.parent / "moved"
    moved.write_text("moved in")
    moved.chmod(0o644)
    # A name as the standard has it.
    moved.rename(spool / "q/queue/_20200101000000_000000001_1_host-aaaaaaaa_0")
    seen = ["acked", "failed", "moved in", "retried", "retried"]
    assert run_as(WORKER, WORK, url) == f"{seen} 0 0 1"


SCAN = """
from qworker.cli.main import main

async def main_as_user():
    await (await open_as_user()).aclose()

# Only root may be able to read what a scan imports at its end.
with tempfile.TemporaryDirectory() as place:
    for queue in ("q", "none"):
        main(["create", "fsq://" + place, "q"])
        main(["publish", "fsq://" + place, "q", "--body", "x"])
        main(["scan", "fsq://" + place, queue, "true"])
asyncio.run(main_as_user())
sys.stderr.flush()
os.dup2(1, 2)
print(main(["scan", sys.argv[1], "q", "sh", "-c", "echo the program ran"]))
"""


@pytest.mark.parametrize("part", ["", "tmp", "queue", "done", "fail"])
@pytest.mark.parametrize("mode", [0o2700, 0o2750])
def test_a_scan_without_permission_runs_nothing_and_ends_with_111_and_one_line(
    part: str, mode: int, spool: Path
) -> None:
    run_as(PUBLISHER, PUBLISH, f"fsq://{spool}")
    denied = spool / "q" / part
    os.chown(denied, 0, GROUP)
    denied.chmod(mode)
    *lines, status = run_as(WORKER, SCAN, f"fsq://{spool}").splitlines()[-2:]
    if part in {"", "tmp"} and mode == 0o2750:
        # A scan writes to neither of them.
        assert (lines, status) == (["the program ran"], "0")
        return
    assert status == "111"
    assert lines[0].startswith("qworker: cannot scan q: Permission denied: ")


def test_a_scan_whose_outcome_cannot_be_stored_ends_with_111_and_one_line(spool: Path) -> None:
    run_as(PUBLISHER, PUBLISH, f"fsq://{spool}")
    # Only the owner of a file can remove it from a sticky directory.
    (spool / "q/queue").chmod(0o3770)
    *_, said, status = run_as(WORKER, SCAN, f"fsq://{spool}").splitlines()
    assert status == "111"
    assert said.startswith("qworker: cannot store the outcome of _")
