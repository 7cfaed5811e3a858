"""Files of a queue that cannot be leased, so that they do not block the files behind them.

A damaged inode, an immutable file or a directory of another user cannot be opened, read or renamed. Nothing that a
worker can do helps, and the file may be a message. So it stays where it is, is tried again after growing pauses, and is
reported once. A record of it in the queue's hidden directory `.blocked` says why, for `stats` and `doctor`.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping

import msgspec
import structlog

from qworker import log_events as events
from qworker.clock import Clock
from qworker.kit.files import has_entry, list_names, read_file, try_unlink, write_new
from qworker.kit.max_body import describe_too_large
from qworker.kit.opening import create_file, open_directory
from qworker.kit.store_errors import DENIED, FULL, STORE_WIDE
from qworker.names import printable

__all__ = ["BlockedFile", "BlockedFiles", "BlockedRecords", "is_about_one_file"]

# Seconds until a file is tried again: the first pause and the longest.
_FIRST, _LAST = 1.0, 60.0
# Blocked files that one process knows.
_MOST = 10_000
_DIRECTORY = ".blocked"


class BlockedFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a file that cannot be leased.

    Attributes:
        directory: The name of the directory in the queue.
        name: Its name there, in bytes: any program may have given it.
        reason: Why it cannot be leased.
        size: Its bytes if it was too large for the process that wrote the record. None: no process can lease it.
        unsettled: Whether it ran and could not be moved to where its outcome belongs. On a store that locks a message
            in place, such a file could be leased again and again.
    """

    directory: str
    name: bytes
    reason: str
    size: int | None = None
    unsettled: bool = False

    def __str__(self) -> str:
        return f"{self.directory}/{printable(os.fsdecode(self.name))}: {self.reason}"


def is_about_one_file(error: OSError, scratch: int, *way: int) -> bool:
    """Return whether an error concerns one file, because another one can be created and moved.

    Args:
        error: The error.
        scratch: The descriptor of a directory in which a file may be created.
        way: The descriptors of the directories through which it is moved.
    """
    if error.errno in STORE_WIDE:
        return False
    # Programs ignore hidden names.
    probe = f".probe-{secrets.token_hex(8)}"
    place = scratch
    try:
        os.close(create_file(probe, scratch))
        for next_place in way or (scratch,):
            os.rename(probe, probe, src_dir_fd=place, dst_dir_fd=next_place)
            place = next_place
        return True
    except OSError as failed:
        # On a full disk the probe cannot be created, but messages can still be moved.
        return failed.errno in FULL
    finally:
        try_unlink(probe, place)


class BlockedRecords:
    """The records of one queue's blocked files, which all processes share.

    Args:
        base: The descriptor of the queue's directory.
    """

    def __init__(self, base: int) -> None:
        self._base = base
        self._cleaned_at = float("-inf")

    def add(self, file: BlockedFile) -> None:
        """Store a record. It replaces the one of the same file.

        Raises:
            OSError: It cannot be stored.
        """
        try:
            os.mkdir(_DIRECTORY, os.fstat(self._base).st_mode & 0o777, dir_fd=self._base)
        except FileExistsError:
            # Another blocked file was recorded before.
            pass
        name = _record_name(file.directory, os.fsdecode(file.name))
        records = open_directory(_DIRECTORY, self._base)
        try:
            write_new(name, records, msgspec.json.encode(file), durable=False)
        finally:
            os.close(records)

    def remove(self, directory: str, name: str) -> None:
        """Remove the record of a file. Idempotent.

        Raises:
            OSError: It cannot be removed.
        """
        records = self._open()
        if records >= 0:
            try:
                try_unlink(_record_name(directory, name), records)
            finally:
                os.close(records)

    async def read(self) -> list[BlockedFile]:
        """Return the records of the files that no process can lease, sorted by their names.

        Raises:
            OSError: They cannot be read.
        """
        return [file for file in await self._read_all() if file.size is None]

    def is_unsettled(self, directory: str, name: str) -> bool:
        """Return whether the record of a file says that its outcome could not be stored.

        Raises:
            OSError: It cannot be read.
        """
        records = self._open()
        if records < 0:
            return False
        try:
            record = read_file(_record_name(directory, name), records)
            return record is not None and msgspec.json.decode(record, type=BlockedFile).unsettled
        except msgspec.DecodeError:
            return False
        finally:
            os.close(records)

    async def count(self, max_body: int | None, directories: Mapping[str, int]) -> int:
        """Return how many files a process with this limit cannot lease, as far as it is known.

        Args:
            max_body: Bytes. None: any size.
            directories: The descriptors of the queue's directories, by their names.

        Raises:
            OSError: The records cannot be read.
        """
        return sum(
            [
                not _is_gone(file, directories)
                if file.size is None
                else max_body is not None and _size_now(file, directories) > max_body
                for file in await self._read_all()
            ]
        )

    async def _read_all(self) -> list[BlockedFile]:
        records = self._open()
        if records < 0:
            return []
        try:
            found: list[BlockedFile] = []
            for name in await list_names(records):
                try:
                    found.append(msgspec.json.decode(read_file(name, records) or b"", type=BlockedFile))
                except msgspec.DecodeError:
                    # It is being removed, or is not a record.
                    continue
            return sorted(found, key=lambda file: (file.directory, file.name))
        finally:
            os.close(records)

    async def clean_up(self, directories: Mapping[str, int], *, every: float = 0.0) -> None:
        """Remove the records of files that are gone.

        Args:
            directories: The descriptors of the queue's directories, by their names.
            every: Seconds that must have passed since the last call.

        Raises:
            OSError: They cannot be removed.
        """
        now = time.monotonic()
        if now - self._cleaned_at < every:
            return
        self._cleaned_at = now
        for file in await self._read_all():
            place = directories.get(file.directory)
            name = os.fsdecode(file.name)
            if place is None or not has_entry(name, place):
                self.remove(file.directory, name)

    def _open(self) -> int:
        """Open the directory of records; -1 if there is none."""
        try:
            return open_directory(_DIRECTORY, self._base)
        except FileNotFoundError:
            return -1


def _is_gone(file: BlockedFile, directories: Mapping[str, int]) -> bool:
    place = directories.get(file.directory)
    return place is not None and not has_entry(os.fsdecode(file.name), place)


def _size_now(file: BlockedFile, directories: Mapping[str, int]) -> int:
    """Return the bytes of a file; 0 if it is gone."""
    place = directories.get(file.directory)
    try:
        return 0 if place is None else os.stat(os.fsdecode(file.name), dir_fd=place, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _record_name(directory: str, name: str) -> str:
    return hashlib.sha256(os.fsencode(f"{directory}/{name}")).hexdigest()


class BlockedFiles(Collection[str]):
    """The blocked files of one directory, as one process knows them. It has the names that must not be tried now.

    Args:
        queue: The name of the queue.
        directory: The name of the directory. A name may begin with another directory and a slash.
        clock: The store's clock.
        records: The records of the queue.
    """

    def __init__(self, queue: str, directory: str, clock: Clock, records: BlockedRecords) -> None:
        self._queue = queue
        self._directory = directory
        self._records = records
        self._clock = clock
        # The current pause of each file, in seconds, also while it is being tried.
        self._pauses: dict[str, float] = {}
        # The files that must not be tried now, and (monotonic seconds of the next attempt, name) of each.
        self._resting: set[str] = set()
        self._next: list[tuple[float, str]] = []
        # The files that ran, and whose outcome could not be stored. Some may not have been tried since this process
        # learnt of them.
        self.unsettled: set[str] = set()
        self._log = structlog.get_logger("qworker.directory")

    def __contains__(self, name: object) -> bool:
        return name in self._resting

    def __iter__(self) -> Iterator[str]:
        return iter(self._resting)

    def __len__(self) -> int:
        return len(self._pauses)

    def __bool__(self) -> bool:
        return bool(self._pauses or self.unsettled)

    def add(self, name: str, error: OSError) -> None:
        """Let a file rest that cannot be opened, read or moved. Report and record it if it is new.

        Raises:
            OSError: It cannot be recorded.
        """
        reason = error.strerror or str(error)
        if self._rest(name):
            self._log.error(events.MESSAGE_BLOCKED, queue=self._queue, file=self._shown(name), reason=reason)
            self._record(name, reason)

    def add_unsettled(self, name: str, error: OSError) -> None:
        """Let a file rest whose outcome cannot be stored. Report and record it if it is new.

        Raises:
            OSError: It cannot be recorded.
        """
        if len(self.unsettled) >= _MOST:
            # Each of them runs once more.
            self.unsettled.clear()
        self.unsettled.add(name)
        self.add(name, error)

    def repeat_pause(self, name: str) -> None:
        """Let a file rest once more, for as long as the last time, because it was not tried."""
        self._start_pause(name, self._pauses.get(name, _FIRST))

    def add_too_large(self, name: str, size: int, max_body: int) -> None:
        """Let a file rest that is larger than `max_body`. Report and record it if it is new.

        The record has its size, because each process has its own limit.

        Raises:
            OSError: It cannot be recorded.
        """
        if self._rest(name):
            reason = describe_too_large(size, max_body)
            self._log.error(events.MESSAGE_TOO_LARGE, queue=self._queue, file=self._shown(name), reason=reason)
            self._record(name, reason, size)

    def _rest(self, name: str) -> bool:
        """Start the next pause of a file, and return whether the file is new."""
        known = self._pauses.get(name)
        if known is None and len(self._pauses) >= _MOST:
            # They are found again by the next listing.
            self._pauses.clear()
            self._resting.clear()
            self._next.clear()
        self._start_pause(name, _FIRST if known is None else min(2 * known, _LAST))
        return known is None

    def _start_pause(self, name: str, pause: float) -> None:
        self._pauses[name] = pause
        self._resting.add(name)
        heapq.heappush(self._next, (self._clock.monotonic() + pause, name))

    def _shown(self, name: str) -> str:
        directory, name = self._split(name)
        return f"{directory}/{printable(name)}"

    def _split(self, name: str) -> tuple[str, str]:
        directory, _, name = name.rpartition("/")
        return directory or self._directory, name

    def _record(self, name: str, reason: str, size: int | None = None) -> None:
        directory, name = self._split(name)
        try:
            unsettled = name in self.unsettled
            self._records.add(BlockedFile(directory, os.fsencode(name), reason, size, unsettled))
        except OSError as refused:
            # The log has the reason. Without a record, `stats` and `doctor` of other processes do not know the file.
            if refused.errno not in FULL | DENIED:
                raise

    def take_due(self) -> list[str]:
        """Return the files that may be tried again."""
        due: list[str] = []
        now = self._clock.monotonic()
        while self._next and self._next[0][0] <= now:
            _, name = heapq.heappop(self._next)
            if name in self._resting:
                self._resting.discard(name)
                due.append(name)
        return due

    def until_due(self) -> float:
        """Return the seconds until a file may be tried again; infinite if there is none."""
        return self._next[0][0] - self._clock.monotonic() if self._next else float("inf")

    def forget(self, name: str) -> None:
        """Forget a file that was leased, failed or is gone.

        Raises:
            OSError: Its record cannot be removed.
        """
        if self._pauses.pop(name, None) is not None or name in self.unsettled:
            self.unsettled.discard(name)
            self._resting.discard(name)
            self._records.remove(*self._split(name))
