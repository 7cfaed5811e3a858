"""The open directories of one queue, and whether a directory is a queue."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import ClassVar, Self

from qworker.kit.files import find_identity
from qworker.names import is_existing_queue_name

__all__ = ["QueueFiles", "has_part", "is_directory", "is_queue", "list_queue_names"]


class QueueFiles:
    """The open directories of one queue.

    Args:
        name: The queue's name.
        base: A descriptor of the queue's directory, which this object owns from now on.

    Attributes:
        parts: The attributes that hold the descriptors of its directories; -1 while one is not open.
        max_body: The largest body in bytes that is read. None: any size.
        users: The number of calls that use the descriptors now. They must stay open.
        used_at: Monotonic seconds at the end of the last such call.
    """

    __slots__ = ("base", "done", "fail", "max_body", "name", "queue", "tmp", "used_at", "users")

    parts: ClassVar[tuple[str, ...]] = ("tmp", "queue", "done", "fail", "base")

    def __init__(self, name: str, base: int) -> None:
        self.name = name
        self.tmp = self.queue = self.done = self.fail = -1
        self.base = base
        self.max_body: int | None = None
        self.users = 0
        self.used_at = time.monotonic()

    def __enter__(self) -> Self:
        """Keep the descriptors open until the end of the block."""
        self.users += 1
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let the descriptors be closed, unless other calls use them."""
        self.users -= 1
        self.used_at = time.monotonic()

    @property
    def exists(self) -> bool:
        """False once the queue was deleted."""
        return os.fstat(self.base).st_nlink > 0

    @property
    def path(self) -> str:
        """The queue's path under the root."""
        return self.name

    @property
    def directories(self) -> dict[str, int]:
        """The descriptors of its directories, by their names."""
        raise NotImplementedError

    def is_in_place(self, root: int) -> bool:
        """Return whether the queue and its directories still have their names under the root."""
        return find_identity(self.path, root) == _identity(self.base) and all(
            find_identity(name, self.base) == _identity(fd) for name, fd in self.directories.items()
        )

    @property
    def is_down(self) -> bool:
        """Whether the queue is paused."""
        raise NotImplementedError

    @property
    def message_directories(self) -> tuple[int, ...]:
        """The descriptors of the directories that contain messages."""
        return self.queue, self.fail, self.done

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for part in self.parts:
            fd: int = getattr(self, part)
            if fd >= 0:
                setattr(self, part, -1)
                os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def is_queue(root: int, path: str, ready: str = "queue") -> bool:
    """Return whether a path under the root is a queue. A link to one is not.

    Args:
        root: The descriptor of the root.
        path: Where the queue may be.
        ready: The name of its directory of ready messages.
    """
    return has_part(root, path, ready, stat.S_ISDIR)


def has_part(root: int, path: str, part: str, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path under the root is a directory, and no link, with a part of some kind.

    Args:
        root: The descriptor of the root.
        path: The path.
        part: The name of the part.
        is_kind: Returns whether a mode is that of the kind.
    """
    try:
        base = os.stat(path, dir_fd=root, follow_symlinks=False)
        found = os.stat(f"{path}/{part}", dir_fd=root, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(base.st_mode) and is_kind(found.st_mode)


def list_queue_names(
    root: int, has_queue: Callable[[str], bool], *, is_name: Callable[[str], bool] = is_existing_queue_name
) -> list[str]:
    """Return the names of the queues in a directory, sorted.

    A directory into which this user cannot look is one of them. Calls for this queue raise the reason, and the others
    can be used.

    Args:
        root: The descriptor of the directory.
        has_queue: Returns whether a name is that of a queue.
        is_name: Returns whether a queue can have a name.

    Raises:
        OSError: The directory itself cannot be read.
    """
    return sorted(name for name in os.listdir(root) if is_name(name) and _may_be_queue(root, name, has_queue))


def _may_be_queue(root: int, name: str, has_queue: Callable[[str], bool]) -> bool:
    try:
        return has_queue(name)
    except OSError:
        # If the cause is the root, the next call raises its error.
        return is_directory(root, name)


def is_directory(root: int, name: str) -> bool:
    """Return whether a name is that of a directory, and not of a link to one."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
