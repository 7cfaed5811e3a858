"""Life signs: a file per process in `.qworker/workers`, locked for as long as the process lives.

A free lock on the same boot means dead at once. A held one never vetoes an expiry: a forked child may hold it.
"""

from __future__ import annotations

import fcntl
import os
import secrets

from qworker.kit.linux import boot_id

__all__ = ["LifeSign", "is_dead"]


class LifeSign:
    """This process's life sign.

    Args:
        workers: descriptor of `.qworker/workers`.
        tmp: descriptor of `.qworker/tmp`.
    """

    def __init__(self, workers: int, tmp: int) -> None:
        self.holder = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._workers = workers
        self._fd = os.open(
            self.holder, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=tmp
        )
        try:
            os.write(self._fd, boot_id().encode())
            # Locked before it is visible, so that nobody sees it free.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.rename(self.holder, self.holder, src_dir_fd=tmp, dst_dir_fd=workers)
        except BaseException:
            os.close(self._fd)
            raise
        _living.add(self)

    def close(self) -> None:
        """Take the sign down."""
        _living.discard(self)
        if self._fd >= 0:
            try:
                os.unlink(self.holder, dir_fd=self._workers)
            except FileNotFoundError:
                pass
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor only: the sign is another process's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_living: set[LifeSign] = set()


def _after_fork() -> None:
    # The child's copy of the descriptor would hold the lock after the parent's death.
    for sign in _living:
        sign.abandon()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork)


def is_dead(workers: int, holder: str) -> bool:
    """Whether the process behind a life sign is known to be dead: its lock is free, on this boot of this machine.

    An absent sign is that of a process that closed its backend: dead as well.
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
