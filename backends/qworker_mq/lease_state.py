"""What mq has no place for, in `.qworker/lease/<queue>:<id>`: tries, and the lease with its token and expiry.

A record is written in place by one call, always at the same length, and only under the message's lock (see `lease`), so that no
reader sees half of one. A store that is full takes no new record: then it is kept in this process, which can still work the queue
empty; to other processes such a lease looks like a foreign server's.
"""

from __future__ import annotations

import errno
import os

import msgspec

from qworker.failure_text import summary

__all__ = ["Record", "Records"]

_LENGTH = 2048
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Record(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One message's tries and lease."""

    tries: int = 0
    # Rises with each delivery.
    token: int = 0
    # Seconds that the lease lasts; 0: there is no lease.
    visibility: float = 0.0
    # Unix seconds.
    expires_at: float = 0.0
    # The life sign to look for (see `holder`); empty: the lease ends by time alone.
    holder: str = ""
    # The file's change time (ns) after the rename that leased it. A later one: somebody moved it since, so the lease is over.
    moved: int = 0
    error: str = ""
    # The message's id in the store that it came from.
    origin: str = ""

    def ended(self, *, tries: int | None = None, error: str | None = None) -> Record:
        """This record with no lease."""
        return Record(
            tries=self.tries if tries is None else tries,
            token=self.token,
            # The record's length is bounded, and with it the text: the full reason of a failure has a file of its own.
            error=self.error if error is None else summary(error)[:200],
            origin=self.origin,
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode
_NOTHING = Record()


class Records:
    """The records of a root.

    Args:
        directory: descriptor of `.qworker/lease`.
    """

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._unwritten: dict[str, Record] = {}

    def read(self, name: str) -> Record:
        """The record of `<queue>:<id>`; the empty one where there is none, or where it is damaged."""
        if self._unwritten and name in self._unwritten:
            return self._unwritten[name]
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory)
        except FileNotFoundError:
            return _NOTHING
        try:
            return _decode(os.read(fd, _LENGTH))
        except ValueError:
            return _NOTHING
        finally:
            os.close(fd)

    def write(self, name: str, record: Record) -> None:
        """Store a record, in this process if the store is full."""
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
            try:
                os.pwrite(fd, _encode(record).ljust(_LENGTH), 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._unwritten[name] = record
        else:
            if self._unwritten:
                self._unwritten.pop(name, None)

    def forget(self, name: str) -> None:
        """Remove a record."""
        if self._unwritten:
            self._unwritten.pop(name, None)
        try:
            os.unlink(name, dir_fd=self._directory)
        except FileNotFoundError:
            pass
