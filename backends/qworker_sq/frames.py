"""Append-only side files of framed records (`length u32, crc32 u32, payload`).

Many processes follow them, and append under a lock. The payloads are JSON arrays, because positions have more than 64
bits. A process that died during an append, or a power failure, leaves a torn tail. The next process that appends
removes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import structlog

from qworker.kit.files import try_unlink, write_all, write_new
from qworker.kit.opening import open_own
from qworker.kit.segments.format import frame, scan
from qworker.kit.store_errors import FULL

__all__ = ["FrameFile"]

_log = structlog.get_logger("qworker.sq")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Any]).decode
_CHUNK = 1 << 22
# Bytes that are freed on a full disk, so that stored messages can still be leased and acked.
_RESERVE = 32768
# Whatever lets a file grow no more: a rewritten one is shorter.
_NO_ROOM = FULL | {errno.EFBIG}


class FrameFile:
    """One side file, and the position up to which this process has read it.

    Args:
        folder: The open directory of the file.
        name: Its file name.
        apply: Called with each row, in order, exactly once.
        restart: Called before the rows of a file that another process has rewritten.
        snapshot: Returns a row with everything that was applied. None: a full disk does not rewrite the file.

    Attributes:
        size: The bytes of the rows that are applied.
        base: The size after the last rewrite.
        sync_failed: Whether a sync of this file failed. It must not be synced again, only rewritten.
    """

    def __init__(
        self,
        folder: int,
        name: str,
        *,
        apply: Callable[[Sequence[Any]], None],
        restart: Callable[[], None],
        snapshot: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._folder = folder
        self._name = name
        self._apply = apply
        self._restart = restart
        self._identity: tuple[int, int] | None = None
        self.fd = -1
        self.size = 0
        self.base = 0
        self.sync_failed = False

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._identity = None

    def follow(self) -> None:
        """Apply the rows that other processes have appended. A torn tail is not changed."""
        try:
            now = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if self._identity != (now.st_dev, now.st_ino):
            self._reopen(now)
        elif now.st_size == self.size:
            return
        while self._apply_chunk():
            pass

    def _reopen(self, now: os.stat_result) -> None:
        self.close()
        self.fd = open_own(self._name, self._folder, os.O_RDWR)
        self._identity = (now.st_dev, now.st_ino)
        self.size = self.base = 0
        self.sync_failed = False
        self._restart()

    def _apply_chunk(self) -> bool:
        data = os.pread(self.fd, _CHUNK, self.size)
        result = scan(data, len(data))
        if not result.records and len(data) == _CHUNK:
            data = os.pread(self.fd, os.fstat(self.fd).st_size - self.size, self.size)
            result = scan(data, len(data))
        for _, payload in result.records:
            self._apply_read(payload)
        self.size += result.stop
        return bool(result.records)

    def _apply_read(self, payload: bytes) -> None:
        try:
            self._apply(_decode(payload))
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            # It is an intact record of another program, or of a newer release.
            _log.warning("sq_row_invalid", file=self._name, error=str(error))

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows and apply them; under the lock, after `follow`.

        Raises:
            OSError: Nothing was appended, and nothing applied.
        """
        rows = list(rows)
        if self.fd < 0:
            self._create()
        try:
            self._write(rows)
        except OSError as error:
            if self._snapshot is None or error.errno not in _NO_ROOM:
                raise
            self._use_reserve(self._snapshot())
            self._write(rows)
        for row in rows:
            self._apply(row)

    def _write(self, rows: list[Sequence[Any]]) -> None:
        data = b"".join(frame(payload) + payload for payload in map(_encode, rows))
        if os.fstat(self.fd).st_size != self.size:
            os.ftruncate(self.fd, self.size)
        try:
            write_all(self.fd, data, self.size)
        except OSError:
            os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)

    def _use_reserve(self, snapshot: Sequence[Any]) -> None:
        """Make room on a full disk: the reserve first, then what a rewritten file does not need."""
        try_unlink("reserve", self._folder)
        self.rewrite([snapshot])
        self._reserve_space()

    def _reserve_space(self) -> None:
        """Write the reserve for `_use_reserve`. If the disk is full already, work without it."""
        try:
            fd = open_own("reserve", self._folder, os.O_RDWR | os.O_CREAT)
            try:
                write_all(fd, b"\xff" * _RESERVE, 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise

    def _create(self) -> None:
        self.fd = open_own(self._name, self._folder, os.O_RDWR | os.O_CREAT)
        found = os.fstat(self.fd)
        self._identity = (found.st_dev, found.st_ino)
        self.size = self.base = 0
        if self._snapshot is not None:
            self._reserve_space()
            self._write([self._snapshot()])

    def rewrite(self, rows: Iterable[Sequence[Any]]) -> None:
        """Replace the file with a durable new one that has these rows, which are not applied; under the lock."""
        data = b"".join(frame(payload) + payload for payload in map(_encode, rows))
        write_new(self._name, self._folder, data)
        self.close()
        self.fd = open_own(self._name, self._folder, os.O_RDWR)
        found = os.fstat(self.fd)
        self._identity = (found.st_dev, found.st_ino)
        self.size = self.base = len(data)
        self.sync_failed = False
