"""The files of cells: `cells/<group>/<name>` in a queue.

The first line of a file is JSON: the version and the rank. The value follows. The modification time of the file is the
moment at which the cell expires, so a sweep reads nothing. 0 means that it does not expire. A file that is not complete
is never seen under the name of a cell: it is written in tmp/.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from functools import lru_cache
from urllib.parse import quote, unquote

import msgspec

from qworker.cell import MOST_VALUE, Cell
from qworker.kit.files import find_inode, has_entry, link_file, read_all, try_unlink, write_all
from qworker.kit.opening import create_file, open_file
from qworker.kit.planted import rename_file
from qworker.kit.store_errors import NOT_A_FILE
from qworker_file.layout import QueueDir

__all__ = [
    "CELLS",
    "TEMPORARY",
    "CellFile",
    "StoredCell",
    "file_name",
    "has_expired",
    "name_of",
    "read_cell",
    "remove_if_expired",
]

CELLS = "cells"
# How the names of files in tmp/ begin that become cells.
TEMPORARY = ".cell-"

# Characters that are in names of files as they are. A full stop at the beginning is not: such files are not cells.
_SAFE = "._-+=,:@"
# Bytes of an encoded name. A longer name is in the header, and its digest is the name of the file.
_MOST_ENCODED = 200
_DIGEST = "~"
# Bytes of a header with the longest names.
_MOST_HEADER = 16_384
_NANO = 1_000_000_000


class _Header(msgspec.Struct, omit_defaults=True, gc=False):
    """The first line of a file. It has the name, or the name of the group, if a digest is in its place in the path."""

    version: str
    rank: int = 0
    name: str = ""
    group: str = ""


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(_Header)


class StoredCell(msgspec.Struct, gc=False):
    """A cell that was read from its file.

    Attributes:
        version: Its version.
        rank: Its rank.
        value: Its value.
        expires_ns: Unix nanoseconds at which it expires, or 0.
        name: Its name, if the file has a digest as its name.
        group: The name of its group, if the directory has a digest as its name.
    """

    version: str
    rank: int
    value: bytes
    expires_ns: int
    name: str
    group: str

    def is_live(self, now: float) -> bool:
        """Return whether it has not expired. `now` is in Unix seconds."""
        return _is_live(self.expires_ns, now)

    def to_cell(self, group: str, name: str, now: float) -> Cell:
        """Return it in the form of the contract."""
        ttl = None if self.expires_ns == 0 else self.expires_ns / _NANO - now
        return Cell(group, name, self.value, self.version, ttl, self.rank)


def _is_live(expires_ns: int, now: float) -> bool:
    """Return whether a moment of expiry has not come."""
    return expires_ns == 0 or expires_ns > now * _NANO


# -- names -----------------------------------------------------------------------------------------------------------


@lru_cache(4096)
def file_name(text: str) -> str:
    """Return the name of a file, or of a directory, for any text."""
    encoded = quote(text, safe=_SAFE)
    if encoded[:1] in {".", _DIGEST}:
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    if len(encoded) <= _MOST_ENCODED:
        return encoded
    return _DIGEST + hashlib.sha256(text.encode()).hexdigest()


def name_of(file: str) -> str | None:
    """Return the text of the name of a file. Empty: the name is a digest. None: cells do not have such names."""
    if file.startswith(_DIGEST):
        return ""
    if file.startswith("."):
        return None
    text = unquote(file, errors="replace")
    return text if file_name(text) == file else None


# -- reading and writing ---------------------------------------------------------------------------------------------


def read_cell(name: str, directory: int) -> StoredCell | None:
    """Read a cell, which may have expired. None: it is absent. Whatever else has the name does not count.

    Args:
        name: The name of its file.
        directory: The descriptor of its group.

    Raises:
        OSError: It cannot be read.
    """
    try:
        fd, found = open_file(name, directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in NOT_A_FILE:
            return None
        raise
    try:
        if found.st_size > _MOST_HEADER + MOST_VALUE:
            return None
        header, newline, value = read_all(fd, found.st_size).partition(b"\n")
    except IsADirectoryError:
        return None
    finally:
        os.close(fd)
    try:
        parsed = _decoder.decode(header)
    except msgspec.DecodeError:
        return None
    if not newline or not parsed.version:
        return None
    return StoredCell(parsed.version, parsed.rank, value, found.st_mtime_ns, parsed.name, parsed.group)


def has_expired(name: str, group: int, now: float) -> bool:
    """Return whether a file is a cell that has expired, without opening it."""
    if name_of(name) is None:
        return False
    try:
        found = os.stat(name, dir_fd=group, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and not _is_live(found.st_mtime_ns, now)


def remove_if_expired(name: str, group: int, now: float) -> bool:
    """Remove a cell if it has expired. The caller has the lock of its group, so the cell is not replaced meanwhile."""
    return has_expired(name, group, now) and try_unlink(name, group)


class CellFile:
    """A cell that is written in tmp/, with a new version.

    Args:
        files: The queue.
        cell: The cell.
        now: Unix seconds, by the store's clock.

    Attributes:
        fd: A descriptor of the file, until `close`.

    Raises:
        OSError: It is not written.
    """

    def __init__(self, files: QueueDir, cell: Cell, now: float) -> None:
        version = secrets.token_hex(8)
        self.cell = msgspec.structs.replace(cell, version=version)
        self._tmp = files.tmp
        self._name = file_name(cell.name)
        header = _Header(version, cell.rank)
        if self._name.startswith(_DIGEST):
            header.name = cell.name
        if file_name(cell.group).startswith(_DIGEST):
            header.group = cell.group
        self._temporary = f"{TEMPORARY}{version}"
        self._is_moved = False
        self.fd = create_file(self._temporary, files.tmp, files.item_mode)
        try:
            write_all(self.fd, _encoder.encode(header) + b"\n" + cell.value)
            expires_ns = 0 if cell.ttl is None else int((now + cell.ttl) * _NANO)
            os.utime(self.fd, ns=(expires_ns, expires_ns))
            self._inode = os.fstat(self.fd).st_ino
        except BaseException:
            self.close()
            raise

    def put_first(self, group: int) -> bool:
        """Make it visible, unless something has its name. It needs no lock.

        Args:
            group: The descriptor of the group.

        Returns:
            False if the name is taken.

        Raises:
            FileNotFoundError: The group, or the queue, was removed.
        """
        try:
            link_file(self._temporary, self._name, self._tmp, group)
        except OSError as error:
            # A lost reply: the link exists although an error was reported.
            if find_inode(self._name, group) != self._inode:
                if isinstance(error, FileExistsError):
                    return False
                raise
        return True

    def replace(self, group: int) -> None:
        """Make it visible in place of what has its name. The caller has the lock of the group.

        Raises:
            OSError: It is not visible.
        """
        try:
            rename_file(self._temporary, self._name, self._tmp, group)
        except OSError:
            # A lost reply, as above.
            if find_inode(self._name, group) != self._inode:
                raise
        self._is_moved = True

    def has_entry(self, group: int) -> bool:
        """Return whether anything has its name."""
        return has_entry(self._name, group)

    def close(self) -> None:
        """Close the file, and remove its name in tmp/ if it has one. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
            if not self._is_moved:
                try_unlink(self._temporary, self._tmp)
