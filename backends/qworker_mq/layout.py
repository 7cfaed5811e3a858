"""The directories of an mq root, by descriptor, and the names in them.

    <root>/new/<queue>:<id>  queues/<queue>/<id>  delay/<queue>:<id>  remove/<queue>:<id>     mq's own
    <root>/.qworker/  format  tmp/<nonce>  lease/<queue>:<id>  due/<queue>/<due ms>.<id>
                      fail/<queue>/<id>  reason/<queue>:<id>  down/<queue>  workers/<holder>  what mq has no place for

Every directory is opened once, as a directory and never through a link; every name is then resolved below its descriptor.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from qworker.errors import FormatTooNew, InvalidName
from qworker.names import check_queue

__all__ = ["QueueDirs", "Root", "open_directory", "split_name", "usable_id"]

_FORMAT = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split_name(name: str) -> tuple[str, str] | None:
    """The queue and id of a name in new/, delay/ or remove/; None when it is no message's."""
    queue, colon, message_id = name.partition(":")
    if not colon or not usable_id(message_id):
        return None
    try:
        return check_queue(queue), message_id
    except InvalidName:
        return None


def usable_id(name: str) -> bool:
    """Whether a file of this name in a queue is taken for a message: a foreign program's id need be no UUID."""
    return _ID.fullmatch(name) is not None


def open_directory(name: str, parent: int, *, create: bool) -> int:
    """A descriptor of the directory `name` below `parent`.

    Raises:
        FileNotFoundError: there is none, and `create` is not set.
        NotADirectoryError: it is a link or a file.
    """
    if create:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass
    return os.open(name, _DIRECTORY, dir_fd=parent)


class QueueDirs:
    """The descriptors of one queue's directories."""

    __slots__ = ("due", "fail", "ready")

    def __init__(self, ready: int, due: int, fail: int) -> None:
        self.ready = ready
        self.due = due
        self.fail = fail

    @property
    def gone(self) -> bool:
        """Whether the queue was deleted under us (and perhaps made again)."""
        # A deletion begins with this one.
        return os.fstat(self.ready).st_nlink == 0

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self.ready, self.due, self.fail):
            os.close(fd)


class Root:
    """The descriptors of an opened root."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[int] = []
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._opened.append(root)
        self.root = root
        own = self._directory(".qworker", root)
        self._check_format(own)
        self.new = self._directory("new", root)
        self.queues = self._directory("queues", root)
        self.delay = self._directory("delay", root)
        self.remove = self._directory("remove", root)
        self.tmp = self._directory("tmp", own)
        self.lease = self._directory("lease", own)
        self.due = self._directory("due", own)
        self.fail = self._directory("fail", own)
        self.reason = self._directory("reason", own)
        self.down = self._directory("down", own)
        self.workers = self._directory("workers", own)

    def _directory(self, name: str, parent: int) -> int:
        fd = open_directory(name, parent, create=True)
        self._opened.append(fd)
        return fd

    def _check_format(self, own: int) -> None:
        try:
            fd = os.open("format", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=own)
        except FileNotFoundError:
            # Two first openers write the same byte.
            fd = os.open("format", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=own)
            try:
                os.write(fd, f"{_FORMAT}\n".encode())
            finally:
                os.close(fd)
            return
        try:
            text = os.read(fd, 32).strip()
        finally:
            os.close(fd)
        # Empty: another process makes it at this moment.
        if text and (not text.isdigit() or int(text) > _FORMAT):
            raise FormatTooNew(
                f"{self.path} has format {text.decode(errors='replace')!r}, but this release reads only up to {_FORMAT}: upgrade qworker"
            )

    def queue(self, queue: str, *, create: bool) -> QueueDirs | None:
        """The directories of a queue; None when there is no such queue."""
        try:
            ready = open_directory(queue, self.queues, create=create)
        except FileNotFoundError:
            return None
        opened = [ready]
        try:
            opened.append(open_directory(queue, self.due, create=True))
            opened.append(open_directory(queue, self.fail, create=True))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        return QueueDirs(*opened)

    def close(self) -> None:
        """Close every descriptor."""
        while self._opened:
            os.close(self._opened.pop())
