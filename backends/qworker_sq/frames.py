"""Append-only side files of framed records (`length u32, crc32 u32, payload`): followed by many, appended to under a lock.

The payloads are JSON arrays, for positions have more than 64 bits. A torn tail, left by a process that died in the middle of an append or by a power
cut, is cut off by the next one that appends.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import structlog

from qworker.kit.files import open_regular, write_all, write_new
from qworker.kit.segments.format import frame, scan

__all__ = ["FrameFile"]

_log = structlog.get_logger("qworker.sq")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Any]).decode
_CHUNK = 1 << 22
# Bytes given back to a full disk, so that what is stored can still be leased and acked.
_RESERVE = 32768


class FrameFile:
    """One side file, and how far this process has read it.

    Args:
        folder: the directory it is in.
        name: its file name.
        apply: called with each row, in order, exactly once.
        restart: called before the rows of a file that another process has rewritten.
        whole: the row that says everything that was applied, for rewrites; None: the file is never rewritten by itself.
    """

    def __init__(
        self,
        folder: int,
        name: str,
        *,
        apply: Callable[[Sequence[Any]], None],
        restart: Callable[[], None],
        whole: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._whole = whole
        self._folder = folder
        self._name = name
        self._apply = apply
        self._restart = restart
        self._identity: tuple[int, int] | None = None
        self.fd = -1
        # How far the rows are applied; bytes.
        self.size = 0
        # The size after the last rewrite.
        self.base = 0
        # True: a sync of this file failed. It must not be synced again, only rewritten.
        self.spoiled = False

    def close(self) -> None:
        """Let go of the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._identity = None

    def follow(self) -> None:
        """Apply what others have appended; an absent file has nothing. A torn tail is left alone."""
        try:
            now = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if self._identity != (now.st_dev, now.st_ino):
            self._reopen(now)
        elif now.st_size == self.size:
            return
        while self._take():
            pass

    def _reopen(self, now: os.stat_result) -> None:
        self.close()
        self.fd = open_regular(self._name, self._folder)
        self._identity = (now.st_dev, now.st_ino)
        self.size = self.base = 0
        self.spoiled = False
        self._restart()

    def _take(self) -> bool:
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
            # A whole, intact record that no qworker wrote: a stranger's, or a newer release's.
            _log.warning("sq_row_invalid", file=self._name, error=str(error))

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows and apply them; under the lock, after `follow`.

        Raises:
            OSError: nothing was appended, and nothing applied.
        """
        rows = list(rows)
        if self.fd < 0:
            self._create()
        try:
            self._write(rows)
        except OSError as error:
            if self._whole is None or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            self._shrink(self._whole())
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

    def _shrink(self, whole: Sequence[Any]) -> None:
        """Make room on a full disk: the reserve, and then what the rewritten file does not need."""
        try:
            os.unlink("reserve", dir_fd=self._folder)
        except FileNotFoundError:
            pass
        self.rewrite([whole])
        self._lay_by()

    def _lay_by(self) -> None:
        """Keep a reserve for `_shrink`; on a disk that is full already, do without."""
        try:
            fd = open_regular("reserve", self._folder, os.O_RDWR | os.O_CREAT)
            try:
                write_all(fd, b"\xff" * _RESERVE, 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise

    def _create(self) -> None:
        self.fd = open_regular(self._name, self._folder, os.O_RDWR | os.O_CREAT)
        found = os.fstat(self.fd)
        self._identity = (found.st_dev, found.st_ino)
        self.size = self.base = 0
        if self._whole is not None:
            self._lay_by()
            self._write([self._whole()])

    def rewrite(self, rows: Iterable[Sequence[Any]]) -> None:
        """Put a durable new file with these rows, which say what has been applied, in the place of the old; under the lock."""
        data = b"".join(frame(payload) + payload for payload in map(_encode, rows))
        write_new(self._name, self._folder, data)
        self.close()
        self.fd = open_regular(self._name, self._folder)
        found = os.fstat(self.fd)
        self._identity = (found.st_dev, found.st_ino)
        self.size = self.base = len(data)
        self.spoiled = False
