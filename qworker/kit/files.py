"""Operations on files and directories that stores share. They follow no links, and other programs inherit nothing."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import resource
import secrets
import stat
import time
from collections.abc import AsyncIterator

from qworker.kit.linux import exchange_names, has_writer
from qworker.kit.opening import create_file, open_directory, open_entry, open_file, open_regular
from qworker.kit.store_errors import NOT_A_FILE, NOT_EMPTY, NOT_SUPPORTED, Unsupported

__all__ = [
    "LONG_TEXT",
    "change_mode",
    "check_exchange",
    "check_writable",
    "close_all",
    "files_at_once",
    "find_identity",
    "find_inode",
    "has_at_most",
    "has_entry",
    "hide_directory",
    "is_finished",
    "link_file",
    "list_names",
    "lock_file",
    "make_directory",
    "make_empty",
    "make_fifo",
    "name_slices",
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

# The most bytes that are read of a small file: one line or one text, and a list or an error of any realistic length.
_SMALL = 1 << 20
LONG_TEXT = 1 << 28
# Files in one batch.
_BATCH = 1000
# Directory entries read between two turns of the loop; about 1 ms of work.
_SLICE = 1000
# Attempts to remove a tree into which another process writes in the meantime.
_REMOVALS = 10
# Seconds without a change after which a file is finished, if the kernel cannot say whether it has a writer.
_QUIET = 1.0


def check_writable(directory: int) -> None:
    """Check early that a directory can be written to.

    Raises:
        OSError: It cannot: EROFS, EACCES.
    """
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True):
        read_only = os.fstatvfs(directory).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number))


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as possible, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Refused (some systems cap an unlimited value): the current limit stays.
            return soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def files_at_once() -> int:
    """Return how many files one batch may have open.

    Most of the files that this process may open are kept for other uses.
    """
    return max(1, min(_BATCH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


# -- reading and writing ---------------------------------------------------------------------------------------------


def write_all(fd: int, body: bytes, offset: int | None = None) -> None:
    """Write all of `body`. A short write is continued, because a disk that fills up makes one before ENOSPC.

    Args:
        fd: An open file.
        body: The bytes to write.
        offset: Where to write them. None: at the file's own position.
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


def read_file(name: str, directory: int, most: int = _SMALL) -> bytes | None:
    """Return the content of a small file, or None if it does not exist.

    Args:
        name: Its name.
        directory: Its open directory.
        most: Bytes. Of a larger file, only the first ones are read.

    Raises:
        OSError: It cannot be read; with a number in `NOT_A_FILE`: it is not a regular file.
    """
    try:
        fd, found = open_file(name, directory)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, most) if found.st_size >= most else read_all(fd, found.st_size)
    finally:
        os.close(fd)


def make_directory(name: str, parent: int) -> int:
    """Open a directory, and create it if it is absent. The caller syncs its entry before anything relies on it."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    return open_directory(name, parent)


def make_empty(name: str, parent: int, mode: int = 0o600) -> None:
    """Create an empty file, whose name alone says something. Whatever has the name already says the same."""
    try:
        os.close(create_file(name, parent, mode))
    except FileExistsError:
        pass


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
    """Write a complete file, durably, under its name. It replaces an older file of that name."""
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
    """Give a file a second name. The name is never overwritten, and a link is not followed.

    Raises:
        Unsupported: The file system has no hard links.
        OSError: It cannot be done; `FileExistsError`: the name is taken.
    """
    try:
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            found = os.stat(source, dir_fd=source_dir, follow_symlinks=False)
            # A directory has only one name, and another user's file is protected, on every file system.
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                raise Unsupported("hard links") from error
        raise


def check_exchange(directory: int) -> None:
    """Check that two files can exchange their names in one step.

    Raises:
        Unsupported: The file system does not support it.
        OSError: It cannot be found out.
    """
    names = [f"_exchange-{secrets.token_hex(8)}" for _ in range(2)]
    try:
        for name in names:
            make_empty(name, directory)
        exchange_names(names[0], names[1], directory, directory)
    except OSError as error:
        if error.errno == errno.EINVAL or error.errno in NOT_SUPPORTED:
            raise Unsupported("exchanges of two files") from error
        raise
    finally:
        for name in names:
            try_unlink(name, directory)


def change_mode(directory: int, mode: int) -> None:
    """Set the mode of a directory that this process created, whatever the umask is.

    Raises:
        Unsupported: The file system does not keep such modes.
        OSError: It cannot be done.
    """
    try:
        os.fchmod(directory, mode)
    except PermissionError as error:
        if os.fstat(directory).st_uid == os.geteuid():
            raise Unsupported(f"modes like {mode:04o}") from error
        raise


def make_fifo(name: str, mode: int, directory: int) -> None:
    """Create a named pipe.

    Raises:
        Unsupported: The file system has no named pipes.
        OSError: It cannot be created; `FileExistsError`: the name is taken.
    """
    try:
        os.mkfifo(name, mode, dir_fd=directory)
    except OSError as error:
        # File systems in user space answer EIO.
        if error.errno in NOT_SUPPORTED or error.errno == errno.EIO:
            raise Unsupported("named pipes") from error
        raise


def hide_directory(name: str, parent: int) -> str | None:
    """Hide a directory permanently by one rename, so that no process sees half of it while it is removed.

    Returns:
        Its new name, which no queue can have. None if another process has already hidden or removed it.
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
        fd = open_directory(name, parent)
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
    """Close descriptors to which nothing was written, so that no error can be lost, and empty the list.

    Adjacent numbers are closed by one call, which halves the cost.
    """
    fds.sort()
    first = 0
    for last, fd in enumerate(fds):
        if last + 1 == len(fds) or fds[last + 1] != fd + 1:
            os.closerange(fds[first], fd + 1)
            first = last + 1
    fds.clear()


async def list_names(directory: int) -> list[str]:
    """Return every name in a directory, unsorted. It is read in slices so that other tasks of the loop can run.

    If other processes rename files in a directory, a listing can miss some: never conclude anything from an absence.
    """
    names: list[str] = []
    async for some in name_slices(directory):
        names += some
    return names


async def name_slices(directory: int) -> AsyncIterator[list[str]]:
    """Yield the names of `list_names`, in lists of bounded size."""
    names: list[str] = []
    # It needs its own descriptor: a listing in slices would share its position with every other listing of the same
    # descriptor.
    fd = open_directory(".", directory)
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


def has_at_most(directory: int, count: int) -> bool:
    """Return whether a directory has at most this many entries. It reads no more than that."""
    fd = open_directory(".", directory)
    try:
        with os.scandir(fd) as entries:
            return len(list(itertools.islice(entries, count + 1))) <= count
    finally:
        os.close(fd)


def is_finished(name: str, directory: int) -> bool | None:
    """Return whether no process writes the file any more. Return None if it is gone or not a regular file.

    If the kernel cannot report writers, a file that has not changed for a second is finished.
    """
    try:
        fd = open_entry(name, os.O_RDONLY, directory)
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
            # For whatever reason, the kernel does not report writers: the file's age decides.
            written = None
        return time.time() - found.st_mtime > _QUIET if written is None else not written
    finally:
        os.close(fd)
