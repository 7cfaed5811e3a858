"""The next staged files of all sealed loads of one queue that this instance has open."""

from __future__ import annotations

import asyncio
import errno
import os

from qworker.clock import Clock
from qworker.kit.directory.blocked import BlockedFiles, BlockedRecords, is_about_one_file
from qworker.kit.store_errors import STORE_WIDE
from qworker_file.foreign import ClaimResult
from qworker_file.layout import QueueDir
from qworker_file.lease import FileLease
from qworker_file.loads import LoadReader, sealed_loads

__all__ = ["LoadWindow"]

# Seconds until a load is read again of which other workers have read the last files: one of them may have died.
_RETRY = 1.0


class LoadWindow:
    """The loads of one queue. The oldest one comes first.

    Without loads, nothing here calls the system, except for a listing of the queue as often as its windows are listed.

    Args:
        files: The queue.
        clock: The store's clock.
        records: The records of files that cannot be leased.
        local_time: Whether timestamps are in local time.
    """

    def __init__(self, files: QueueDir, clock: Clock, records: BlockedRecords, *, local_time: bool) -> None:
        self._files = files
        self._local_time = local_time
        self._blocked = BlockedFiles(files.name, ".", clock, records)
        # Whether there may be a load that is not known, and the loop's time of the last listing.
        self._is_stale = True
        self._listed_at = float("-inf")
        # The loads that are read now, and those that ended a round with files left; when the next round begins.
        self._reading: list[LoadReader] = []
        self._resting: list[LoadReader] = []
        self._retry_at = float("inf")
        # The name of the file that was taken last.
        self._taken = ""

    def __bool__(self) -> bool:
        return bool(self._reading) and self.first() is not None

    def find(self) -> None:
        """Record that a load was added."""
        self._is_stale = True

    def refresh(self, rescan: float) -> None:
        """Find new loads, and begin the next round of the known ones if it is time.

        Args:
            rescan: Seconds after which the queue is listed again although `find` was not called. No watch reports what
                another host has sealed.

        Raises:
            OSError: The queue cannot be listed.
        """
        now = asyncio.get_running_loop().time()
        if self._is_stale or now - self._listed_at >= rescan:
            self._list(now)
        if now >= self._retry_at:
            self._blocked.take_due()
            self._reading = sorted(self._reading + self._resting, key=_age)
            self._resting, self._retry_at = [], float("inf")

    def _list(self, now: float) -> None:
        # It is set before the listing, so that no load is missed.
        self._is_stale, self._listed_at = False, now
        known = {reader.load.name for reader in (*self._reading, *self._resting)}
        found = sealed_loads(self._files.base, self.report)
        new = [
            LoadReader(load, self._files.base, local_time=self._local_time) for load in found if load.name not in known
        ]
        if new:
            self._reading = sorted(self._reading + new, key=_age)

    def report(self, path: str, reason: str) -> None:
        """Report and record a file or directory of a load that cannot be read."""
        self._blocked.add(path, OSError(errno.EIO, reason))

    def until_retry(self) -> float:
        """Return the seconds until the next round; infinite if no files were left."""
        if not self._resting:
            return float("inf")
        return max(0.001, self._retry_at - asyncio.get_running_loop().time())

    def first(self) -> tuple[str, str] | None:
        """Return the item and the name of the next file, or None at the end of the round.

        Raises:
            OSError: The store failed.
        """
        while self._reading:
            reader = self._reading[0]
            if reader.files and not self._blocked:
                return reader.files[-1]
            try:
                found = reader.first()
                while found is not None and reader.path_of(found[1]) in self._blocked:
                    reader.files.pop()
                    found = reader.first()
                self._blocked.forget(reader.load.name)
            except OSError as error:
                if error.errno in STORE_WIDE:
                    raise
                # The messages of other loads must not wait for this one.
                reader.close()
                self._blocked.add(reader.load.name, error)
                reader = LoadReader(reader.load, self._files.base, local_time=self._local_time)
                found = None
            if found is not None:
                return found
            del self._reading[0]
            if not reader.is_finished:
                self._resting.append(reader)
                self._retry_at = min(self._retry_at, asyncio.get_running_loop().time() + _RETRY)
        return None

    def take(self) -> tuple[int, str, str]:
        """Take the file that `first` returned: its directory, its name there, and its item."""
        reader = self._reading[0]
        item, self._taken = reader.files.pop()
        return reader.directory, self._taken, item

    # -- the end of a claim ------------------------------------------------------------------------------------------

    # Each claim follows its `take` at once, so the reader is still the first one.

    def on_claimed(self, claimed: FileLease | ClaimResult) -> None:
        """Continue after the claim of the file that was taken last."""
        if claimed is ClaimResult.TOO_LARGE:
            self._block_too_large(self._reading[0].path_of(self._taken))
            return
        if self._blocked:
            self._blocked.forget(self._reading[0].path_of(self._taken))
        if claimed is ClaimResult.GONE:
            # Another worker reads the same directory.
            self._reading[0].skip_taken()

    def block(self, error: OSError, directory: int) -> None:
        """Let the last file rest if the error concerns it alone.

        Raises:
            OSError: The store failed.
        """
        if not is_about_one_file(error, self._files.tmp, directory, self._files.lease):
            raise error
        self._blocked.add(self._reading[0].path_of(self._taken), error)

    def _block_too_large(self, path: str) -> None:
        try:
            size = os.stat(path, dir_fd=self._files.base, follow_symlinks=False).st_size
        except FileNotFoundError:
            return
        self._blocked.add_too_large(path, size, self._files.max_body or 0)

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for reader in (*self._reading, *self._resting):
            reader.close()
        self._reading, self._resting = [], []


def _age(reader: LoadReader) -> tuple[float, str]:
    return reader.load.manifest.sealed_at, reader.load.name
