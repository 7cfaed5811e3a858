"""The samples of queues in a directory: `.samples/` next to the queues, with one file for each queue."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress

from qworker.kit.files import try_unlink, write_all
from qworker.kit.opening import open_directory, open_own, open_regular
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue

__all__ = ["DirectorySamples"]

_FOLDER = ".samples"


class DirectorySamples:
    """The files of samples. Nothing is open between two calls.

    Args:
        directory: The root of the queues.
        shared: Whether the directory's group can read and write it.
    """

    def __init__(self, directory: str, *, shared: bool) -> None:
        self._root = directory
        self._path = os.path.join(directory, _FOLDER)
        self._shared = shared

    async def read(self, queue: str, offset: int, size: int) -> bytes:
        """Return bytes of a queue's file."""
        with store_errors(f"read {self._path}/{check_existing_queue(queue)}"):
            try:
                folder = open_directory(self._path)
            except FileNotFoundError:
                return b""
            try:
                fd = open_regular(queue, folder, os.O_RDONLY)
            except FileNotFoundError:
                return b""
            finally:
                os.close(folder)
            try:
                return os.pread(fd, size, offset)
            finally:
                os.close(fd)

    async def write(self, queue: str, offset: int, data: bytes) -> None:
        """Write bytes into a queue's file."""
        with self._opened(queue) as fd:
            write_all(fd, data, offset)

    @contextmanager
    def lock(self, queue: str) -> Generator[bool]:
        """Lock a queue's file."""
        with self._opened(queue) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def remove(self, queue: str) -> None:
        """Remove the file of a queue that is deleted. Idempotent.

        Raises:
            OSError: It cannot be removed.
        """
        try:
            folder = open_directory(self._path)
        except FileNotFoundError:
            return
        try:
            try_unlink(queue, folder)
        finally:
            os.close(folder)

    @contextmanager
    def _opened(self, queue: str) -> Generator[int]:
        with store_errors(f"write {self._path}/{check_existing_queue(queue)}"):
            folder = self._open_folder()
            try:
                fd = open_own(queue, folder, os.O_RDWR | os.O_CREAT, 0o660 if self._shared else 0o600)
            finally:
                os.close(folder)
        try:
            with store_errors(f"write {self._path}/{queue}"):
                yield fd
        finally:
            os.close(fd)

    def _open_folder(self) -> int:
        """Open the folder, which is created if it does not exist."""
        with suppress(FileNotFoundError):
            return open_directory(self._path)
        mode = 0o2770 if self._shared else 0o700
        root = open_directory(self._root)
        try:
            with suppress(FileExistsError):
                os.mkdir(_FOLDER, mode, dir_fd=root)
                # The umask does not apply.
                os.chmod(_FOLDER, mode, dir_fd=root)
            return open_directory(_FOLDER, root)
        finally:
            os.close(root)
