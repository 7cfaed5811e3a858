"""The directory of a queue, and `.qworker/` in it, which contains the data that the protocol cannot store.

    <queue>/<id>, <id>.<expiry>, <id>.new     the protocol's
    <queue>/.qworker/lock                     flock while a message info is read and then written
    <queue>/.qworker/notes/<id>               tries, reason, and the meaning of an expiry in the name
    <queue>/.qworker/fail/<id>                messages that failed permanently
    <queue>/.qworker/down                     the queue is paused

Names are the state, and every transition is one rename from a name that has the expiry of the lease: that name is the
compare-and-swap key. The info of a message is written before the rename that it belongs to, and names the expiry
(`after`) that it counts, so that a crash between the two neither loses nor doubles a try.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import AsyncGenerator, Callable
from weakref import WeakSet

import msgspec

from qworker.clock import Clock
from qworker.kit.body_slices import OwnDescriptor, read_body
from qworker.kit.directory.blocked import BlockedFiles, BlockedRecords
from qworker.kit.directory.place import Parts, PlaceCheck
from qworker.kit.files import (
    LONG_TEXT,
    find_identity,
    has_entry,
    list_names,
    lock_file,
    make_directory,
    read_file,
    try_unlink,
    write_all,
)
from qworker.kit.opening import create_file, open_directory, open_file, open_regular
from qworker.kit.planted import rename_file
from qworker.kit.store_errors import NOT_A_FILE
from qworker_vsqs.names import leased_name, parse
from qworker_vsqs.window import IdWindow

__all__ = ["MessageInfo", "QueueDirectory"]

# Infos that are read without a turn of the loop.
_INFOS_AT_ONCE = 100


class MessageInfo(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The data of a message that its name does not contain.

    Attributes:
        tries: The number of failed attempts.
        after: The expiry of the lease whose end is counted in `tries` already.
        due: An expiry in the name that belongs to a delay and not to a lease.
        error: Why it failed last.
        enqueued_at: Unix seconds.
        failed_at: Unix seconds.
        origin: The message's id in the store that it came from.
    """

    tries: int = 0
    after: int | None = None
    due: int | None = None
    error: str | None = None
    enqueued_at: float | None = None
    failed_at: float | None = None
    origin: str | None = None


_decode = msgspec.json.Decoder(MessageInfo).decode
_NO_INFO = MessageInfo()


class QueueDirectory:
    """An open queue.

    Args:
        root: Descriptor of the store's directory. The caller closes it.
        name: The queue's name, checked.
        clock: The store's clock.
    """

    def __init__(self, root: int, name: str, clock: Clock) -> None:
        self.name = name
        self.window = IdWindow()
        self.refreshing = asyncio.Lock()
        self.last_id = 0
        # Until the first sync of an info: the entries of the side directories may not be durable.
        self._new = True
        self._root = root
        self._gate = asyncio.Lock()
        self._original_ids: dict[str, str] | None = None
        # The leases of this instance, which it can extend while the queue is open.
        self.leases: WeakSet[object] = WeakSet()
        self._descriptors: list[int] = []
        try:
            self.fd = self._keep(open_directory(name, root))
            found = os.fstat(self.fd)
            self._identity = (found.st_dev, found.st_ino)
            parts = Parts()
            self.side = parts.add(".qworker", self.fd, self._keep(make_directory(".qworker", self.fd)))
            self.infos = parts.add("notes", self.side, self._keep(make_directory("notes", self.side)))
            self.fail = parts.add("fail", self.side, self._keep(make_directory("fail", self.side)))
            self._parts = PlaceCheck(parts.are_in_place)
            self.records = BlockedRecords(self.side)
            self.blocked = BlockedFiles(name, ".", clock, self.records)
            self._lock = self._keep(open_regular("lock", self.side, os.O_RDWR | os.O_CREAT))
        except OSError:
            self.close()
            raise

    def _keep(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    @property
    def is_needed(self) -> bool:
        """Whether the queue must stay open although no call uses it."""
        return bool(self.leases or self.blocked)

    def retry_blocked(self) -> None:
        """Let files be tried again that have rested long enough."""
        for name in self.blocked.take_due():
            self.window.add(name)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    @property
    def directories(self) -> dict[str, int]:
        """The descriptors of the directories of messages that wait, by their names in the records of blocked files."""
        return {".": self.fd}

    async def aclose(self) -> None:
        """Close the descriptors, for a `LateCloser`."""
        self.close()

    def touched(self, *, has_info: bool) -> tuple[int, ...]:
        """Return the directories that a change of state touches, and whose sync makes it durable."""
        if not has_info:
            return (self.fd,)
        new, self._new = self._new, False
        return (self.fd, self.infos, self.fail, self.side) if new else (self.fd, self.infos, self.fail)

    @property
    def exists(self) -> bool:
        """False once the directory was removed."""
        return os.fstat(self.fd).st_nlink > 0

    def is_alive(self, *, now: bool = False) -> bool:
        """Return whether the directory still is the queue of that name, and has its own directories.

        Args:
            now: Whether its own directories are checked now in any case, and not once a second.
        """
        return find_identity(self.name, self._root) == self._identity and not self._parts.is_replaced(now=now)

    def is_paused(self) -> bool:
        """Return whether the queue is paused."""
        return has_entry("down", self.side)

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncGenerator[None]:
        """Hold the queue's lock, for a short time only."""
        async with self._gate:
            await lock_file(self._lock)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    # -- messages ----------------------------------------------------------------------------------------------------

    def try_rename(self, old: str, new: str) -> bool:
        """Rename within the queue; return False if another process was faster."""
        try:
            rename_file(old, new, self.fd, self.fd)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, directory: int | None = None) -> bytes | OwnDescriptor | None:
        """Return a message's body; None if it is gone. A large body is left for `read_in_slices`.

        Raises:
            OSError: The file is not a regular file (its number is in `NOT_A_FILE`), or cannot be read.
        """
        try:
            fd, found = open_file(name, self.fd if directory is None else directory)
        except FileNotFoundError:
            return None
        try:
            return read_body(fd, found.st_size)
        finally:
            os.close(fd)

    # -- infos -------------------------------------------------------------------------------------------------------

    def read_size(self, name: str, directory: int | None = None) -> int | None:
        """Return the bytes of a message's body; None if it is gone, 0 if it is not a regular file."""
        try:
            found = os.stat(name, dir_fd=self.fd if directory is None else directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def read_info(self, number: int) -> MessageInfo:
        """Return the info of a message, or an empty one if it does not exist or cannot be read."""
        try:
            data = read_file(str(number), self.infos, LONG_TEXT)
            return _NO_INFO if data is None else _decode(data)
        except ValueError:
            return _NO_INFO
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                raise
            return _NO_INFO

    def write_info(self, number: int, info: MessageInfo) -> int:
        """Write the info of a message; return its descriptor, which the caller syncs and closes."""
        temporary = f".{secrets.token_hex(6)}"
        fd = create_file(temporary, self.infos)
        try:
            write_all(fd, msgspec.json.encode(info))
            os.rename(temporary, str(number), src_dir_fd=self.infos, dst_dir_fd=self.infos)
        except OSError:
            os.close(fd)
            os.unlink(temporary, dir_fd=self.infos)
            raise
        return fd

    def delete_info(self, number: int) -> None:
        """Delete the info of a message, if there is one."""
        try_unlink(str(number), self.infos)

    async def original_ids(self) -> dict[str, str]:
        """Return the ids of messages that came from other stores, by their ids there.

        They are read once. The publisher of other such messages adds them to the result.
        """
        if self._original_ids is None:
            names = [*await list_names(self.fd), *await list_names(self.fail)]
            there = {found[0] for name in names if (found := parse(name)) is not None}
            origins: dict[str, str] = {}
            for count, name in enumerate(await list_names(self.infos)):
                found = parse(name)
                if found is not None and found[0] in there and (origin := self.read_info(found[0]).origin) is not None:
                    origins[origin] = str(found[0])
                if count % _INFOS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._original_ids = origins
        return self._original_ids

    def discard_original_ids(self) -> None:
        """Discard the ids of `original_ids`, so that they are read again."""
        self._original_ids = None

    # -- transitions that count; under the lock ----------------------------------------------------------------------

    def end_lease(
        self, number: int, expiry: int, target: str, change: Callable[[MessageInfo], MessageInfo]
    ) -> int | None:
        """Record the end of a lease in the info, and rename the message: both, or neither.

        Returns:
            The descriptor of the info, which the caller syncs and closes; None if the lease is lost.
        """
        old = leased_name(number, expiry)
        if not has_entry(old, self.fd):
            return None
        before = self.read_info(number)
        fd = self.write_info(number, change(before))
        if self.try_rename(old, target):
            return fd
        # The message was extended, settled or deleted in between: the written change has not happened.
        os.close(self.write_info(number, before))
        os.close(fd)
        return None

    def requeue_expired(self, number: int, expiry: int) -> bool:
        """Make a message ready whose lease has expired or which is due; return False if another process was faster."""
        info = self.read_info(number)
        if expiry in {info.due, info.after}:
            return self.try_rename(leased_name(number, expiry), str(number))
        fd = self.end_lease(
            number,
            expiry,
            str(number),
            lambda before: msgspec.structs.replace(
                before, tries=before.tries + 1, after=expiry, due=None, error="the lease expired"
            ),
        )
        if fd is None:
            return False
        os.close(fd)
        return True
