"""Sealed loads that are part of their queue: workers lease straight from their staged files.

    <queue>/load-<load>:<step>:<run>/seal                                        the manifest
                                    /<partition>.<attempt>/<chunk>/<staged name>  a ready message

The commit of a load renames the directory of its run to that name, so all of its messages become ready at once. A lease
renames a staged file to lease/. Nothing returns here: a message that is released, retried or reaped goes to queue/ or
delay/, as any other. So each staged file leaves by one rename, and `rmdir` proves that a directory has no more of them.
After the last partition, the load's directory is hidden and removed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable

import msgspec

from qworker.bulk.contract import Manifest
from qworker.bulk.load_files import SEAL, names_in, read_seal
from qworker.errors import BackendError
from qworker.kit.files import list_names, remove_empty, remove_tree
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import STORE_WIDE
from qworker_file.load_names import ItemNames

__all__ = [
    "LOAD",
    "LoadReader",
    "SealedLoad",
    "StagedFile",
    "clean_up_loads",
    "finish_load",
    "is_load",
    "load_directory",
    "sealed_loads",
    "staged_files",
]

# How the name of a sealed load begins.
LOAD = "load-"
_GONE = ".gone-"
# How many directories of staged files a worker can skip when it meets another worker: about a thousand messages.
_APART = 8


class SealedLoad(msgspec.Struct, frozen=True, gc=False):
    """A sealed load.

    Attributes:
        name: The name of its directory.
        load: The name of the load.
        manifest: Its seal.
    """

    name: str
    load: str
    manifest: Manifest


class StagedFile(msgspec.Struct, frozen=True, gc=False):
    """A staged file of a sealed load.

    Attributes:
        path: Its path in the queue.
        item: The item that it becomes.
    """

    path: str
    item: str


def load_directory(load: str, manifest: Manifest, run: str) -> str:
    """Return the name of the directory of a sealed load."""
    return f"{LOAD}{load}:{manifest.step}:{run}"


def is_load(name: str) -> bool:
    """Return whether a name in a queue is that of a sealed load."""
    return name.startswith(LOAD)


def sealed_loads(base: int, on_trouble: Callable[[str, str], None]) -> list[SealedLoad]:
    """Return the sealed loads of a queue, the oldest first.

    Args:
        base: The descriptor of the queue's directory.
        on_trouble: Receives the path of a seal that cannot be read, and why.

    Raises:
        OSError: The queue cannot be listed.
    """
    found: list[SealedLoad] = []
    for name in names_in(".", base):
        if not is_load(name):
            continue
        try:
            manifest = read_seal(f"{name}/{SEAL}", base)
        except NotADirectoryError:
            continue
        except (BackendError, OSError) as error:
            if isinstance(error, OSError) and error.errno in STORE_WIDE:
                raise
            on_trouble(f"{name}/{SEAL}", str(error))
            continue
        if manifest is not None and manifest.partitions:
            found.append(SealedLoad(name, name.removeprefix(LOAD).partition(":")[0], manifest))
    return sorted(found, key=lambda each: (each.manifest.sealed_at, each.name))


def clean_up_loads(base: int) -> None:
    """Remove what is left of loads that are finished. It blocks, and can take long.

    Raises:
        OSError: Something cannot be removed.
    """
    for name in names_in(".", base):
        if name.startswith(f"{_GONE}{LOAD}"):
            remove_tree(name, base)


def finish_load(name: str, base: int) -> None:
    """Remove a load all of whose partitions are removed. If the process dies in between, a reaper does the rest.

    An attempt that does not count may still write there. It finds nothing after the rename.

    Raises:
        OSError: It cannot be removed.
    """
    gone = f"{_GONE}{name}"
    try:
        os.rename(name, gone, src_dir_fd=base, dst_dir_fd=base)
    except FileNotFoundError:
        # Another process was faster. Or the reply was lost, and it has its new name.
        pass
    remove_tree(gone, base)


async def staged_files(
    base: int, *, local_time: bool, on_trouble: Callable[[str, str], None]
) -> AsyncIterator[list[StagedFile]]:
    """Yield the staged files of all sealed loads of a queue, in the order of their items, in lists.

    Args:
        base: The descriptor of the queue's directory.
        local_time: Whether timestamps are in local time.
        on_trouble: Receives the path of what cannot be read, and why. The rest of that load is left out.

    Raises:
        OSError: The store failed.
    """
    for load in sealed_loads(base, on_trouble):
        try:
            async for staged in _staged_of(load, base, local_time=local_time):
                yield staged
        except OSError as error:
            if error.errno in STORE_WIDE:
                raise
            on_trouble(load.name, str(error))


async def _staged_of(load: SealedLoad, base: int, *, local_time: bool) -> AsyncIterator[list[StagedFile]]:
    names = ItemNames(load.load, load.manifest, local_time=local_time)
    for number, partition in enumerate(load.manifest.partitions):
        path = f"{load.name}/{partition.partition}.{partition.attempt}"
        name_of = names.of_partition(number)
        for chunk in await _sorted_names(path, base):
            staged = await _sorted_names(f"{path}/{chunk}", base)
            yield [StagedFile(f"{path}/{chunk}/{name}", named[1]) for name in staged if (named := name_of(name))]
            # A listing of a chunk is too short to let other tasks run.
            await asyncio.sleep(0)


async def _sorted_names(path: str, base: int) -> list[str]:
    try:
        fd = open_directory(path, base)
    except FileNotFoundError:
        return []
    try:
        return sorted(await list_names(fd))
    finally:
        os.close(fd)


class LoadReader:
    """Takes the staged files of one sealed load, in the order of their rows.

    If workers meet, they continue in different directories. A directory that is not empty at the end of a round is
    read again in the next one, because the worker that had read it may be dead.

    Args:
        load: The load.
        base: The descriptor of the queue's directory.
        local_time: Whether timestamps are in this host's local time.
    """

    def __init__(self, load: SealedLoad, base: int, *, local_time: bool) -> None:
        self.load = load
        self._base = base
        self._names = ItemNames(load.load, load.manifest, local_time=local_time)
        # The numbers of the partitions that may have files, the next one last, and those that were left in this round.
        self._partitions = list(range(len(load.manifest.partitions) - 1, -1, -1))
        self._left: list[int] = []
        # The open partition: its number, its path, its descriptor, its names, and its chunks, the next one last.
        self._number = self._partition = -1
        self._path = ""
        self._name_of = self._names.of_partition(0)
        self._chunks: list[str] = []
        # Whether files of it were left to another worker, which may have left some, too.
        self._has_skipped = False
        self._chunk = ""
        self.directory = -1
        self.files: list[tuple[str, str]] = []

    def first(self) -> tuple[str, str] | None:
        """Return the item and the name of the next file, or None at the end of a round.

        Raises:
            OSError: Something cannot be listed.
        """
        while not self.files:
            self._close_chunk()
            if self._chunks:
                self._open_chunk(self._chunks.pop())
            elif not self._open_partition():
                return None
        return self.files[-1]

    def path_of(self, name: str) -> str:
        """Return the path in the queue of a file of the open directory."""
        return f"{self._path}/{self._chunk}/{name}"

    def skip_taken(self) -> None:
        """Leave a directory to the worker that has taken a file of it, and continue at a distance."""
        self.files.clear()
        self._chunk = ""
        self._has_skipped = True
        count = random.randrange(min(len(self._chunks) + 1, _APART))
        if count:
            self._chunks = self._chunks[-count:] + self._chunks[:-count]

    @property
    def is_finished(self) -> bool:
        """Whether no file is left. If not, `first` begins another round."""
        return not (self._partitions or self._left or self._number >= 0)

    def _open_partition(self) -> bool:
        """Open the next partition that has files. Return False at the end of a round."""
        if self._number >= 0 and self._has_skipped and not self._is_empty():
            return self._list_chunks()
        self._close_partition()
        while self._partitions:
            self._number = self._partitions.pop()
            partition = self.load.manifest.partitions[self._number]
            self._path = f"{self.load.name}/{partition.partition}.{partition.attempt}"
            try:
                self._partition = open_directory(self._path, self._base)
            except FileNotFoundError:
                self._number = -1
                continue
            self._name_of = self._names.of_partition(self._number)
            return self._list_chunks()
        self._partitions, self._left = self._left[::-1], []
        if self.is_finished:
            finish_load(self.load.name, self._base)
        return False

    def _is_empty(self) -> bool:
        return remove_empty(self._path, self._base)

    def _list_chunks(self) -> bool:
        self._chunks = sorted(names_in(".", self._partition), reverse=True)
        self._has_skipped = False
        return True

    def _open_chunk(self, chunk: str) -> None:
        try:
            self.directory = open_directory(chunk, self._partition)
        except (FileNotFoundError, NotADirectoryError):
            # Another worker has emptied it.
            return
        self._chunk = chunk
        names, name_of = sorted(os.listdir(self.directory), reverse=True), self._name_of
        self.files = [(named[1], name) for name in names if (named := name_of(name))]

    def _close_chunk(self) -> None:
        if self.directory >= 0:
            os.close(self.directory)
            self.directory = -1
        if self._chunk:
            chunk, self._chunk = self._chunk, ""
            remove_empty(chunk, self._partition)

    def _close_partition(self) -> None:
        if self._number >= 0:
            if not self._is_empty():
                self._left.append(self._number)
            os.close(self._partition)
            self._number = self._partition = -1

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in (self.directory, self._partition):
            if fd >= 0:
                os.close(fd)
        self.directory = self._partition = self._number = -1
        self._chunk, self._chunks, self.files = "", [], []
