"""The life sign of a worker: one file that it keeps locked as long as it lives.

The kernel lets go of the lock when the last process that has the descriptor dies, so a free lock is a dead holder, at once. A held
lock proves nothing: a child that a worker forked may have kept it. So it never vetoes an expiry.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import weakref

from qworker.kit.files import CREATE, READ, read_all, write_all
from qworker.kit.linux import boot_id
from qworker.names import new_id

__all__ = ["DETACHED", "Holder", "LifeSign", "has_died", "publisher_of"]

# A holder that ends by time alone.
DETACHED = "detached-"

_open_files: weakref.WeakSet[LifeSign] = weakref.WeakSet()


class Holder:
    """The name under which one backend instance leases: at most 40 bytes, without dots."""

    __slots__ = ("detached_name", "name")

    def __init__(self, *, detached: bool) -> None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:10].strip("-") or "host"
        # The nonce of the process, which its unfinished files in tmp/ carry too, and one of the instance.
        nonce = new_id().rpartition("-")[2]
        own = secrets.token_hex(3)
        self.detached_name = f"{DETACHED}{nonce}-{own}"
        self.name = self.detached_name if detached else f"{host}-{os.getpid()}-{nonce}-{own}"


def publisher_of(holder: str) -> str:
    """The nonce that the files in tmp/ of a holder's process carry."""
    return holder.rsplit("-", 2)[-2] if holder.count("-") >= 2 else ""


class LifeSign:
    """A locked file in workers/, made before the first lease.

    Args:
        tmp: the queue's tmp/.
        workers: the queue's workers/.
        holder: the file's name.
        mode: of the file.
    """

    def __init__(self, tmp: int, workers: int, holder: str, mode: int) -> None:
        self._workers = workers
        self._holder = holder
        self._fd = os.open(holder, CREATE, mode, dir_fd=tmp)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(self._fd, f"{boot_id()}\n{os.getpid()}\n".encode())
            # Locked before it is seen: nobody ever sees a living holder's file unlocked.
            self._show(tmp)
        except BaseException:
            # The name is this instance's alone, and free for its next attempt.
            _remove(holder, tmp)
            os.close(self._fd)
            raise
        _open_files.add(self)

    def _show(self, tmp: int) -> None:
        try:
            os.rename(self._holder, self._holder, src_dir_fd=tmp, dst_dir_fd=self._workers)
        except OSError:
            # A lost reply: the file is there all the same.
            try:
                os.stat(self._holder, dir_fd=self._workers, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                return
            raise

    def end(self) -> None:
        """Say that the holder is gone. Idempotent."""
        if self._fd >= 0:
            _remove(self._holder, self._workers)
            self.drop()

    def drop(self) -> None:
        """Close the descriptor without a word; in a forked child the parent's lock stays."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def has_died(workers: int, holder: str, *, local: bool) -> bool:
    """Whether a holder is known to be dead.

    Args:
        workers: the queue's workers/.
        holder: whose lease it is.
        local: whether no other machine can see the directory.
    """
    if holder.startswith(DETACHED):
        return False
    try:
        fd = os.open(holder, READ, dir_fd=workers)
    except FileNotFoundError:
        # It said so itself, or was found dead before: the file is made before the first lease.
        return True
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EACCES, errno.ENXIO}:
            # Not a file of ours: nothing is known, and the lease ends by time.
            return False
        raise
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Unlocked by hand: a child forked in this moment would keep the lock that closing here leaves.
        fcntl.flock(fd, fcntl.LOCK_UN)
        boot = read_all(fd, os.fstat(fd).st_size).partition(b"\n")[0].decode(errors="replace")
        # On a disk that others see, another machine's lock may be unknown here.
        return local or boot == boot_id()
    finally:
        os.close(fd)


def _remove(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        # Moved on, or the queue was deleted.
        pass


def _forget_in_child() -> None:
    for sign in tuple(_open_files):
        sign.drop()


os.register_at_fork(after_in_child=_forget_in_child)
