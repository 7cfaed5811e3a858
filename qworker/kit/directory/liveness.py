"""Which processes are alive, shown by files that each process keeps locked while it lives.

The kernel drops the lock when the last process that has the descriptor dies, so a free lock shows a dead holder at
once. A held lock proves nothing: a child that a worker forked may have kept it. So a held lock never prevents an
expiry.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Collection

from qworker.clock import Clock
from qworker.kit.files import has_entry, try_unlink, write_all
from qworker.kit.linux import boot_id
from qworker.kit.opening import create_file, open_file
from qworker.kit.store_errors import DAMAGED, DENIED, NOT_A_FILE

__all__ = ["REFRESH", "REFRESHED", "AbandonedFiles", "LivenessFile", "has_died"]

# Bytes that are read of a file. The boot id comes first.
_LONGEST = 4096
# Seconds between two changes of a file by its holder on a shared file system, and a line of a file that is changed so.
REFRESH = 3600.0
REFRESHED = "refreshed"
# Seconds without a change after which the holder of such a file is dead.
_ABANDONED = 24 * 3600.0

_open_files: weakref.WeakSet[LivenessFile] = weakref.WeakSet()


class LivenessFile:
    """A holder's locked file, which is created before its first lease.

    Args:
        tmp: The open directory in which the file is created.
        workers: The open directory in which other processes find it, on the same file system.
        holder: The file's name, unique to this object.
        mode: The file's mode.
        note: Text to write after the boot id, for people.
    """

    def __init__(self, tmp: int, workers: int, holder: str, mode: int = 0o600, note: str = "") -> None:
        self._workers = workers
        self.holder = holder
        self._fd = create_file(holder, tmp, mode)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(self._fd, f"{boot_id()}{note}".encode())
            # It is locked before it is visible: no process ever sees a living holder's file unlocked.
            self._show(tmp)
        except BaseException:
            # The name is this object's alone, and free for the next attempt.
            try_unlink(holder, tmp)
            os.close(self._fd)
            raise
        _open_files.add(self)

    def _show(self, tmp: int) -> None:
        try:
            os.rename(self.holder, self.holder, src_dir_fd=tmp, dst_dir_fd=self._workers)
        except OSError:
            # A lost reply: the file is there all the same.
            if not has_entry(self.holder, self._workers):
                raise

    def mark_clock(self, now: float) -> None:
        """Show how far this host's clock is from the file server's clock: the server sets the ctime of this change.

        Args:
            now: Unix seconds, by this host's clock.

        Raises:
            OSError: The store failed, or the file is gone.
        """
        # By its name: another thread may close the descriptor in the meantime.
        moment = int(now * 1e9)
        os.utime(self.holder, ns=(moment, moment), dir_fd=self._workers, follow_symlinks=False)

    def close(self) -> None:
        """Show that the holder is gone. Idempotent."""
        if self._fd >= 0:
            try_unlink(self.holder, self._workers)
            self.abandon()

    def abandon(self) -> None:
        """Close only the descriptor. In a forked child, the parent's lock stays."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def has_died(workers: int, holder: str, *, local: bool) -> bool:
    """Return whether a holder is known to be dead.

    Args:
        workers: The open directory of the files.
        holder: The file's name.
        local: True if no other machine uses the directory.
    """
    try:
        fd, _ = open_file(holder, workers)
    except FileNotFoundError:
        # It removed the file itself, or was found dead before: the file is created before the first lease.
        return True
    except OSError as error:
        if error.errno in NOT_A_FILE or error.errno in DENIED or error.errno in DAMAGED:
            # It is not a file of qworker, or damaged: nothing is known, and the lease ends by time.
            return False
        raise
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Unlocked explicitly: a child forked at this moment would keep the lock that closing here leaves.
        fcntl.flock(fd, fcntl.LOCK_UN)
        boot = os.read(fd, _LONGEST).partition(b"\n")[0].decode(errors="replace")
        # On a disk that other machines use, another machine's lock may be unknown here.
        return local or boot == boot_id()
    finally:
        os.close(fd)


class AbandonedFiles:
    """Finds the files of dead holders on other hosts of a shared file system, whose locks may not be visible here.

    A living holder changes its file each hour. A file that has not changed for a day by the clock of this process is
    that of a dead one. Files of older releases are never changed, and are left alone.

    Args:
        workers: The open directory.
        clock: Measures the time.
    """

    def __init__(self, workers: int, clock: Clock) -> None:
        self._workers = workers
        self._clock = clock
        # By the name: the change time of a file (ns), and monotonic seconds since when it is known.
        self._seen: dict[str, tuple[int, float]] = {}

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all other files."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}

    def has(self, name: str) -> bool:
        """Return whether the file is that of a dead holder, as far as this process has seen.

        Raises:
            OSError: The store failed.
        """
        try:
            changed = os.stat(name, dir_fd=self._workers, follow_symlinks=False).st_ctime_ns
        except FileNotFoundError:
            return False
        now = self._clock.monotonic()
        known = self._seen.get(name)
        if known is None or known[0] != changed:
            self._seen[name] = (changed, now)
            return False
        return now - known[1] >= _ABANDONED and REFRESHED in _read_unlocked(self._workers, name)


def _read_unlocked(workers: int, name: str) -> list[str]:
    """Return the lines of a holder's file; none if it is locked or cannot be read."""
    try:
        fd, _ = open_file(name, workers)
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno in NOT_A_FILE | DENIED | DAMAGED:
            return []
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        return os.read(fd, _LONGEST).decode(errors="replace").split("\n")
    except BlockingIOError:
        return []
    finally:
        os.close(fd)


def _abandon_in_child() -> None:
    for file in tuple(_open_files):
        file.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
