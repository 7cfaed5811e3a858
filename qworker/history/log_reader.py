"""Read the logs in a directory, whichever process writes them."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Collection, Generator
from contextlib import contextmanager

import msgspec

from qworker.clock import Clock
from qworker.history.batch import EventBatch, decode_batch, decode_with
from qworker.history.event import Event
from qworker.history.log_writer import is_dead
from qworker.history.retention import remove_log
from qworker.history.store import parse_position, sort_by_time
from qworker.kit.files import try_unlink
from qworker.kit.opening import open_directory, open_regular
from qworker.kit.segments.format import HEADER_SIZE, position, segment_name, split
from qworker.kit.segments.log import Log
from qworker.kit.segments.state import StateFile
from qworker.kit.store_errors import store_errors
from qworker.names import check_existing_queue

__all__ = ["LogReader"]

# Records that are read at once, before other tasks of the loop run.
_RECORDS = 8
# Bytes of records that one read backwards keeps.
_MOST_BYTES = 1 << 18
# Seconds by which the time of a file can be behind the clock: the kernel rounds it down to its tick.
_CLOCK_STEP_S = 0.1


class LogReader:
    """A reader of logs. It keeps nothing open between two calls.

    Args:
        path: The directory of the logs. It may not exist.
        clock: The clock of the backend.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock

    async def logs(self) -> list[str]:
        """Return the names of the logs, sorted."""
        with store_errors(f"list {self._path}"):
            try:
                names = os.listdir(self._path)
            except FileNotFoundError:
                return []
            return sorted(name for name in names if name[0] != "." and os.path.isfile(f"{self._path}/{name}/state"))

    @contextmanager
    def _opened(self, name: str) -> Generator[tuple[int, Log, StateFile] | None]:
        """Open a log for reading; None if it is gone."""
        check_existing_queue(name)
        descriptors: list[int] = []
        log: Log | None = None
        try:
            with store_errors(f"read the history in {self._path}"):
                try:
                    descriptors.append(open_directory(self._path))
                    descriptors.append(open_directory(name, descriptors[0]))
                    descriptors.append(open_regular("state", descriptors[1], os.O_RDONLY))
                except (FileNotFoundError, NotADirectoryError):
                    yield None
                    return
                state = StateFile(descriptors[2])
                log = Log(descriptors[1], state, self._clock, None, read_only=True)
                yield descriptors[1], log, state
        finally:
            if log is not None:
                log.close()
            for fd in descriptors:
                os.close(fd)

    async def read(self, name: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Read events of a log, as `HistoryStore.read` does."""
        place, skip = _parsed(after)
        found: list[Event] = []
        with self._opened(name) as opened:
            while opened is not None and len(found) < limit:
                _, log, state = opened
                records, following = log.read(place, _RECORDS, state.place(0))
                if not records:
                    break
                for own, payload in records:
                    told = _events(payload)
                    # Retention may have removed the record of `after`.
                    first = skip if own == place else 0
                    some = told[first : first + limit - len(found)]
                    found += some
                    if first + len(some) < len(told):
                        return found, _position(own, first + len(some))
                place, skip = following, 0
                after = _position(following, 0)
                await asyncio.sleep(0)
        return found, after

    async def read_batches(self, name: str, after: str | None, limit: int) -> tuple[list[EventBatch], str | None]:
        """Read batches of a log, as `HistoryStore.read_batches` does."""
        place, _ = _parsed(after)
        found: list[EventBatch] = []
        with self._opened(name) as opened:
            while opened is not None and len(found) < limit:
                _, log, state = opened
                records, place = log.read(place, min(_RECORDS, limit - len(found)), state.place(0))
                if not records:
                    break
                found += [batch for _, payload in records if (batch := decode_batch(payload)) is not None]
                after = _position(place, 0)
                await asyncio.sleep(0)
        return found, after

    async def read_back(
        self, name: str, before: str | None, limit: int, needles: Collection[bytes]
    ) -> tuple[list[EventBatch], str | None]:
        """Read a log backwards, as `HistoryStore.read_back` does.

        A record does not say where the one before it begins. So a segment is read from its start.
        """
        with self._opened(name) as opened:
            if opened is None:
                return [], None
            _, log, state = opened
            end = state.place(0) if before is None else _parsed(before)[0]
            for segment in reversed(log.segments()):
                records = await _last_records(log, segment, end, limit)
                if records:
                    payloads = [payload for _, payload in reversed(records)]
                    return decode_with(payloads, needles), _position(records[0][0], 0)
        return [], None

    async def last_position(self, name: str) -> str | None:
        """Return the position of the next record, without reading any; None if the log is empty or gone."""
        with self._opened(name) as opened:
            place = 0 if opened is None else opened[2].place(0)
            return _position(place, 0) if place else None

    async def last_written(self, name: str) -> float | None:
        """Return when a writer has last moved the write position."""
        with self._opened(name) as opened:
            return None if opened is None else os.fstat(opened[2].fd).st_mtime + _CLOCK_STEP_S

    async def for_message(self, queue: str, message_id: str) -> list[Event]:
        """Return all events of a message, by time. Records without its id are not decoded."""
        needle = msgspec.json.encode(message_id)
        found: list[Event] = []
        for name in await self.logs():
            place = 0
            with self._opened(name) as opened:
                while opened is not None:
                    _, log, state = opened
                    records, place = log.read(place, _RECORDS, state.place(0))
                    if not records:
                        break
                    for _, payload in records:
                        if needle in payload:
                            found += [one for one in _events(payload) if one.id == message_id and one.queue == queue]
                    await asyncio.sleep(0)
        return sort_by_time(found)

    async def delete_before(self, name: str, until: str) -> None:
        """Remove the segments before a position.

        If the log's process is dead and all of it lies before, remove the log.
        """
        place = _parsed(until)[0]
        with self._opened(name) as opened:
            if opened is None:
                return
            folder, log, state = opened
            end = state.place(0)
            if place >= end and is_dead(folder):
                root = open_directory(self._path)
                try:
                    remove_log(root, name)
                finally:
                    os.close(root)
                return
            for segment in log.segments():
                if segment < min(split(place)[0], split(end)[0]):
                    try_unlink(segment_name(segment), folder)


async def _last_records(log: Log, segment: int, end: int, limit: int) -> deque[tuple[int, bytes]]:
    """Return the last records of a segment before a place."""
    found: deque[tuple[int, bytes]] = deque()
    size = 0
    place, end = position(segment, HEADER_SIZE), min(end, position(segment + 1, 0))
    while place < end:
        records, place = log.read(place, _RECORDS, end)
        if not records:
            break
        found += records
        size += sum(len(payload) for _, payload in records)
        while len(found) > limit or (size > _MOST_BYTES and len(found) > 1):
            size -= len(found.popleft()[1])
        await asyncio.sleep(0)
    return found


def _events(payload: bytes) -> list[Event]:
    batch = decode_batch(payload)
    return [] if batch is None else batch.events()


def _position(place: int, given: int) -> str:
    segment, offset = split(place)
    return f"{segment:020d}-{offset:010d}-{given:06d}"


def _parsed(text: str | None) -> tuple[int, int]:
    """Return the place of a record, and how many of its events were returned.

    Raises:
        UsageError: It is not a position.
    """
    if text is None:
        return 0, 0
    segment, offset, given = parse_position(text, 3)
    return position(segment, offset), given
