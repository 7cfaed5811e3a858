"""The trigger of a queue: a FIFO that wakes one idle worker."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable

from qworker_file.layout import QueueDir

__all__ = ["Trigger"]


class Trigger:
    """The right to read a queue's trigger: one idle worker has it, by a lock on the FIFO."""

    __slots__ = ("_loop", "fd", "queue")

    def __init__(self, files: QueueDir, on_pull: Callable[[Trigger], None]) -> None:
        self.queue = files.name
        self.fd = files.trigger
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, on_pull, self)

    @classmethod
    def acquire(cls, files: QueueDir, on_pull: Callable[[Trigger], None]) -> Trigger | None:
        """Listen, or return None if another worker listens or there is no trigger."""
        if files.trigger < 0:
            return None
        try:
            fcntl.flock(files.trigger, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP}:
                return None
            raise
        return cls(files, on_pull)

    def release(self) -> None:
        """Let another worker listen."""
        self._loop.remove_reader(self.fd)
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def drain(self) -> None:
        """Read the written bytes: one wake-up is enough for all of them."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
