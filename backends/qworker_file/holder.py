"""The liveness file of a worker, which it keeps locked while it lives.

The kernel frees the lock when the last process that has the descriptor dies, so a free lock shows a dead holder at
once. A held lock proves nothing: a child that a worker forked may have kept it. So a held lock never prevents an
expiry.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import weakref

from qworker.kit.directory.entries import has_entry, try_unlink
from qworker.kit.files import CREATE, READ, read_all, write_all
from qworker.kit.linux import boot_id
from qworker.names import new_id

__all__ = ["DETACHED", "Holder", "LivenessFile", "has_died", "parse_publisher"]

# The prefix of a holder whose leases end by time alone.
DETACHED = "detached-"

_open_files: weakref.WeakSet[LivenessFile] = weakref.WeakSet()


class Holder:
    """The name under which one backend instance leases: at most 40 bytes, without dots."""

    __slots__ = ("detached_name", "name")

    def __init__(self, *, detached: bool) -> None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:10].strip("-") or "host"
        # The nonce of the process, which is also in the names of its unfinished files in tmp/, and the nonce of the
        # instance.
        nonce = new_id().rpartition("-")[2]
        own = secrets.token_hex(3)
        self.detached_name = f"{DETACHED}{nonce}-{own}"
        self.name = self.detached_name if detached else f"{host}-{os.getpid()}-{nonce}-{own}"


def parse_publisher(holder: str) -> str:
    """Return the nonce that the files in tmp/ of a holder's process have in their names."""
    return holder.rsplit("-", 2)[-2] if holder.count("-") >= 2 else ""


class LivenessFile:
    """A locked file in workers/, created before the first lease.

    Args:
        tmp: The queue's tmp/.
        workers: The queue's workers/.
        holder: The file's name.
        mode: The file's mode.
    """

    def __init__(self, tmp: int, workers: int, holder: str, mode: int) -> None:
        self._workers = workers
        self._holder = holder
        self._fd = os.open(holder, CREATE, mode, dir_fd=tmp)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(self._fd, f"{boot_id()}\n{os.getpid()}\n".encode())
            # It is locked before it is visible: no process ever sees the file of a living holder unlocked.
            self._show(tmp)
        except BaseException:
            # Only this instance uses the name, which is free for its next attempt.
            try_unlink(holder, tmp)
            os.close(self._fd)
            raise
        _open_files.add(self)

    def _show(self, tmp: int) -> None:
        try:
            os.rename(self._holder, self._holder, src_dir_fd=tmp, dst_dir_fd=self._workers)
        except OSError:
            # If only the reply was lost, the file exists.
            if not has_entry(self._holder, self._workers):
                raise

    def remove(self) -> None:
        """Remove the file, which shows that the holder is gone. Idempotent."""
        if self._fd >= 0:
            try_unlink(self._holder, self._workers)
            self.close()

    def close(self) -> None:
        """Close only the descriptor. In a forked child the parent's lock stays."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def has_died(workers: int, holder: str, *, local: bool) -> bool:
    """Return whether a holder is known to be dead.

    Args:
        workers: The queue's workers/.
        holder: The holder of the lease.
        local: True if no other machine uses the directory.
    """
    if holder.startswith(DETACHED):
        return False
    try:
        fd = os.open(holder, READ, dir_fd=workers)
    except FileNotFoundError:
        # It has removed the file, or was found dead before: the file is created before the first lease.
        return True
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EACCES, errno.ENXIO}:
            # Not a liveness file: nothing is known, and the lease ends by time.
            return False
        raise
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Unlocked explicitly: a child forked at this moment would keep the lock that closing here leaves.
        fcntl.flock(fd, fcntl.LOCK_UN)
        boot = read_all(fd, os.fstat(fd).st_size).partition(b"\n")[0].decode(errors="replace")
        # On a disk that other machines use, another machine's lock may be unknown here.
        return local or boot == boot_id()
    finally:
        os.close(fd)


def _close_in_child() -> None:
    for file in tuple(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
