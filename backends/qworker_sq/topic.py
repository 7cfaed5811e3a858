"""One topic in one backend instance: its directory, its locks, its recovery, and its deletion of old segments.

Next to `state` and the segments is a directory `.qworker/`, which no other implementation reads:

    lock, turn        one writer at a time; `turn` is the waiting line, so that each process gets its turn
    boot              the boot in which the write position was last verified
    notes             the data that the log cannot store
    wake              closed after writing: its watchers read the log again
    channels/<name>/  journal, lock, owner, fail/
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from qworker.clock import Clock
from qworker.kit.directory.place import Parts, PlaceCheck
from qworker.kit.files import find_identity, lock_file, make_directory, write_all, write_new
from qworker.kit.linux import boot_id
from qworker.kit.opening import open_directory, open_own, open_regular
from qworker.kit.segments.log import Log
from qworker.kit.segments.state import STATE_SIZE, StateFile, encode_state
from qworker_sq.names import place_of_id
from qworker_sq.record_info import RecordInfos

__all__ = ["Topic", "sync_directories"]

_SIDE = ".qworker"


class Topic:
    """An open topic.

    Args:
        root: Descriptor of the store's directory. The caller closes it.
        name: The topic's name, checked.
        clock: The store's clock.
        segment_size: See `Log`.
        durable: Whether everything is synced before it is acknowledged.
        pool: The threads for syncs.

    Attributes:
        parts: Its directories and those of our channel, and its state, with their names.
    """

    def __init__(
        self, root: int, name: str, *, clock: Clock, segment_size: int | None, durable: bool, pool: Executor
    ) -> None:
        self.name = name
        self.durable = durable
        self.pool = pool
        self.clock = clock
        self._root = root
        self._descriptors: list[int] = []
        # Until the first sync of the infos: the entries of new side files may not be durable.
        self._new_files = True
        self._gate = asyncio.Lock()
        self.parts = Parts()
        self._place = PlaceCheck(self.parts.are_in_place)
        try:
            self.folder = self._keep(open_directory(name, root))
            found = os.fstat(self.folder)
            self._identity = (found.st_dev, found.st_ino)
            self.side = self.parts.add(_SIDE, self.folder, self._keep(make_directory(_SIDE, self.folder)))
            self._lock = self._keep(open_regular("lock", self.side, os.O_RDWR | os.O_CREAT))
            self._turn = self._keep(open_regular("turn", self.side, os.O_RDWR | os.O_CREAT))
        except OSError:
            self.close()
            raise
        self._segment_size = segment_size
        self.infos = RecordInfos(self.side)
        self.state: StateFile
        self.log: Log

    def _keep(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    async def open(self) -> None:
        """Create the missing files of a new topic, and find the write position after a crash."""
        async with self.locked():
            try:
                self._attach()
            except FileNotFoundError:
                self._create_state()
            self._recover()
            self.infos.file.follow()

    def _attach(self) -> None:
        fd = self._keep(open_own("state", self.folder, os.O_RDWR))
        self.state = StateFile(self.parts.add("state", self.folder, fd))
        self.log = Log(self.folder, self.state, self.clock, self._segment_size)

    def _create_state(self) -> None:
        """Create the state of a new topic, or of one that has lost it. Records in its segments stay."""
        strays = Log.listed(self.folder)
        write = 0 if strays else Log.make_first(self.folder, self.clock, self._segment_size)
        write_new("state", self.folder, encode_state(write, []))
        os.fsync(self._root)
        self._attach()
        if strays:
            self.state.move(0, self.log.recover(0, whole=True))
            os.fsync(self.state.fd)
        self._mark_verified()

    def _recover(self) -> None:
        """Find the write position.

        After a reboot this reads the whole segment, otherwise only if something follows the position.
        """
        if os.fstat(self.state.fd).st_size < STATE_SIZE:
            os.ftruncate(self.state.fd, STATE_SIZE)
        recorded = self.state.place(0)
        verified = self._is_verified_since_boot()
        if verified and not self.log.looks_written(recorded):
            return
        found = self.log.recover(recorded, whole=not verified)
        if found != recorded:
            self.state.move(0, found)
            os.fsync(self.state.fd)
        if not verified:
            self._rewind_channels(found)
            self._mark_verified()

    def _is_verified_since_boot(self) -> bool:
        try:
            fd = open_regular("boot", self.side, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return os.read(fd, 64).decode(errors="replace") == boot_id()
        finally:
            os.close(fd)

    def _mark_verified(self) -> None:
        # Not synced: without it, the next process that opens the topic verifies it again.
        fd = open_own("boot", self.side, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, 0)
            write_all(fd, boot_id().encode(), 0)
        finally:
            os.close(fd)

    def _rewind_channels(self, end: int) -> None:
        """Move channels back that are past the end: that part of the log was lost in a power failure.

        Such a channel would miss the records that are written next.
        """
        for index, entry in self.state.read()[1].items():
            if entry.place > end:
                self.state.move(index, end)

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        if self._descriptors:
            for fd in self._descriptors:
                os.close(fd)
            self._descriptors.clear()
            if hasattr(self, "log"):
                self.log.close()
                self.infos.file.close()

    @property
    def exists(self) -> bool:
        """False once the directory was removed."""
        return bool(self._descriptors) and os.fstat(self.folder).st_nlink > 0

    def is_alive(self, *, now: bool = False) -> bool:
        """Return whether the directory still is the queue of that name, and has its own directories.

        Args:
            now: Whether its own directories are checked now in any case, and not once a second.
        """
        is_open = bool(self._descriptors)
        is_named = is_open and find_identity(self.name, self._root) == self._identity
        return is_named and not self._place.is_replaced(now=now)

    def wake(self) -> None:
        """Wake every process that watches the side directory."""
        try:
            os.close(open_regular("wake", self.side, os.O_WRONLY | os.O_CREAT))
        except FileNotFoundError:
            # The side directory was removed, and with it all watches. The others read the log on a timer, too.
            pass

    # -- one writer at a time ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def locked(self) -> AsyncGenerator[None]:
        """Hold the topic's lock."""
        async with self._gate:
            await lock_file(self._turn)
            try:
                await lock_file(self._lock)
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    # -- syncs -------------------------------------------------------------------------------------------------------

    async def sync_infos(self) -> None:
        """Write the infos to the disk."""
        if self._new_files:
            await asyncio.get_running_loop().run_in_executor(self.pool, sync_directories, [self.side, self.folder])
            self._new_files = False
        await self.sync([self.infos.file.fd])

    async def sync(self, descriptors: list[int]) -> None:
        """Write the contents of files to the disk."""
        await asyncio.get_running_loop().run_in_executor(self.pool, _sync_data, descriptors)

    # -- deletion ----------------------------------------------------------------------------------------------------

    async def trim(self) -> int:
        """Delete the segments that every channel has read, and return their number."""
        async with self.locked():
            write, channels = self.state.read()
            oldest = min([entry.place for entry in channels.values()] + [write]) >> 32
            if self.log.segments()[0] >= oldest:
                self.log.refresh()
                return 0
            if self.durable:
                await self.sync([self.state.fd])
            gone = self.log.trim(oldest)
            self.log.refresh()
            self.infos.file.follow()
            self.infos.drop_old(oldest << 32, self._kept_places())
            return gone

    def _kept_places(self) -> set[int]:
        """Return the places whose bodies a channel keeps outside of the log."""
        kept: set[int] = set()
        channels = make_directory("channels", self.side)
        try:
            for channel in os.listdir(channels):
                kept.update(
                    place
                    for name in _list_if_exists(f"{channel}/fail", channels)
                    if (place := place_of_id(name)) is not None
                )
        finally:
            os.close(channels)
        return kept


def _list_if_exists(name: str, parent: int) -> list[str]:
    """Return the names in a directory, or no names if it does not exist."""
    try:
        fd = open_directory(name, parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def sync_directories(descriptors: Sequence[int]) -> None:
    """Make the entries of directories durable."""
    for fd in descriptors:
        os.fsync(fd)


def _sync_data(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.fdatasync(fd)
