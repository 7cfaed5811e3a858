"""A journaled file system in a file, which can go down without writing its cache: as root, in `serial` tests."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.depth import DEPTH
from tests.support.waiting import wait_for

__all__ = ["image", "mount_image", "pull_the_plug", "unmount"]

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


def mount_image(image: Path, where: Path) -> None:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)


def pull_the_plug(mounted: Path) -> None:
    descriptor = os.open(mounted, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def unmount(mounted: Path) -> None:
    def is_unmounted() -> bool:
        return subprocess.run(["umount", str(mounted)], capture_output=True, check=False).returncode == 0

    wait_for(is_unmounted, "the end of a mount that is busy")
