"""C11: the file system goes down under the programs, without writing what it had not written; then it is mounted again."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import harness
from tests.fault.harness import Books, check_invariant, drain
from tests.support.depth import DEPTH

pytestmark = [pytest.mark.fault, pytest.mark.serial, pytest.mark.timeout(600)]

CYCLES = 30 * DEPTH
# _IOR('X', 125, __u32) of <linux/ext4.h>, with the flag that leaves the journal unflushed.
SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """A journaled ext4 in a file."""
    image = tmp_path / "disk.img"
    with open(image, "wb") as file:
        file.truncate(64 * DEPTH << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    return image


def _mount(image: Path, where: Path) -> None:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)


def _pull_the_plug(mount: Path) -> None:
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def _unmount(mount: Path) -> None:
    deadline = time.monotonic() + harness.PATIENCE
    while subprocess.run(["umount", str(mount)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, "the mount stays busy"
        time.sleep(0.05)


def _await_acks(books: Books, more: int, when: str) -> None:
    before = len(books.read("acked"))
    deadline = time.monotonic() + harness.PATIENCE
    while len(books.read("acked")) < before + more:
        assert time.monotonic() < deadline, f"the publishers make no progress in {when}"
        time.sleep(0.01)


def test_30_power_cuts_undo_no_acknowledged_publish_and_no_acknowledged_ack(tmp_path: Path, image: Path) -> None:
    mount, ledger = tmp_path / "mnt", tmp_path / "ledger"
    url = f"file://{mount}/spool"
    draw = random.Random(11)
    acked_in_all = 0
    for cycle in range(CYCLES):
        _mount(image, mount)
        programs = [harness.start("publish", url, ledger, 100_000, batch) for batch in (1, 8, 50)]
        programs.append(harness.start("ack", url, ledger))
        try:
            _await_acks(Books(ledger), 60, f"cycle {cycle}")
            time.sleep(draw.uniform(0.0, 0.2))
            _pull_the_plug(mount)
        finally:
            for program in programs:
                harness.kill(program)
            _unmount(mount)
    _mount(image, mount)
    try:
        books = check_invariant(url, ledger)
        done = set(books.read("settled"))
        assert not done & set(harness.stored(url)), "an acknowledged ack was undone"
        acked_in_all = len(books.acked)
        drain(url, ledger)
    finally:
        _unmount(mount)
    assert acked_in_all >= CYCLES * 60
