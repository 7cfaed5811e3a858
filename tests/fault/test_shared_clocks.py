"""Hosts whose clocks are wrong, on one directory: two mounts, several kernels, several clocks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from qworker.backend.registry import open_backend
from qworker.kit.file_system import FileSystem
from qworker.message import Draft
from qworker_file.names import parse_lease
from tests.fault import harness
from tests.fault.harness import QUEUE, Books
from tests.support.clocks import moved_clock
from tests.support.processes import environment
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
VISIBILITY = 3.0
# Seconds that the clocks of the holders are ahead, and those of the hosts that look for the dead.
HOLDERS = (-600, -20, 0, 600)
REAPERS = (0, 600, -600)
EACH = 15

pytestmark = [pytest.mark.fault, pytest.mark.serial, pytest.mark.timeout(240)]


@contextmanager
def _mounted(source: Path, point: Path) -> Iterator[Path]:
    """A mount of a directory as a network file system: locks and changes are not seen on another mount."""
    point.mkdir()
    process = subprocess.Popen(["bindfs", "-f", str(source), str(point)])
    try:
        wait_for(lambda: os.path.ismount(point), "the mount")
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)
        process.wait(harness.PATIENCE)


@contextmanager
def _two_mounts(folder: Path) -> Iterator[tuple[Path, Path]]:
    (folder / "disk").mkdir(parents=True)
    with _mounted(folder / "disk", folder / "one") as one, _mounted(folder / "disk", folder / "other") as other:
        yield one, other


def _start_host(folder: Path, name: str, mount: Path, ahead: float, concurrency: int) -> subprocess.Popen[bytes]:
    """Start a worker as on another host."""
    command = [sys.executable, "-m", "tests.fault.other_host", name, f"file://{mount}/spool"]
    command += [str(folder / "ledger"), str(concurrency), str(VISIBILITY)]
    variables = environment(**moved_clock(folder, ahead))
    return subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True)


def _publish(mount: Path, *names: str) -> None:
    async def publish() -> None:
        backend = open_backend(f"file://{mount}/spool")
        await backend.publish(QUEUE, [Draft(body=name.encode()) for name in names])
        await backend.aclose()

    asyncio.run(publish())


def _expiries(disk: Path) -> dict[str, int]:
    """The expiry in the name of each lease, by item."""
    found = [parse_lease(name) for name in os.listdir(disk / "spool" / QUEUE / "lease")]
    return {lease[0]: lease[1] for lease in found if lease is not None}


def _seconds_until_the_dead_are_found(folder: Path, ahead: float) -> float:
    """Hosts hold leases until they are killed at the same time. Another host, whose clock is ahead, looks at them."""
    books = Books(folder / "ledger")
    with _two_mounts(folder) as mounts, ExitStack() as started:

        def start(*arguments: Any) -> subprocess.Popen[bytes]:
            process = _start_host(folder, *arguments)
            started.callback(harness.kill, process)
            return process

        assert not FileSystem.of(str(mounts[0])).is_local
        holders: list[subprocess.Popen[bytes]] = []
        for clock in HOLDERS:
            # The first mount is that of the holders, the other one that of the reaper.
            _publish(mounts[0], *[f"{clock}.{n}" for n in range(EACH)])
            holders.append(start(f"holder{clock}", mounts[0], clock, EACH))
            wait_for(lambda: len(books.read("started")) == EACH * len(holders), f"the holder at {clock} s")
        start("reaper", mounts[1], ahead, 100)
        _publish(mounts[0], "first")
        wait_for(lambda: "reaper:first" in books.read("started"), "the reaper")
        before = _expiries(folder / "disk")
        held = {item: expiry for item, expiry in before.items() if len(before) == EACH * len(HOLDERS) + 1}
        assert held

        def all_extended() -> bool:
            now = _expiries(folder / "disk")
            return all(now.get(item, 0) - expiry > 3000 * VISIBILITY for item, expiry in held.items())

        wait_for(all_extended, "three times their length", lambda: f"{books.read('started')}")
        assert len(books.read("started")) == EACH * len(HOLDERS) + 1, "a live lease was taken over"
        assert books.read("cancelled") == []
        died = time.monotonic()
        for holder in holders:
            harness.kill(holder)
        expected = {f"reaper:{clock}.{n}" for clock in HOLDERS for n in range(EACH)}
        wait_for(
            lambda: expected <= set(books.read("started")),
            "the messages of the dead",
            lambda: str(books.read("started")),
        )
        return time.monotonic() - died


def test_wrong_clocks_end_no_live_lease_and_hide_no_death(tmp_path: Path) -> None:
    # All that these hosts do is wait, so those of each clock wait at the same time.
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(_seconds_until_the_dead_are_found, tmp_path / f"{ahead}", ahead) for ahead in REAPERS]
        assert max(each.result() for each in found) < VISIBILITY + 5.0
