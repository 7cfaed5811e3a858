"""Why a message failed: a hidden file next to it in fail/. Each protocol chooses the file's name."""

from __future__ import annotations

import os

from qworker.kit.files import read_file, write_all
from qworker.names import printable

__all__ = ["read_reason", "write_reason"]

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def write_reason(fail: int, name: str, reason: str, *, mode: int) -> int:
    """Store a reason.

    Args:
        fail: The open directory.
        name: The name of the hidden file.
        reason: Any text.
        mode: The mode of the file.

    Returns:
        The open descriptor, for a sync.

    Raises:
        OSError: The reason is not stored, and nothing of it is left.
    """
    fd = os.open(name, _WRITE, mode, dir_fd=fail)
    try:
        write_all(fd, reason.encode(errors="surrogatepass"))
    except BaseException:
        os.close(fd)
        os.unlink(name, dir_fd=fail)
        raise
    return fd


def read_reason(fail: int, name: str) -> str | None:
    """Return a reason that any program stored, or None."""
    raw = read_file(name, fail)
    if raw is None:
        return None
    try:
        return raw.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return printable(raw.decode(errors="replace"))
