"""Opening files without following anybody's link, and durable small files."""

from __future__ import annotations

import errno
import os
import secrets
import stat

__all__ = [
    "make_directory",
    "open_directory",
    "open_regular",
    "write_all",
    "write_new",
]

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_directory(path: str | bytes, parent: int | None = None) -> int:
    """A descriptor of a directory that is no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return os.open(path, flags if parent is None else flags | os.O_NOFOLLOW, dir_fd=parent)


def make_directory(name: str, parent: int) -> int:
    """A descriptor of a directory, made when it is absent; the caller syncs its entry before anything relies on it."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    return open_directory(name, parent)


def open_regular(name: str, parent: int, flags: int = os.O_RDWR) -> int:
    """A descriptor of a regular file.

    Raises:
        OSError: it cannot be opened, is a link, or is not a regular file.
    """
    fd = os.open(name, flags | _SAFE, 0o600, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return fd


def write_all(fd: int, data: bytes, offset: int) -> None:
    """`pwrite` until everything is written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_new(name: str, parent: int, data: bytes, *, durable: bool = True) -> None:
    """Write a whole file, durably, under its name, whatever had that name before."""
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
        # The same name is free again; nobody but this call knows it.
        _unlink_quietly(temporary, parent)
        raise
    if durable:
        os.fsync(parent)


def _unlink_quietly(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
