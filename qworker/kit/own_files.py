"""Files that only qworker writes, in directories in which others may create any name."""

from __future__ import annotations

import os
import secrets

from qworker.kit.files import hide_directory, try_unlink, write_all
from qworker.kit.opening import create_file

__all__ = ["write_own"]


def write_own(name: str, parent: int, data: bytes, mode: int = 0o600) -> int:
    """Write a file and return its descriptor, for a sync.

    Whatever has the name is replaced, and never opened: an older file, a link, a pipe, a directory of another program.

    Raises:
        OSError: It is not written, and nothing of it is left.
    """
    try:
        return _write(name, parent, data, mode)
    except FileExistsError:
        pass
    # Readers see the old file or the new one.
    temporary = f".{secrets.token_hex(8)}.tmp"
    fd = _write(temporary, parent, data, mode)
    try:
        _rename(temporary, name, parent)
    except BaseException:
        os.close(fd)
        try_unlink(temporary, parent)
        raise
    return fd


def _write(name: str, parent: int, data: bytes, mode: int) -> int:
    fd = create_file(name, parent, mode)
    try:
        write_all(fd, data)
    except BaseException:
        os.close(fd)
        os.unlink(name, dir_fd=parent)
        raise
    return fd


def _rename(temporary: str, name: str, parent: int) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except IsADirectoryError:
        # It is moved away and kept: it may be large, or another user's.
        hide_directory(name, parent)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
