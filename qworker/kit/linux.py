"""Linux only: calls of libc that Python does not have, leases on files, and what the kernel shows under /proc.

The module can be imported on every system. A call of libc that the system does not have fails with ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from typing import cast

__all__ = [
    "CLOSE_WRITE",
    "CREATE",
    "DELETE",
    "IGNORED",
    "MOUNTINFO",
    "MOVED_FROM",
    "MOVED_TO",
    "OVERFLOW",
    "add_inotify_watch",
    "boot_id",
    "die_sooner_without_memory",
    "exchange_names",
    "file_system_number",
    "finish_writing",
    "has_writer",
    "is_proc_error",
    "lock_holders",
    "max_inotify_instances",
    "open_again",
    "open_inotify",
    "open_path",
    "parse_inotify_events",
    "path_of",
    "read_ext4_options",
    "read_mountinfo",
    "remove_inotify_watch",
    "resident_mb",
    "set_parent_death_signal",
    "start_writing",
    "sync_file_system",
]

_libc = ctypes.CDLL(None, use_errno=True)


def _bind(name: str, *types: object) -> Callable[..., int]:
    function = getattr(_libc, name, None)
    if function is None:
        return _missing
    function.argtypes = types
    return cast("Callable[..., int]", function)


def _missing(*_arguments: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# -- syncing ---------------------------------------------------------------------------------------------------------

_syncfs = _bind("syncfs", ctypes.c_int)
_sync_file_range = _bind("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


def sync_file_system(fd: int) -> None:
    """Write everything that was written to a file system to the disk. It blocks for a long time.

    Args:
        fd: Any descriptor there, opened before the first of the writes that matter: the kernel reports errors since
            then.

    Raises:
        OSError: Something was not written. Another try does not write it either.
    """
    if _syncfs(fd) != 0:
        raise _last_error()


def start_writing(fd: int) -> None:
    """Start to write a file's content to the disk.

    Raises:
        OSError: Some of it was not written.
    """
    if _sync_file_range(fd, 0, 0, _WRITE) != 0:
        raise _last_error()


def finish_writing(fd: int) -> None:
    """Write a file's content to the disk and wait for it. `qworker.kit.group_commit` describes what this promises.

    Raises:
        OSError: Some of it was not written.
    """
    if _sync_file_range(fd, 0, 0, _WAIT_BEFORE | _WRITE | _WAIT_AFTER) != 0:
        raise _last_error()


# -- inotify ---------------------------------------------------------------------------------------------------------

CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
OVERFLOW, IGNORED, _ONLYDIR = 0x4000, 0x8000, 0x01000000
_EVENT = struct.Struct("iIII")

_inotify_init = _bind("inotify_init1", ctypes.c_int)
_inotify_add_watch = _bind("inotify_add_watch", ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
_inotify_rm_watch = _bind("inotify_rm_watch", ctypes.c_int, ctypes.c_int)


def open_inotify() -> int:
    """Open an inotify instance, without blocking reads.

    Raises:
        OSError: The user has no more of them, or the system has none.
    """
    fd = _inotify_init(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _last_error()
    return fd


def add_inotify_watch(fd: int, directory: int, mask: int) -> int:
    """Watch a directory, given by its descriptor. Return the number of the watch.

    Raises:
        OSError: The kernel refuses.
    """
    watch = _inotify_add_watch(fd, path_of(directory).encode(), mask | _ONLYDIR)
    if watch < 0:
        raise _last_error()
    return watch


def remove_inotify_watch(fd: int, watch: int) -> None:
    """End a watch. One that has ended by itself is ignored."""
    _inotify_rm_watch(fd, watch)


def parse_inotify_events(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield the events of one read: the number of the watch, the mask, and the name in the directory."""
    at, end = 0, len(data)
    while at < end:
        watch, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size + length
        yield watch, mask, data[at - length : at].rstrip(b"\0").decode(errors="surrogateescape")


# -- processes -------------------------------------------------------------------------------------------------------

_prctl = _bind("prctl", ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent dies. On other systems, do nothing.

    The parent may have died before the call: compare `os.getppid()` afterwards.

    Raises:
        OSError: The kernel refuses.
    """
    if _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0 and ctypes.get_errno() != errno.ENOSYS:
        raise _last_error()


def die_sooner_without_memory() -> None:
    """Make the kernel end this process as if it used more memory, by 30 % of all. On other systems, do nothing.

    So it ends before its parent if it uses a little less. A process that uses little does not end for one that uses
    nearly everything.
    """
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            own = int(file.read())
            file.seek(0)
            file.write(str(min(own + 300, 1000)))
    except OSError:
        # The kernel has no such file here: it ends the process that uses the most memory.
        pass


# -- files -----------------------------------------------------------------------------------------------------------

# Leases do not exist on this file system, or not on another user's file.
_NO_LEASES = frozenset({errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})


def has_writer(fd: int) -> bool | None:
    """Return whether a process has a file open for writing, or is about to. Return None if the kernel does not show it.

    Raises:
        OSError: For another reason than a file of another user, or a file system without leases.
    """
    try:
        # A process that opens the file in the meantime makes the kernel signal this one: not with SIGIO, which kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        # Refused while any process has the file open for writing.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        # A process that opened it in between waits until the lease is removed, and would write into what the caller is
        # about to read.
        comes = fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return comes
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in _NO_LEASES:
            return None
        raise


_renameat2 = _bind("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_EXCHANGE = 2


def exchange_names(name: str, other: str, directory: int, other_directory: int) -> None:
    """Let two files of a file system exchange their names, in one step.

    Raises:
        OSError: It cannot be done. `FileNotFoundError`: one of them does not exist. `EINVAL`: the file system does not
            support it.
    """
    if _renameat2(directory, os.fsencode(name), other_directory, os.fsencode(other), _EXCHANGE) != 0:
        raise _last_error()


_fstatfs = _bind("fstatfs", ctypes.c_int, ctypes.c_void_p)
# More than a `struct statfs` has on any machine. Its first field is the type.
_STATFS_BYTES = 256


def file_system_number(fd: int) -> int:
    """Return the number of the type of a file's file system, as in statfs(2); 0 if the kernel does not say it."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if _fstatfs(fd, status) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(status).value & 0xFFFFFFFF


def open_path(path: str) -> int:
    """Open a directory to query its file system. It works also for a directory that this user cannot read.

    Raises:
        OSError: It cannot be opened.
    """
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


# -- /proc -----------------------------------------------------------------------------------------------------------

MOUNTINFO = "/proc/self/mountinfo"


def open_again(fd: int, flags: int) -> int:
    """Open the file of a descriptor a second time, whatever name it has by now."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def is_proc_error(error: OSError) -> bool:
    """Return whether a file is missing that this module reads. Not all of /proc counts: a queue may lie there, too."""
    return isinstance(error.filename, str) and error.filename.startswith(("/proc/sys/", "/proc/self/"))


def path_of(fd: int) -> str:
    """Return a path that leads to an open file; reading this link gives the file's own path."""
    return f"/proc/self/fd/{fd}"


def boot_id() -> str:
    """Return the id of this start of the machine. It is the same in all its containers.

    Raises:
        OSError: /proc is not mounted.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def max_inotify_instances() -> int:
    """Return how many inotify instances one user may have.

    Raises:
        OSError: /proc is not mounted.
    """
    with open("/proc/sys/fs/inotify/max_user_instances", encoding="ascii") as file:
        return int(file.read())


def read_mountinfo() -> list[str]:
    """Return the lines that describe the mounts that this process sees.

    Raises:
        OSError: /proc is not mounted.
    """
    with open(MOUNTINFO, encoding="utf-8", errors="surrogateescape") as lines:
        return list(lines)


def resident_mb() -> float:
    """Return the resident memory of this process in MB.

    Raises:
        OSError: /proc is not mounted.
    """
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# These give files another device number than the file system that has their locks.
_OTHER_DEVICE = frozenset({"overlay", "btrfs"})


def lock_holders(directory: int, kind: str) -> dict[int, int]:
    """Return the pids of the processes that hold a lock, by inode. Trying a lock would disturb other processes.

    Locks of processes in other PID namespaces, and of other hosts, are not shown.

    Args:
        directory: A descriptor on the file system.
        kind: The name of the file system.
    """
    device = os.fstat(directory).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    found: dict[int, int] = {}
    try:
        with open("/proc/locks", encoding="ascii") as lines:
            for line in lines:
                fields = line.split()
                # For a process that waits for a lock, an arrow comes before the kind.
                if len(fields) < 6 or fields[1] not in {"FLOCK", "POSIX"}:
                    continue
                place, _, inode = fields[5].rpartition(":")
                if place == wanted or kind in _OTHER_DEVICE:
                    found[int(inode)] = int(fields[4])
    except FileNotFoundError:
        # No /proc here: only our own are known.
        pass
    return found


def read_ext4_options(device: str) -> frozenset[str] | None:
    """Return the options in force on an ext4 file system, by the name of its device. Return None if they are not shown.

    Raises:
        OSError: They cannot be read.
    """
    try:
        with open(f"/proc/fs/ext4/{device}/options", encoding="ascii") as file:
            return frozenset(file.read().split())
    except FileNotFoundError:
        return None
