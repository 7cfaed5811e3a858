"""The directories of a queue. They are created completely or not at all, opened once, and used by descriptors."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakSet

from qworker.errors import FormatTooNew, QueueDamaged
from qworker.kit.directory.queue_files import QueueFiles, has_part, is_queue
from qworker.kit.files import change_mode, has_entry, make_fifo, read_file, remove_whole_tree, write_all
from qworker.kit.opening import create_file, open_directory, open_entry
from qworker.kit.store_errors import DENIED, NOT_A_FILE, NOT_EMPTY

__all__ = ["FORMAT", "FORMAT_FILE", "MESSAGE_PARTS", "QueueDir", "create_queue", "has_queue", "open_part", "open_queue"]

FORMAT = 1

_PARTS = ("tmp", "queue", "lease", "delay", "done", "fail", "names", "workers")
# The directories that contain messages.
MESSAGE_PARTS = ("queue", "delay", "lease", "fail", "done")
_TRIGGER = "trigger-s"
FORMAT_FILE = "format"


class QueueDir(QueueFiles):
    """The open directories of one queue."""

    __slots__ = ("delay", "found", "item_mode", "lease", "names", "root", "trigger", "workers")

    parts: ClassVar[tuple[str, ...]] = (*_PARTS, "base", "trigger")

    def __init__(self, name: str, base: int) -> None:
        super().__init__(name, base)
        self.lease = self.delay = self.names = self.workers = -1
        # Opened for reading and writing, so that a write is kept until it is read, and does not fail if there is no
        # reader.
        self.trigger = -1
        # Returns the open directory of all queues.
        self.root: Callable[[], int] = lambda: -1
        # Leases that were found again by their tokens.
        self.found: WeakSet[object] = WeakSet()
        # Users that can enter the directory can read its items.
        self.item_mode = 0o660 if os.fstat(base).st_mode & stat.S_IWGRP else 0o600

    @property
    def directories(self) -> dict[str, int]:
        """The descriptors of its directories, by their names."""
        return {part: getattr(self, part) for part in _PARTS}

    @property
    def directory_mode(self) -> int:
        """The mode of its directories."""
        return stat.S_IMODE(os.fstat(self.base).st_mode)

    @property
    def is_down(self) -> bool:
        """True if the file `down` exists."""
        return has_entry("down", self.base)

    @property
    def message_directories(self) -> tuple[int, ...]:
        """The descriptors of the directories that contain messages."""
        return tuple(getattr(self, part) for part in MESSAGE_PARTS)

    def pull_trigger(self) -> None:
        """Wake one idle worker: write one byte, or nothing if the pipe is full of unread bytes."""
        if self.trigger >= 0:
            try:
                os.write(self.trigger, b"x")
            except BlockingIOError:
                # Thousands of wake-ups are unread: another one adds nothing.
                pass


def has_queue(root: int, name: str) -> bool:
    """Return whether a queue exists. A directory of it that was removed is created when the queue is opened."""
    return is_queue(root, name) or has_part(root, name, FORMAT_FILE, stat.S_ISREG)


def create_queue(root: int, name: str, mode: int, *, durable: bool) -> None:
    """Create a queue under a hidden name, then rename it. An existing one is not changed.

    Raises:
        OSError: It cannot be created.
    """
    if has_queue(root, name):
        return
    hidden = f".new-{name}-{secrets.token_hex(4)}"
    _make_directory(hidden, mode, root)
    base = open_directory(hidden, root)
    try:
        try:
            for part in _PARTS:
                _make_directory(part, mode, base)
            _make_trigger(base, mode)
            _write_format(base, mode, durable=durable)
            if durable:
                os.fsync(base)
            os.rename(hidden, name, src_dir_fd=root, dst_dir_fd=root)
        except OSError as error:
            # If the hidden name is gone, the reply was lost: the queue exists completely.
            if has_entry(hidden, root):
                remove_whole_tree(hidden, root)
                if error.errno not in NOT_EMPTY or not has_queue(root, name):
                    raise
        if durable:
            os.fsync(root)
    finally:
        os.close(base)


def open_queue(root: int, name: str) -> QueueDir | None:
    """Open a queue, or return None if it does not exist. Parts that an fsq program has not created are added.

    Raises:
        FormatTooNew: A newer release wrote it.
        OSError: It cannot be opened.
    """
    if not has_queue(root, name):
        return None
    try:
        opened = QueueDir(name, open_directory(name, root))
    except FileNotFoundError:
        return None
    try:
        _check_format(opened)
        mode = opened.directory_mode
        for part in _PARTS:
            setattr(opened, part, open_part(opened.base, part, mode))
        opened.trigger = _open_trigger(opened.base, mode)
    except FileNotFoundError:
        # It was deleted while it was being opened.
        opened.close()
        return None
    except BaseException:
        opened.close()
        raise
    return opened


def _make_directory(name: str, mode: int, parent: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        return
    fd = open_directory(name, parent)
    try:
        change_mode(fd, mode)
    finally:
        os.close(fd)


def open_part(base: int, part: str, mode: int) -> int:
    """Open a directory, which is created with this mode if it does not exist.

    Raises:
        FileNotFoundError: `base` was removed.
    """
    try:
        return open_directory(part, base)
    except FileNotFoundError:
        if os.fstat(base).st_nlink == 0:
            raise
        _make_directory(part, mode, base)
        return open_directory(part, base)


def _make_trigger(base: int, mode: int) -> None:
    try:
        make_fifo(_TRIGGER, mode & 0o666, base)
    except FileExistsError:
        return
    os.chmod(_TRIGGER, mode & 0o666, dir_fd=base)


def _open_trigger(base: int, mode: int) -> int:
    """Open the trigger for reading and writing; -1 if it is not a pipe."""
    try:
        fd = _open_existing(_TRIGGER, base)
    except FileNotFoundError:
        _make_trigger(base, mode)
        fd = _open_existing(_TRIGGER, base)
    if fd >= 0 and not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        return -1
    return fd


def _open_existing(name: str, base: int) -> int:
    try:
        return open_entry(name, os.O_RDWR, base)
    except OSError as error:
        # It is a trigger of another user, or none: rescans and inotify work without it.
        if error.errno in DENIED or error.errno in NOT_A_FILE or error.errno == errno.EISDIR:
            return -1
        raise


def _write_format(base: int, mode: int, *, durable: bool) -> None:
    fd = create_file(FORMAT_FILE, base, mode & 0o666)
    try:
        write_all(fd, b"qworker directory %d\n" % FORMAT)
        if durable:
            # Without this sync, a power failure leaves a queue whose format is an empty file, which no program opens.
            os.fsync(fd)
    finally:
        os.close(fd)


def _check_format(opened: QueueDir) -> None:
    text = read_file(FORMAT_FILE, opened.base)
    if text is None:
        # An fsq program created it. Its format is the first one.
        return
    version = text.rpartition(b" ")[2].strip()
    if not text.startswith(b"qworker directory ") or not version.isdigit():
        raise QueueDamaged(
            f"the file `format` of the queue {opened.name!r} is damaged: write `qworker directory 1` to it"
        )
    if int(version) > FORMAT:
        raise FormatTooNew(
            f"the queue {opened.name!r} has format {int(version)}, but this release knows only {FORMAT}: "
            "upgrade qworker"
        )
