"""Liveness files: a file per process in `.qworker/workers`, locked as long as the process lives.

A free lock on the same boot means that the process is dead. A held lock never prevents an expiry, because a forked
child may hold it.
"""

from __future__ import annotations

import fcntl
import os
import secrets

from qworker.kit.linux import boot_id
from qworker_mq.layout import try_unlink

__all__ = ["LivenessFile", "is_dead"]


class LivenessFile:
    """The liveness file of this process.

    Args:
        workers: Descriptor of `.qworker/workers`.
        tmp: Descriptor of `.qworker/tmp`.
    """

    def __init__(self, workers: int, tmp: int) -> None:
        self.holder = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._workers = workers
        self._fd = os.open(
            self.holder, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=tmp
        )
        try:
            os.write(self._fd, boot_id().encode())
            # Locked before it is visible, so that no process sees it free.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.rename(self.holder, self.holder, src_dir_fd=tmp, dst_dir_fd=workers)
        except BaseException:
            os.close(self._fd)
            raise
        _own_files.add(self)

    def close(self) -> None:
        """Remove the file. This process is then no longer known as alive."""
        _own_files.discard(self)
        if self._fd >= 0:
            try_unlink(self.holder, self._workers)
            self.abandon()

    def abandon(self) -> None:
        """Close only the descriptor, because the file belongs to another process."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_own_files: set[LivenessFile] = set()


def _after_fork() -> None:
    # The child's copy of the descriptor would hold the lock after the parent's death.
    for file in _own_files:
        file.abandon()
    _own_files.clear()


os.register_at_fork(after_in_child=_after_fork)


def is_dead(workers: int, holder: str) -> bool:
    """Return whether a holder is known to be dead: the lock of its file is free, on this boot of this machine.

    If the file does not exist, the process has closed its backend. It counts as dead.
    """
    try:
        fd = os.open(holder, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=workers)
    except FileNotFoundError:
        return True
    try:
        if os.read(fd, 64) != boot_id().encode():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
