"""The directories of an mq root, by descriptor, and the names in them.

    <root>/new/<queue>:<id>  queues/<queue>/<id>  delay/<queue>:<id>  remove/<queue>:<id>     mq's own
    <root>/.qworker/  format  tmp/<nonce>  lease/<queue>:<id>  due/<queue>/<due ms>.<id>
                      fail/<queue>/<id>  reason/<queue>:<id>  down/<queue>  workers/<holder>  data that mq cannot store

Every directory is opened once, as a directory and never through a link. Every name is then resolved below its
descriptor.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from qworker.errors import FormatTooNew, InvalidName
from qworker.kit.files import make_directory, read_file, write_new
from qworker.kit.opening import open_directory
from qworker.names import check_queue

__all__ = [
    "QueueDirs",
    "Root",
    "is_usable_id",
    "split_name",
    "try_rename",
    "try_unlink",
]

_FORMAT = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def split_name(name: str) -> tuple[str, str] | None:
    """Split a name in new/, delay/ or remove/ into queue and id. None: it is not the name of a message."""
    queue, colon, message_id = name.partition(":")
    if not colon or not is_usable_id(message_id):
        return None
    try:
        return check_queue(queue), message_id
    except InvalidName:
        return None


def is_usable_id(name: str) -> bool:
    """Return whether a file of this name is a message. The id of a foreign program need not be a UUID."""
    return _ID.fullmatch(name) is not None


def try_rename(name: str, source: int, target: str, destination: int) -> bool:
    """Rename a file, and return whether it was there. If not, another process has moved it."""
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except FileNotFoundError:
        return False
    return True


def try_unlink(name: str, directory: int) -> bool:
    """Unlink a file, and return whether it was there."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        # It is a directory of another program, which qworker must not empty.
        return False
    return True


class QueueDirs:
    """The descriptors of one queue's directories."""

    __slots__ = ("due", "fail", "ready")

    def __init__(self, ready: int, due: int, fail: int) -> None:
        self.ready = ready
        self.due = due
        self.fail = fail

    @property
    def is_deleted(self) -> bool:
        """Whether the queue was deleted while it was open. It may exist again."""
        # A deletion begins with this directory.
        return os.fstat(self.ready).st_nlink == 0

    @property
    def is_partly_deleted(self) -> bool:
        """Whether a deletion has removed one of the directories. The first one may exist again before that."""
        return any(os.fstat(fd).st_nlink == 0 for fd in (self.ready, self.due, self.fail))

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self.ready, self.due, self.fail):
            os.close(fd)


class Root:
    """The descriptors of an opened root."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        root = open_directory(path)
        self._descriptors.append(root)
        self.root = root
        own = self._open_directory(".qworker", root)
        self._check_format(own)
        self.new = self._open_directory("new", root)
        self.queues = self._open_directory("queues", root)
        self.delay = self._open_directory("delay", root)
        self.remove = self._open_directory("remove", root)
        self.tmp = self._open_directory("tmp", own)
        self.lease = self._open_directory("lease", own)
        self.due = self._open_directory("due", own)
        self.fail = self._open_directory("fail", own)
        self.reason = self._open_directory("reason", own)
        self.paused = self._open_directory("down", own)
        self.workers = self._open_directory("workers", own)

    def _open_directory(self, name: str, parent: int) -> int:
        fd = make_directory(name, parent)
        self._descriptors.append(fd)
        return fd

    def _check_format(self, own: int) -> None:
        text = read_file("format", own)
        if text is None:
            # Two first openers may write here. They write the same byte.
            write_new("format", own, b"%d\n" % _FORMAT, durable=False)
            return
        text = text[:32].strip()
        # An empty file means that an older release is creating it.
        if text and (not text.isdigit() or int(text) > _FORMAT):
            raise FormatTooNew(
                f"{self.path} has format {text.decode(errors='replace')!r}, "
                f"but this release reads only up to {_FORMAT}: upgrade qworker"
            )

    def queue(self, queue: str, *, create: bool) -> QueueDirs | None:
        """Open the directories of a queue. None: it does not exist, and `create` is not set."""
        try:
            ready = make_directory(queue, self.queues) if create else open_directory(queue, self.queues)
        except FileNotFoundError:
            return None
        opened = [ready]
        try:
            opened.append(make_directory(queue, self.due))
            opened.append(make_directory(queue, self.fail))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        return QueueDirs(*opened)

    def close(self) -> None:
        """Close every descriptor."""
        while self._descriptors:
            os.close(self._descriptors.pop())
