"""The history in a directory: `.history/` next to the queues, with one log for each process. Each log is an sq topic.

Any process can read all of it at any time. `sq:///root/.history` opens it too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from typing import Any

import structlog

from qworker import log_events as events
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.batch import EventBatch, encode_batch
from qworker.history.event import Event
from qworker.history.log_reader import LogReader
from qworker.history.log_writer import LogLocked, Writer, start_log
from qworker.history.retention import prune
from qworker.history.store import HistoryOptions, HistoryStore
from qworker.kit.opening import open_directory, open_entry
from qworker.kit.store_errors import FULL, store_error
from qworker.url import BackendURL

__all__ = ["DirectoryHistory", "directory_history"]

FOLDER = ".history"
# Seconds between two removals of old events, and seconds after which a failed store is tried again.
_PRUNING = 60.0
_PAUSE = 30.0
# The largest number of records that wait for a lock. More are dropped.
_MOST_WAITING = 1000


def directory_history(
    url: BackendURL, directory: str | os.PathLike[str], *, default: bool, clock: Clock = SYSTEM_CLOCK
) -> DirectoryHistory:
    """Make the history of a directory backend, with the options of its URL (`HISTORY_OPTIONS`).

    Args:
        url: The URL of the backend.
        directory: The root of its queues.
        default: Whether events are recorded if the URL has no option `history`. False if other programs use the
            directory.
        clock: The clock of the backend.

    Raises:
        InvalidURL: An option is not valid.
    """
    return DirectoryHistory(os.fspath(directory), HistoryOptions.from_url(url, default=default), clock=clock)


class DirectoryHistory(HistoryStore):
    """A history of logs in a directory.

    Args:
        directory: The root of the queues. The history is in its subdirectory `.history/`.
        options: How long events are kept.
        clock: The clock of the backend.
        shared: Whether the directory's group can read it.
    """

    def __init__(
        self, directory: str, options: HistoryOptions, *, clock: Clock = SYSTEM_CLOCK, shared: bool = False
    ) -> None:
        self._path = os.path.join(directory, FOLDER)
        self.enabled = options.enabled
        self._options = options
        self._clock = clock
        self._shared = shared
        self._reader = LogReader(self._path, clock)
        self._root = -1
        self._writer: Writer | None = None
        # Logs that could not be written, except for a full disk.
        self._broken: set[str] = set()
        self._waiting: list[bytes] = []
        # Monotonic seconds: nothing is written before this time. 0: the store works.
        self._paused_until = 0.0
        self._pruned_at = float("-inf")
        self._pruning: asyncio.Task[None] | None = None
        self._log: Any = structlog.get_logger("qworker.history")

    def describe_retention(self) -> str:
        """Return the age and the size that are kept."""
        return self._options.describe_retention()

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, batches: Sequence[EventBatch]) -> None:
        """Append to the log of this process."""
        now = self._clock.monotonic()
        if not self.enabled or now < self._paused_until:
            return
        self._waiting += map(encode_batch, batches)
        try:
            self._write()
            self._prune(now)
        except OSError as error:
            self._waiting.clear()
            self._pause(error, now)
        else:
            self._resume()

    def _write(self) -> None:
        if not self._waiting:
            return
        if self._writer is None or not self._writer.alive:
            self._begin()
        assert self._writer is not None
        try:
            self._writer.append(self._waiting)
        except LogLocked:
            del self._waiting[:-_MOST_WAITING]
        else:
            self._waiting.clear()

    def _begin(self) -> None:
        self._close()
        mode = 0o2770 if self._shared else 0o700
        try:
            os.mkdir(self._path, mode)
            os.chmod(self._path, mode)
        except FileExistsError:
            pass
        self._root = open_entry(self._path, os.O_RDONLY | os.O_DIRECTORY)
        self._writer = start_log(self._root, self._clock, shared=self._shared, avoid=self._broken)

    def _pause(self, error: OSError, now: float) -> None:
        if not self._paused_until:
            self._log.warning(
                events.HISTORY_PAUSED,
                directory=self._path,
                **{events.ERROR_TYPE: type(error).__name__, events.ERROR: str(store_error(error, "write to it"))},
            )
        self._paused_until = now + _PAUSE
        if self._writer is not None and error.errno not in FULL:
            self._broken.add(self._writer.name)
        self._close()

    def _resume(self) -> None:
        if self._paused_until:
            self._paused_until = 0.0
            self._log.warning(events.HISTORY_RESUMED, directory=self._path)

    def _prune(self, now: float) -> None:
        if now - self._pruned_at < _PRUNING or self._root < 0 or self._pruning is not None:
            return
        self._pruned_at = now
        self._pruning = asyncio.get_running_loop().create_task(self._prune_all(), name="qworker-history-retention")

    async def _prune_all(self) -> None:
        try:
            root = open_directory(self._path)
            try:
                await prune(root, self._options.age, self._options.size, self._clock.time())
            finally:
                os.close(root)
        except OSError as error:
            reason = str(store_error(error, "remove old events"))
            self._log.warning(events.HISTORY_PRUNE_FAILED, directory=self._path, **{events.ERROR: reason})
        finally:
            self._pruning = None

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    async def aclose(self) -> None:
        """Write the waiting records, and release the log."""
        for _ in range(100):
            if not self._waiting:
                break
            self.append([])
            await asyncio.sleep(0.01)
        self._waiting.clear()
        if self._pruning is not None:
            self._pruning.cancel()
            await asyncio.wait([self._pruning])
        self._close()

    # -- reading -----------------------------------------------------------------------------------------------------

    async def logs(self) -> list[str]:
        """Return the names of the logs: one for each writing process."""
        return await self._reader.logs()

    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Read records of a log, whichever process writes it."""
        return await self._reader.read(log, after, limit)

    async def read_batches(self, log: str, after: str | None, limit: int) -> tuple[list[EventBatch], str | None]:
        """Read records of a log as they are stored."""
        return await self._reader.read_batches(log, after, limit)

    async def read_back(
        self, log: str, before: str | None, limit: int, needles: Collection[bytes] = ()
    ) -> tuple[list[EventBatch], str | None]:
        """Read a log backwards, without decoding records that do not contain the needles."""
        return await self._reader.read_back(log, before, limit, needles)

    async def last_position(self, log: str) -> str | None:
        """Read the log's write position, and no records."""
        return await self._reader.last_position(log)

    async def last_written(self, log: str) -> float | None:
        """Return when a writer has last moved the log's write position."""
        return await self._reader.last_written(log)

    async def for_message(self, queue: str, message_id: str) -> list[Event]:
        """Search the logs, without decoding records that do not contain the id."""
        return await self._reader.for_message(queue, message_id)

    async def delete_before(self, log: str, position: str) -> None:
        """Remove the segments before the position.

        If the log's process is dead and all of it lies before, remove the log.
        """
        await self._reader.delete_before(log, position)
