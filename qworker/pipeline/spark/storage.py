"""A folder on storage that Spark can write to: a directory, or a Hadoop file system (HDFS, object stores).

Names are relative to the folder, with slashes. Every change can be repeated after a crash.
"""

from __future__ import annotations

import abc
import fcntl
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from qworker.errors import NotSupported, UsageError
from qworker.kit.store_errors import store_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["HadoopStorage", "LocalStorage", "Storage", "open_storage"]


def open_storage(spark: SparkSession, path: str) -> Storage:
    """Open the folder at a path or URL. It is created if it does not exist.

    Raises:
        NotSupported: It is not on a local disk, and the session is one of Spark Connect.
    """
    parts = urlsplit(path)
    if parts.scheme in {"", "file"}:
        return LocalStorage(unquote(parts.path) if parts.scheme else path)
    return HadoopStorage(spark, path)


class Storage(abc.ABC):
    """A folder.

    Attributes:
        url: The URL for Spark, without a slash at its end.
    """

    url: str

    def path(self, name: str) -> str:
        """Return the URL of a name, for Spark."""
        return f"{self.url}/{name}"

    @abc.abstractmethod
    def names(self, name: str) -> list[str]:
        """Return the names in a subfolder, sorted, without hidden files. Return none if it does not exist."""

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""

    @abc.abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically and durably. Readers see the old content until then."""

    @abc.abstractmethod
    def sync(self, names: Iterable[str]) -> None:
        """Make files and their names durable."""

    @abc.abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename a file, unless that was done already."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file or a folder, if it exists."""

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock out other runs, if the file system can do that."""
        yield


class LocalStorage(Storage):
    """A directory. On a cluster, all machines must share it.

    Args:
        directory: Its path.
    """

    def __init__(self, directory: str) -> None:
        self._root = os.path.abspath(directory)
        self.url = f"file://{self._root}"
        with store_errors(f"make {self._root}"):
            os.makedirs(self._root, exist_ok=True)

    def _at(self, name: str) -> str:
        return os.path.join(self._root, name)

    def names(self, name: str) -> list[str]:
        """List the directory."""
        try:
            return sorted(found for found in os.listdir(self._at(name)) if found[0] not in "._")
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int:
        """Read its status."""
        return os.stat(self._at(name)).st_size

    def read(self, name: str) -> bytes | None:
        """Read the file."""
        try:
            with open(self._at(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a new file, and rename it over the old one."""
        path = self._at(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.new", path)
        _sync_directory(os.path.dirname(path))

    def sync(self, names: Iterable[str]) -> None:
        """Sync the files, their directories, and the directories above."""
        directories: set[str] = set()
        for name in names:
            _sync_file(self._at(name))
            directories.update(_above(name))
        for directory in directories:
            _sync_directory(self._at(directory))

    def move(self, source: str, target: str) -> None:
        """Rename it."""
        os.makedirs(os.path.dirname(self._at(target)), exist_ok=True)
        try:
            os.rename(self._at(source), self._at(target))
        except FileNotFoundError:
            if not os.path.exists(self._at(target)):
                raise

    def remove(self, name: str) -> None:
        """Delete the file, or the directory with its content."""
        path = self._at(name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(path)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold a lock, which the kernel releases when the process dies.

        Raises:
            UsageError: Another run holds it.
        """
        os.makedirs(self._at("_qworker"), exist_ok=True)
        fd = os.open(self._at("_qworker/lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another run is using {self._root}: wait until it has finished") from None
            yield
        finally:
            os.close(fd)


def _above(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[:length]) for length in range(len(parts) + 1)]


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HadoopStorage(Storage):
    """A folder of a Hadoop file system, where a closed file is durable.

    Args:
        spark: A session with a JVM of its own.
        url: The URL of the folder.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = url.rstrip("/")
        jvm: Any = getattr(spark, "_jvm", None)
        if jvm is None:
            raise NotSupported(f"{url}: through Spark Connect only directories can be written: run it on the cluster")
        self._hadoop = jvm.org.apache.hadoop
        configuration = getattr(spark, "_jsc").hadoopConfiguration()  # noqa: B009 - the JVM's side has no types
        self._system = self._at("").getFileSystem(configuration)
        self._system.mkdirs(self._at(""))

    def _at(self, name: str) -> Any:
        return self._hadoop.fs.Path(f"{self.url}/{name}".rstrip("/"))

    def names(self, name: str) -> list[str]:
        """List the folder."""
        if not self._system.exists(self._at(name)):
            return []
        found = [str(status.getPath().getName()) for status in self._system.listStatus(self._at(name))]
        return sorted(one for one in found if one[0] not in "._")

    def size(self, name: str) -> int:
        """Read its status."""
        return int(self._system.getFileStatus(self._at(name)).getLen())

    def read(self, name: str) -> bytes | None:
        """Read the file."""
        if not self._system.exists(self._at(name)):
            return None
        stream = self._system.open(self._at(name))
        try:
            return bytes(self._hadoop.thirdparty.com.google.common.io.ByteStreams.toByteArray(stream))
        finally:
            stream.close()

    def write(self, name: str, content: bytes) -> None:
        """Write a new file and rename it over the old one.

        If the file system cannot do that, the old one is removed first.
        """
        beside = self._at(f"{name}.new")
        stream = self._system.create(beside, True)
        try:
            stream.write(content)
        finally:
            stream.close()
        if not self._system.rename(beside, self._at(name)):
            self._system.delete(self._at(name), False)
            self._rename(beside, self._at(name))

    def _rename(self, source: Any, target: Any) -> None:
        if not self._system.rename(source, target):
            raise OSError(f"cannot rename {source.toString()} to {target.toString()}")

    def sync(self, names: Iterable[str]) -> None:
        """Do nothing."""

    def move(self, source: str, target: str) -> None:
        """Rename it."""
        if self._system.exists(self._at(source)):
            self._system.mkdirs(self._at(target).getParent())
            self._rename(self._at(source), self._at(target))
        elif not self._system.exists(self._at(target)):
            raise FileNotFoundError(f"{self.url}/{source} is gone")

    def remove(self, name: str) -> None:
        """Delete it with its content."""
        self._system.delete(self._at(name), True)
