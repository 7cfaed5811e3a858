"""Directories that people remove, move or replace while a store is open."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog.testing

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.message import Draft, Lease, SettleAction, Settlement
from tests.support.waiting import let_pass

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

# The directory of the queue `q`, and two directories without which it cannot work, of each scheme.
LAYOUTS = {
    "file": ("q", "q/queue", "q/fail"),
    "fsq": ("q", "q/queue", "q/fail"),
    "vsqs": ("q", "q/.qworker", "q/.qworker/fail"),
    "mq": ("queues/q", ".qworker/due/q", ".qworker/lease"),
    "sq": ("q", "q/.qworker", "q/.qworker/channels"),
}
SCHEMES = list(LAYOUTS)
# Seconds within which a worker finds the directory, with patience for a busy machine.
PATIENCE = 30.0


@pytest_asyncio.fixture(params=SCHEMES)
async def backend(request: pytest.FixtureRequest, spool: Path) -> AsyncIterator[Backend]:
    backend = open_backend(f"{request.param}://{spool}?sync=off")
    await backend.create("q")
    yield backend
    await backend.aclose()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    parent = tmp_path / "parent"
    parent.mkdir()
    return parent / "spool"


async def lease_soon(backend: Backend) -> list[bytes]:
    """Lease as a worker does: wait, lease, again."""
    async with asyncio.timeout(PATIENCE):
        while not (leases := await backend.lease("q", 10, 60.0, timeout=1.0)):
            pass
    return [lease.message.body for lease in leases]


async def publish_elsewhere(backend: Backend, body: bytes) -> None:
    """Publish as another process does, which has never seen the old directory."""
    other = open_backend(backend.describe().partition("?")[0] + "?sync=off")
    await other.publish("q", [Draft(body=body)])
    await other.aclose()


def remove_root(backend: Backend, spool: Path) -> None:
    shutil.rmtree(spool)


def remove_queue(backend: Backend, spool: Path) -> None:
    shutil.rmtree(spool / layout(backend)[0])


def remove_part(backend: Backend, spool: Path) -> None:
    shutil.rmtree(spool / layout(backend)[1])


def remove_another_part(backend: Backend, spool: Path) -> None:
    shutil.rmtree(spool / layout(backend)[2])


def move_root(backend: Backend, spool: Path) -> None:
    spool.rename(spool.with_name("spool-old"))


def move_queue(backend: Backend, spool: Path) -> None:
    queue = spool / layout(backend)[0]
    queue.rename(queue.with_name("q-old"))


def layout(backend: Backend) -> tuple[str, str, str]:
    return LAYOUTS[backend.describe().partition(":")[0]]


Replace = Callable[[Backend, Path], None]
REPLACEMENTS = [remove_root, remove_queue, remove_part, remove_another_part, move_root, move_queue]


@pytest.mark.parametrize("replace", REPLACEMENTS)
async def test_a_waiting_worker_finds_the_directory_that_a_new_publisher_makes(
    backend: Backend, spool: Path, replace: Replace
) -> None:
    await backend.publish("q", [Draft(body=b"before")])
    assert await lease_soon(backend) == [b"before"]
    waiting = asyncio.create_task(lease_soon(backend))
    replace(backend, spool)
    await publish_elsewhere(backend, b"after")
    assert await waiting == [b"after"]


@pytest.mark.parametrize("replace", REPLACEMENTS)
async def test_a_running_publisher_makes_the_directory_again(backend: Backend, spool: Path, replace: Replace) -> None:
    await backend.publish("q", [Draft(body=b"before")])
    await lease_soon(backend)
    replace(backend, spool)
    # A directory that was moved away is noticed within a second; a removed one at once.
    moved = replace in {move_root, move_queue}
    async with asyncio.timeout(PATIENCE):
        await backend.publish("q", [Draft(body=b"after")])
        while moved and not (spool / layout(backend)[0]).exists():
            await backend.publish("q", [Draft(body=b"after")])
    assert b"after" in await lease_soon(backend)
    other = open_backend(backend.describe().partition("?")[0] + "?sync=off")
    assert "q" in await other.queues()
    await other.aclose()


async def test_a_replaced_directory_is_reported_once(backend: Backend, spool: Path) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    with structlog.testing.capture_logs() as lines:
        move_root(backend, spool)
        async with asyncio.timeout(PATIENCE):
            while not spool.exists():
                await backend.publish("q", [Draft(body=b"x")])
        await lease_soon(backend)
    assert [line["event"] for line in lines] == ["directory_replaced"]
    assert lines[0]["directory"] == str(spool)


async def test_a_lease_of_a_moved_queue_ends_where_the_queue_is_now(spool: Path) -> None:
    backend = open_backend(f"file://{spool}?sync=off")
    await backend.create("q")
    await backend.publish("q", [Draft(body=b"x")])
    leases: list[Lease] = await backend.lease("q", 1, 60.0)
    move_queue(backend, spool)
    await publish_elsewhere(backend, b"new")
    await lease_soon(backend)
    assert backend.extend(leases, 60.0) == []
    old = open_backend(f"file://{spool}?sync=off")
    await old.reap("q-old")
    assert await old.lease("q-old", 1, 60.0) == [], "a live lease was taken over"
    assert await backend.settle([Settlement(lease=leases[0], action=SettleAction.ACK)]) == []
    stats = await old.stats("q-old")
    assert (stats.ready, stats.leased, stats.delayed) == (0, 0, 0)
    await old.aclose()
    await backend.aclose()


async def test_a_lease_in_a_removed_directory_is_lost(backend: Backend, spool: Path) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    (lease,) = await backend.lease("q", 1, 60.0)
    remove_root(backend, spool)
    await publish_elsewhere(backend, b"new")
    assert await lease_soon(backend) == [b"new"]
    settlement = Settlement(lease=lease, action=SettleAction.ACK)
    assert await backend.settle([settlement]) == [settlement]


async def raises_soon(call: Callable[[], Awaitable[object]]) -> str:
    """Repeat a call until it fails. Return the error."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await call()
            except BackendUnavailable as error:
                return str(error)
            await let_pass(0.05)


async def test_nothing_is_created_in_another_parent_directory(backend: Backend, spool: Path) -> None:
    parent = spool.parent
    parent.rename(parent.with_name(f"{parent.name}-away"))
    parent.mkdir()
    reason = await raises_soon(lambda: backend.publish("q", [Draft(body=b"x")]))
    assert "removed or replaced" in reason
    assert os.listdir(parent) == []
    with pytest.raises(BackendUnavailable):
        await backend.lease("q", 1, 60.0)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "disk"
    point.mkdir()
    mount_tmpfs(point)
    yield point
    subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)


def mount_tmpfs(point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point)], check=True)


@pytest.mark.parametrize("below", ["", "spool"], ids=["the mount point", "a directory below it"])
async def test_nothing_is_written_below_a_mount_point_on_which_nothing_is_mounted(mounted: Path, below: str) -> None:
    root = mounted / below
    backend = open_backend(f"file://{root}?sync=off")
    await backend.publish("q", [Draft(body=b"x")])
    subprocess.run(["umount", "-l", str(mounted)], check=True)
    reason = await raises_soon(lambda: backend.publish("q", [Draft(body=b"x")]))
    assert f"nothing is mounted at {mounted}" in reason
    with pytest.raises(BackendUnavailable):
        await backend.lease("q", 1, 60.0)
    assert os.listdir(mounted) == []
    mount_tmpfs(mounted)
    if below:
        root.mkdir()
    async with asyncio.timeout(PATIENCE):
        await backend.publish("q", [Draft(body=b"again")])
    assert await lease_soon(backend) == [b"again"]
    await backend.aclose()
