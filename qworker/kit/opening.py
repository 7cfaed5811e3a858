"""The one place that opens files and directories of a store. Others may create names there, too, of any kind.

No link is followed. A pipe in the place of a file never blocks the process, and a program that a handler starts
inherits nothing. What was opened is then checked, because the name may have changed since any earlier look.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from qworker.kit.linux import open_again

__all__ = ["create_file", "open_directory", "open_entry", "open_file", "open_own", "open_regular", "try_lock"]

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_entry(name: str | os.PathLike[str], flags: int, parent: int | None = None, mode: int = 0o600) -> int:
    """Open whatever has this name. The caller checks what it is, from a status that it needs anyway."""
    return os.open(name, flags | _SAFE, mode, dir_fd=parent)


def create_file(name: str, parent: int | None, mode: int = 0o600) -> int:
    """Create a file to write to. It is new, so it is a regular file of this user with one link.

    Raises:
        FileExistsError: The name is taken, by whatever it may be.
        OSError: It cannot be created.
    """
    return os.open(name, _CREATE, mode, dir_fd=parent)


def open_file(name: str, parent: int, flags: int = os.O_RDONLY, mode: int = 0o600) -> tuple[int, os.stat_result]:
    """Open a regular file and return its descriptor and its status.

    Raises:
        OSError: It cannot be opened; with a number in `NOT_A_FILE`: it is a link, or is not a regular file.
    """
    fd = os.open(name, flags | _SAFE, mode, dir_fd=parent)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, f"{name} is not a regular file")
    return fd, found


def open_regular(name: str, parent: int, flags: int = os.O_RDWR) -> int:
    """Open a regular file in a directory that only this user can write to.

    Raises:
        OSError: It cannot be opened, is a link, or is not a regular file.
    """
    return open_file(name, parent, flags)[0]


def open_own(name: str, parent: int, flags: int, mode: int = 0o600) -> int:
    """Open a file to change it, in a directory in which others may have created it.

    `flags` has no O_TRUNC: a file is checked before it is changed.

    Raises:
        OSError: It cannot be opened, is not a regular file, has a second name, or is another user's: EPERM.
    """
    fd, found = open_file(name, parent, flags, mode)
    # Root may change the files of every user. A link that a user made to a file of root is a second name.
    if found.st_nlink != 1 or os.geteuid() not in {0, found.st_uid}:
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{name} has a second name or is another user's: remove it")
    return fd


def open_directory(path: str | bytes | os.PathLike[str], parent: int | None = None) -> int:
    """Open a directory. Below `parent` it is not a link. Without it, the path is the user's own choice."""
    return os.open(path, _DIRECTORY if parent is None else _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def try_lock(fd: int) -> bool:
    """Lock an open file for this process alone and return whether it was free.

    NFS 4 gives such a lock only to a descriptor that can write. There `fd` becomes one, of the same file.

    Raises:
        OSError: The file cannot be locked, or cannot be opened for writing.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        writable = open_again(fd, os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.flock(writable, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.dup2(writable, fd, inheritable=False)
        except BlockingIOError:
            return False
        finally:
            os.close(writable)
    return True
