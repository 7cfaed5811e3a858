"""Processes of commit 31528ec share a queue with a load that was sealed by today's code."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qworker import bulk
from qworker.backend.registry import open_backend
from qworker.message import Draft, Lease, SettleAction, Settlement
from tests.support.old_code import FIRST, unpack_commit

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

ROWS = 40
EVERY_ROW = [f"0.{row}" for row in range(ROWS)]

# Run by the old code: lease and ack at most LIMIT messages, then run the same load again, and print what was taken.
_OLD = """
import asyncio, json, sys
from qworker.message import Draft, Settle, Settlement
from qworker.registry import open_backend

async def main(url, limit, again):
    backend = open_backend(url)
    leases = await backend.lease("q", int(limit), 60.0)
    await backend.settle([Settlement(lease=lease, how=Settle.ACK) for lease in leases])
    await backend.reap("q")
    if again == "again":
        writer = backend.staging("q", "job")
        await writer.commit(0, [await writer.stage("old", 0, "a", [[Draft(body=b"old")]])])
    print(json.dumps([lease.message.body.decode() for lease in leases]))
    await backend.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the old code."""
    return unpack_commit(FIRST, tmp_path_factory.mktemp("old"))


def run_old(old: dict[str, str], folder: Path, url: str, limit: int, again: str = "") -> list[str]:
    command = [sys.executable, "-c", _OLD, url, str(limit), again]
    ran = subprocess.run(command, env=old, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[str] = json.loads(ran.stdout)
    return found


async def seal(url: str) -> None:
    backend = open_backend(url)
    writer = bulk.open(backend, "q", "job")
    await writer.commit(0, [await writer.stage("new", 0, "a", [[Draft(body=row.encode()) for row in EVERY_ROW]])])
    await backend.aclose()


async def take(url: str) -> list[str]:
    backend = open_backend(url)
    leases: list[Lease] = await backend.lease("q", 2 * ROWS, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    await backend.aclose()
    return [lease.message.body.decode() for lease in leases]


def test_an_older_worker_and_an_older_run_of_the_load_neither_see_nor_harm_a_sealed_load(
    tmp_path: Path, old: dict[str, str]
) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    asyncio.run(seal(url))
    assert run_old(old, tmp_path, url, ROWS, "again") == []
    assert asyncio.run(take(url)) == EVERY_ROW


def test_older_workers_run_a_load_that_a_mover_moves_and_each_message_is_run_once(
    tmp_path: Path, old: dict[str, str]
) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    asyncio.run(seal(url))

    async def move() -> None:
        mover = open_backend(f"{url}&fsq=1")
        await mover.reap("q")
        await mover.aclose()

    asyncio.run(move())
    taken = run_old(old, tmp_path, url, 10)
    assert taken + asyncio.run(take(url)) == EVERY_ROW


def test_a_load_with_fsq_is_seen_by_older_workers_when_its_commit_returns(tmp_path: Path, old: dict[str, str]) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    asyncio.run(seal(f"{url}&fsq=1"))
    assert run_old(old, tmp_path, url, ROWS) == EVERY_ROW
