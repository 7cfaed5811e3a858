"""A message's life in nothing but system calls, with the names and directories of the real one: what the kernel takes of a figure."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

__all__ = ["BareQueue"]

_TAKE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME


class BareQueue:
    """Directories that are opened beforehand, and the calls of the directory protocol on them, by one process without a rival.

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
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._tmp)
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
