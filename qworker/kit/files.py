"""Operations on files and directories that stores share. No link is followed, and nothing is inherited by other programs."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import secrets
import stat
import time
from collections.abc import AsyncIterator

from qworker.kit.linux import has_writer
from qworker.kit.store_errors import NOT_A_FILE, NOT_EMPTY, NOT_SUPPORTED, Unsupported

__all__ = [
    "CREATE",
    "DIRECTORY",
    "READ",
    "change_mode",
    "check_writable",
    "close_all",
    "files_at_once",
    "find_identity",
    "find_inode",
    "has_entry",
    "hide_directory",
    "is_finished",
    "link_file",
    "list_names",
    "lock_file",
    "make_directory",
    "make_fifo",
    "name_slices",
    "open_directory",
    "open_regular",
    "raise_file_limit",
    "read_all",
    "read_file",
    "remove_empty",
    "remove_entry",
    "remove_tree",
    "remove_whole_tree",
    "try_unlink",
    "write_all",
    "write_new",
]

# No link is followed, no FIFO blocks, nothing is inherited by a program that a handler starts.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Files of one batch.
_BATCH = 1000
# How many directory entries are read before others on the loop get their turn; about 1 ms.
_SLICE = 1000
# How often a tree is removed again in which another process has written meanwhile.
_REMOVALS = 10
# Seconds without a change after which a file is finished, where the kernel does not tell.
_QUIET = 1.0


def check_writable(directory: int) -> None:
    """Find out early that nothing can be written to a directory.

    Raises:
        OSError: nothing can: EROFS, EACCES.
    """
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True):
        read_only = os.fstatvfs(directory).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number))


def raise_file_limit() -> int:
    """Let this process have as many open files as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Refused (some systems cap an unlimited one): what there is must do.
            return soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def files_at_once() -> int:
    """How many files one batch may have open: most of what this process may open is for everything else."""
    return max(1, min(_BATCH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


# -- reading and writing ---------------------------------------------------------------------------------------------


def write_all(fd: int, body: bytes, offset: int | None = None) -> None:
    """Write the whole of `body`; a short write is continued (a disk that fills up gives one before ENOSPC).

    Args:
        fd: An open file.
        body: What to write.
        offset: Where to write it. None: at the file's own position.
    """
    written = os.write(fd, body) if offset is None else os.pwrite(fd, body, offset)
    if written < len(body):
        rest = memoryview(body)[written:]
        while rest:
            if offset is not None:
                offset += written
            written = os.write(fd, rest) if offset is None else os.pwrite(fd, rest, offset)
            rest = rest[written:]


def read_all(fd: int, size: int) -> bytes:
    """Read to the end of a file that had `size` bytes."""
    body = os.read(fd, size + 1)
    if len(body) == size:
        return body
    parts = [body]
    while body:
        body = os.read(fd, 1 << 20)
        parts.append(body)
    return b"".join(parts)


def read_file(name: str, directory: int) -> bytes | None:
    """The content of a small file; None where there is none."""
    try:
        fd = os.open(name, READ, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        return read_all(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def open_directory(path: str | bytes, parent: int | None = None) -> int:
    """Open a directory that is not a link."""
    return os.open(path, DIRECTORY if parent is None else DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def make_directory(name: str, parent: int) -> int:
    """Open a directory, and create it if it is absent. The caller syncs its entry before anything relies on it."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    return open_directory(name, parent)


def open_regular(name: str, parent: int, flags: int = os.O_RDWR) -> int:
    """Open a regular file.

    Raises:
        OSError: It cannot be opened, is a link, or is not a regular file.
    """
    fd = os.open(name, flags | _SAFE, 0o600, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return fd


async def lock_file(fd: int) -> None:
    """Take a lock without blocking the loop; cancellable."""
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.01)


def write_new(name: str, parent: int, data: bytes, *, durable: bool = True) -> None:
    """Write a whole file, durably, under its name, over what had that name before."""
    temporary = f".{secrets.token_hex(8)}.tmp"
    fd = open_regular(temporary, parent, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        try:
            write_all(fd, data, 0)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        # The temporary name is free again; only this call knows it.
        try_unlink(temporary, parent)
        raise
    if durable:
        os.fsync(parent)


def link_file(source: str, target: str, source_dir: int, target_dir: int) -> None:
    """Give a file a second name, never over another one's; a link is not followed.

    Raises:
        Unsupported: the file system has no hard links.
        OSError: it cannot be done; `FileExistsError`: the name is taken.
    """
    try:
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            found = os.stat(source, dir_fd=source_dir, follow_symlinks=False)
            # A directory has one name only, and another user's file is protected, on every file system.
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                raise Unsupported("hard links") from error
        raise


def change_mode(directory: int, mode: int) -> None:
    """Give a new directory of ours a mode, whatever the umask says.

    Raises:
        Unsupported: the file system keeps no such modes.
        OSError: it cannot be done.
    """
    try:
        os.fchmod(directory, mode)
    except PermissionError as error:
        if os.fstat(directory).st_uid == os.geteuid():
            raise Unsupported(f"modes like {mode:04o}") from error
        raise


def make_fifo(name: str, mode: int, directory: int) -> None:
    """Make a named pipe.

    Raises:
        Unsupported: the file system has none.
        OSError: it cannot be made; `FileExistsError`: the name is taken.
    """
    try:
        os.mkfifo(name, mode, dir_fd=directory)
    except OSError as error:
        # EIO is the answer of file systems that are programs.
        if error.errno in NOT_SUPPORTED or error.errno == errno.EIO:
            raise Unsupported("named pipes") from error
        raise


def hide_directory(name: str, parent: int) -> str | None:
    """Take a directory out of sight for good, by one rename, so that nobody sees half of it while it is removed.

    Returns:
        Its name from now on, which no queue can have; None where it is gone: somebody else was faster.
    """
    hidden = f".{secrets.token_hex(8)}.gone"
    try:
        os.rename(name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
    except FileNotFoundError:
        return None
    os.fsync(parent)
    return hidden


# -- names in directories, each given by the descriptor of its directory: no path can be swapped under them -----------


def has_entry(name: str, directory: int) -> bool:
    """Return whether a directory has a name."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def find_inode(name: str, directory: int) -> int | None:
    """Return the inode of a name, or None if it is gone."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def find_identity(name: str, directory: int) -> tuple[int, int] | None:
    """Return the device and the inode of a name, or None if it is gone."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def try_unlink(name: str, directory: int) -> bool:
    """Remove a file and return whether it was there."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def remove_entry(name: str, directory: int) -> bool:
    """Remove a file, or a directory that another program put there, and return whether it was there.

    No link in a directory is followed.
    """
    try:
        return try_unlink(name, directory)
    except IsADirectoryError:
        remove_whole_tree(name, directory)
    return True


def remove_whole_tree(name: str, parent: int) -> None:
    """Do the same as `remove_tree`, but fail if something is left.

    Raises:
        OSError: Something cannot be removed, or another process wrote there again each time.
    """
    if not remove_tree(name, parent):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)


def remove_tree(name: str, parent: int) -> bool:
    """Remove a directory and everything in it. Other processes may remove it or write to it at the same time.

    Returns:
        False if another process wrote there again each time.

    Raises:
        OSError: Something cannot be removed.
    """
    return any(_remove_once(name, parent) for _ in range(_REMOVALS))


def _remove_once(name: str, parent: int) -> bool:
    try:
        fd = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        try_unlink(name, parent)
        return True
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove_once(entry.name, fd)
                else:
                    try_unlink(entry.name, fd)
    finally:
        os.close(fd)
    return remove_empty(name, parent)


def remove_empty(name: str, parent: int) -> bool:
    """Remove an empty directory. Return False if it is not empty.

    A listing can miss files while other processes rename there. `rmdir` cannot.
    """
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        # Another process removed it.
        return True
    except OSError as error:
        if error.errno not in NOT_EMPTY:
            raise
        return False
    return True


def close_all(fds: list[int]) -> None:
    """Close descriptors that nothing was written to, so that no error is left to be told, and empty the list.

    Neighbours take one call, which is half of the cost.
    """
    fds.sort()
    first = 0
    for last, fd in enumerate(fds):
        if last + 1 == len(fds) or fds[last + 1] != fd + 1:
            os.closerange(fds[first], fd + 1)
            first = last + 1
    fds.clear()


async def list_names(directory: int) -> list[str]:
    """Every name in a directory, unsorted, read in slices so that the loop stays free.

    A directory in which others rename may be shown without some of its files: never conclude from an absence.
    """
    names: list[str] = []
    async for some in name_slices(directory):
        names += some
    return names


async def name_slices(directory: int) -> AsyncIterator[list[str]]:
    """The names of `list_names`, in lists of bounded size."""
    names: list[str] = []
    # A descriptor of its own: a listing in slices would share its position with every other listing of the same one.
    fd = os.open(".", DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) == _SLICE:
                    yield names
                    names = []
                    await asyncio.sleep(0)
            yield names
    finally:
        os.close(fd)


def is_finished(name: str, directory: int) -> bool | None:
    """Whether nobody writes the file any more; None for what is gone, or no regular file.

    Where the kernel cannot tell of writers, a file that has been quiet for a second is finished.
    """
    try:
        fd = os.open(name, READ, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno in NOT_A_FILE:
            return None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        try:
            written = has_writer(fd)
        except OSError:
            # Whatever the reason, the kernel does not tell: the file's age decides.
            written = None
        return time.time() - found.st_mtime > _QUIET if written is None else not written
    finally:
        os.close(fd)
