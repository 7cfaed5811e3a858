"""C8 and C9: listings that miss files, and wake-ups that never come."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft
from qworker.testing import wait_until_blocked
from tests.fault import harness
from tests.fault.harness import QUEUE

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# Renames files of a folder back and forth, which makes listings of the folder miss others.
SHUFFLER = """
import os, sys
folder = sys.argv[1]
while True:
    for name in os.listdir(folder):
        if name.startswith(".shuffle"):
            new = name[:-1] if name.endswith("x") else name + "x"
            os.rename(os.path.join(folder, name), os.path.join(folder, new))
"""


async def test_every_message_is_delivered_while_others_rename_in_the_same_directory(tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/spool")
    await backend.create(QUEUE)
    folder = tmp_path / "spool" / QUEUE / "queue"
    for number in range(200):
        (folder / f".shuffle{number}").touch()
    shuffler = subprocess.Popen([sys.executable, "-c", SHUFFLER, str(folder)])
    try:
        ids: list[str] = []
        for _ in range(30):
            ids += await backend.publish(QUEUE, [Draft(body=b"x") for _ in range(100)])
        delivered: list[str] = []
        async with asyncio.timeout(harness.PATIENCE):
            while len(delivered) < len(ids):
                leases = await backend.lease(QUEUE, 100, 30.0)
                delivered += [lease.message.id for lease in leases]
                await backend.settle([harness.ack(lease) for lease in leases])
    finally:
        shuffler.kill()
        shuffler.wait()
    assert sorted(delivered) == sorted(ids)
    assert await backend.lease(QUEUE, 100, 30.0) == []
    await backend.aclose()


async def _all_delivered_through(url: str, count: int, publish_with_mv: Path) -> None:
    """A consumer that waits sees messages that a stranger moves in, within a rescan each."""
    backend = open_backend(url)
    await backend.create(QUEUE)
    folder = publish_with_mv / QUEUE
    assert await backend.lease(QUEUE, 10, 30.0) == []
    waiting = asyncio.ensure_future(backend.wait([QUEUE], 10.0))
    await wait_until_blocked(waiting)
    for number in range(count):
        path = folder / "tmp" / f"stranger{number}"
        path.write_bytes(b"x")
        path.rename(folder / "queue" / f"stranger{number}")
    await waiting
    seen = 0
    async with asyncio.timeout(harness.PATIENCE):
        while seen < count:
            leases = await backend.lease(QUEUE, 500, 30.0)
            seen += len(leases)
            await backend.settle([harness.ack(lease) for lease in leases])
            if not leases:
                await backend.wait([QUEUE], 1.0)
    await backend.aclose()


@pytest.mark.serial
async def test_an_overflow_of_inotify_delays_nothing_beyond_a_rescan(tmp_path: Path) -> None:
    limit = Path("/proc/sys/fs/inotify/max_queued_events")
    before = limit.read_text()
    limit.write_text("16")
    try:
        await _all_delivered_through(f"file://{tmp_path}/spool?sync=off", 3000, tmp_path / "spool")
    finally:
        limit.write_text(before)


@pytest.fixture
def no_inotify_left() -> Iterator[None]:
    """Every inotify instance that this user may have is used up."""
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    before = limit.read_text()
    libc = ctypes.CDLL(None, use_errno=True)
    limit.write_text("1")
    taken: list[int] = []
    while (descriptor := libc.inotify_init1(os.O_CLOEXEC)) >= 0:
        taken.append(descriptor)
    try:
        yield
    finally:
        for each in taken:
            os.close(each)
        limit.write_text(before)


@pytest.mark.serial
@pytest.mark.usefixtures("no_inotify_left")
async def test_a_worker_without_inotify_finds_what_strangers_bring(tmp_path: Path) -> None:
    await _all_delivered_through(f"file://{tmp_path}/spool?sync=off", 500, tmp_path / "spool")


async def test_a_removed_trigger_costs_no_message(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool"
    consumer, producer = open_backend(url), open_backend(url)
    await consumer.create(QUEUE)
    assert await consumer.lease(QUEUE, 1, 30.0) == []
    (tmp_path / "spool" / QUEUE / "trigger-s").unlink()
    ids = [*await producer.publish(QUEUE, [Draft(body=b"x")]), *await producer.publish(QUEUE, [Draft(body=b"x")])]
    delivered: list[str] = []
    async with asyncio.timeout(harness.PATIENCE):
        while len(delivered) < 2:
            delivered += [lease.message.id for lease in await consumer.lease(QUEUE, 1, 30.0, 1.0)]
    assert delivered == ids
    await consumer.aclose()
    await producer.aclose()
