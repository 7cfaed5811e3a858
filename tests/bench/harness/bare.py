"""The system calls of a message's life, with real names and directories: the kernel's share of a figure."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from qworker.kit.linux import sync_file_system

__all__ = ["BareBulk", "BareQueue"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# Files of one staging directory.
_CHUNK = 128
_TAKE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME


class BareQueue:
    """Open directories, and the calls of the directory protocol on them, by one process without competition.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        for part in ("tmp", "queue", "lease"):
            (folder / part).mkdir()
        self._tmp, self._queue, self._lease = (
            os.open(folder / part, os.O_RDONLY) for part in ("tmp", "queue", "lease")
        )
        self._count = 0

    def publish(self, body: bytes, *, durable: bool) -> str:
        """Write one message elsewhere and move it to its place; its name."""
        self._count += 1
        name = f"_20261121071038_{self._count:09d}_4242_host-7f3a0000_0_noop"
        file = os.open(name, _CREATE, 0o600, dir_fd=self._tmp)
        os.write(file, body)
        if durable:
            os.fsync(file)
        os.rename(name, name, src_dir_fd=self._tmp, dst_dir_fd=self._queue)
        os.close(file)
        if durable:
            os.fsync(self._queue)
        return name

    def lease(self, name: str, size: int) -> tuple[int, str]:
        """Lock, move, stamp and read one message; its descriptor and its name now."""
        file = os.open(name, _TAKE, dir_fd=self._queue)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = f"{name}.1795425300123.12345678abcdef-4242"
        os.rename(name, held, src_dir_fd=self._queue, dst_dir_fd=self._lease)
        now = time.time_ns()
        os.utime(file, ns=(now, now))
        os.read(file, size + 1)
        return file, held

    def ack(self, file: int, held: str) -> None:
        """Remove one message."""
        os.unlink(held, dir_fd=self._lease)
        os.close(file)


class BareBulk:
    """A bulk write: several processes create files in small directories, and one process moves them to one directory.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self._staged, self._queue = folder / "staged", folder / "queue"
        for path in (self._staged, self._queue):
            path.mkdir()

    def write(self, part: int, count: int, body: bytes) -> None:
        """Write `count` messages, and put them on the disk."""
        staged = os.open(self._staged, os.O_RDONLY)
        for first in range(0, count, _CHUNK):
            path = self._staged / f"{part}.{first:09d}"
            path.mkdir()
            directory = os.open(path, os.O_RDONLY)
            for row in range(first, min(count, first + _CHUNK)):
                file = os.open(f"{row:09d}.0_0_noop", _CREATE, 0o600, dir_fd=directory)
                os.write(file, body)
                os.close(file)
            os.close(directory)
        sync_file_system(staged)

    def move(self) -> None:
        """Move what all processes have written, and put the names on the disk."""
        queue = os.open(self._queue, os.O_RDONLY)
        for path in sorted(self._staged.iterdir()):
            directory, part = os.open(path, os.O_RDONLY), path.stem
            for name in sorted(os.listdir(directory)):
                row = name[:9]
                item = f"_20261121071038_{row}_0_~bench:0:{part}:{row}_0_noop"
                os.rename(name, item, src_dir_fd=directory, dst_dir_fd=queue)
            os.close(directory)
            path.rmdir()
        os.fsync(queue)
