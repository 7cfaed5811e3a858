"""Files that no process can rename or remove, as `chattr +i` makes them: as root, on a file system with flags."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

__all__ = ["make_immutable"]

# Of linux/fs.h, on 64-bit machines.
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_IMMUTABLE = 0x10


def make_immutable(path: Path, on: bool) -> None:
    """Set or clear the flag of a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("I4x", fcntl.ioctl(fd, _GET_FLAGS, b"\0" * 8))
        flags = flags | _IMMUTABLE if on else flags & ~_IMMUTABLE
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("I4x", flags))
    finally:
        os.close(fd)
