"""A topic's segments: appending, rolling over, reading from a position, recovery by walking, and deletion of what is read.

One `Log` belongs to one backend instance. What it may change, and when, is said by each method: the topic's lock stands for
"one writer at a time". Readers need no lock: they stop at the write position of the state file, which moves only
after the records before it are synced.
"""

from __future__ import annotations

import os

import msgspec

from qworker.clock import Clock
from qworker.kit.files import open_regular, write_all
from qworker.kit.segments.format import (
    HEADER_SIZE,
    RECORD_SIZE,
    Header,
    decode_header,
    encode_header,
    frame,
    position,
    record_at,
    salvage,
    scan,
    segment_name,
    split,
)
from qworker.kit.segments.state import StateFile

__all__ = ["DEFAULT_SEGMENT", "Damaged", "Log"]

DEFAULT_SEGMENT = 16 * 1024 * 1024
# Bytes read at once.
_CHUNK = 1 << 17
# Buffers of one pwritev; the kernel takes 1024.
_VECTOR = 1000


class Damaged(bytes):
    """What stands in the log in the place of a record: not what was written."""


class _Open(msgspec.Struct, eq=False):
    fd: int
    header: Header


class Log:
    """The segments of a topic.

    Args:
        folder: the topic's directory.
        state: its state file.
        clock: gives new segments their ids.
        segment_size: bytes of new segments; None: as many as the newest has.
        durable: new segments are on the disk before anything points to them.
        read_only: nothing is written, so that the right to read will do.
    """

    def __init__(
        self,
        folder: int,
        state: StateFile,
        clock: Clock,
        segment_size: int | None,
        *,
        durable: bool = True,
        read_only: bool = False,
    ) -> None:
        self._folder = folder
        self._state = state
        self._clock = clock
        self._wanted_size = segment_size
        self._durable = durable
        self._flags = os.O_RDONLY if read_only else os.O_RDWR
        self._open: dict[int, _Open] = {}
        # (segment, offset, bytes): the stretch that was read last. What readers may see never changes.
        self._cached: tuple[int, int, bytes] = (0, 0, b"")
        # Files with appended records that no commit has covered, by segment.
        self.unsynced: set[int] = set()

    def close(self) -> None:
        """Let go of the descriptors."""
        for held in self._open.values():
            os.close(held.fd)
        self._open.clear()

    # -- segments ----------------------------------------------------------------------------------------------------

    @staticmethod
    def listed(folder: int) -> list[int]:
        """The ids of the segments in a directory, oldest first."""
        names = (name.removesuffix(".q") for name in os.listdir(folder) if name.endswith(".q"))
        return sorted(int(name) for name in names if name.isascii() and name.isdigit() and int(name) < 1 << 64)

    def segments(self) -> list[int]:
        """The ids of this topic's segments, oldest first."""
        return self.listed(self._folder)

    def descriptor(self, segment: int) -> int:
        """An open descriptor of a segment, closed with the log."""
        return self._segment(segment).fd

    def _segment(self, segment: int) -> _Open:
        held = self._open.get(segment)
        if held is None:
            fd = open_regular(segment_name(segment), self._folder, self._flags)
            held = self._open[segment] = _Open(fd, Header(id=segment))
            self._load(held)
        return held

    def _load(self, held: _Open) -> Header:
        # The name of the file counts: a header may be damaged.
        found = decode_header(os.pread(held.fd, HEADER_SIZE, 0)) or held.header
        held.header = msgspec.structs.replace(found, id=held.header.id)
        return held.header

    def _forget(self, segment: int) -> None:
        held = self._open.pop(segment, None)
        if held is not None:
            os.close(held.fd)

    def _create(self, after: int, size: int) -> int:
        segment = max(int(self._clock.time() * 1e9), after + 1)
        self._open[segment] = _Open(
            _new_segment(self._folder, segment, size, durable=self._durable), Header(id=segment)
        )
        return segment

    @staticmethod
    def make_first(folder: int, clock: Clock, size: int | None, *, durable: bool = True) -> int:
        """Make the first segment of a new topic, and say where its first record will stand. Under the topic's lock."""
        segment = int(clock.time() * 1e9)
        os.close(_new_segment(folder, segment, size or DEFAULT_SEGMENT, durable=durable))
        return position(segment, HEADER_SIZE)

    def size_of(self, segment: int) -> int:
        """The bytes of a segment's file."""
        return os.fstat(self._segment(segment).fd).st_size

    # -- writing -----------------------------------------------------------------------------------------------------

    def room(self, at: int) -> int:
        """The bytes of the largest payload that a new segment holds, made when the newest is the one at `at`."""
        return (self._wanted_size or self.size_of(split(at)[0])) - HEADER_SIZE - RECORD_SIZE

    def plan(self, lengths: list[int], at: int) -> tuple[list[int], int]:
        """Where records will stand that are written from the position `at` on; under the topic's lock.

        New segments are created when they are needed. An empty one that a crash leaves behind is found by the next recovery.

        Returns:
            The position of each record, and the position behind the last.

        Raises:
            OSError: call `undo`.
        """
        segment, offset = split(at)
        size = self.size_of(segment)
        new_size = self._wanted_size or size
        places: list[int] = []
        for length in lengths:
            need = RECORD_SIZE + length
            if offset + need > size:
                segment, size, offset = self._create(segment, new_size), new_size, HEADER_SIZE
            places.append(position(segment, offset))
            offset += need
        return places, position(segment, offset)

    def write(self, payloads: list[bytes], places: list[int], at: int) -> None:
        """Write planned records; under the topic's lock.

        Nobody sees them before the write position in the state file moves behind them.

        Raises:
            OSError: call `undo`.
        """
        segment, stop = split(at)
        begin = stop
        buffers: list[bytes] = []
        for payload, place in zip(payloads, places, strict=True):
            other, offset = split(place)
            if other != segment:
                self._write(segment, buffers, begin)
                self._link(segment, stop, other)
                segment, begin, buffers = other, offset, []
            buffers += (frame(payload), payload)
            stop = offset + RECORD_SIZE + len(payload)
        self._write(segment, buffers, begin)

    def _write(self, segment: int, buffers: list[bytes], offset: int) -> None:
        fd = self._segment(segment).fd
        self.unsynced.add(segment)
        for index in range(0, len(buffers), _VECTOR):
            part = buffers[index : index + _VECTOR]
            whole = sum(map(len, part))
            written = os.pwritev(fd, part, offset)
            if written < whole:
                # The rest as one piece: a short write is rare, and ends in the error that explains it.
                write_all(fd, b"".join(part)[written:], offset + written)
            offset += whole

    def _link(self, segment: int, end: int, new: int) -> None:
        held = self._segment(segment)
        self.unsynced.add(segment)
        held.header = msgspec.structs.replace(self._load(held), size=end, next_id=new)
        write_all(held.fd, encode_header(held.header), 0)

    def undo(self, at: int) -> None:
        """Take back an append that failed, whole: nothing of it appears, whoever walks the log. Under the topic's lock."""
        segment, offset = split(at)
        held = self._segment(segment)
        size = os.fstat(held.fd).st_size
        os.ftruncate(held.fd, offset)
        os.ftruncate(held.fd, size)
        for stray in self.segments():
            if stray > segment:
                self._forget(stray)
                os.unlink(segment_name(stray), dir_fd=self._folder)
        if self._load(held).next_id:
            held.header = Header(id=segment, version=held.header.version, flag=held.header.flag)
            write_all(held.fd, encode_header(held.header), 0)
        self._cached = (0, 0, b"")
        self.unsynced.clear()

    def abandon(self, at: int) -> int:
        """Go on in a new segment, because a sync of the one at `at` failed; under the topic's lock.

        The failed file is not synced again: a later success would not mean that the lost pages were written. Should the link
        in its header be lost with the power, the order of the files' names says the same.
        """
        self.undo(at)
        segment, offset = split(at)
        size = self.size_of(segment)
        new = self._create(segment, self._wanted_size or size)
        self._link(segment, offset, new)
        self.unsynced.clear()
        return position(new, HEADER_SIZE)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, place: int, limit: int, end: int) -> tuple[list[tuple[int, bytes]], int]:
        """Up to `limit` records from `place` on, but none at or behind the write position `end`.

        A damaged record is given as `Damaged`, once, and reading goes on behind it.

        Returns:
            The place and payload of each, and the position behind the last.
        """
        found: list[tuple[int, bytes]] = []
        while place < end and len(found) < limit:
            segment, offset = split(place)
            bound = self._bound(segment, end)
            if offset < bound:
                some, stop = self._read_some(segment, offset, bound, segment == end >> 32, limit - len(found))
                found += some
                place = position(segment, stop)
                if some:
                    continue
            following = self._next(segment)
            if following is None or following > end >> 32:
                break
            place = position(following, HEADER_SIZE)
        return found, place

    def _bound(self, segment: int, end: int) -> int:
        """Where readers of a segment stop at the latest; 0 when the segment is gone.

        An old segment is bound by its file, not by the size in its header: zeros end it, and a damaged header hides nothing.
        """
        last, last_offset = split(end)
        try:
            size = os.fstat(self._segment(segment).fd).st_size
        except FileNotFoundError:
            return 0
        return min(last_offset, size) if segment == last else size

    def _next(self, segment: int) -> int | None:
        """The segment after one: by its link, or by name where the link is lost or the segment is gone."""
        held = self._open.get(segment)
        linked = self._load(held).next_id if held is not None else 0
        later = [other for other in self.segments() if other > segment]
        return linked if linked in later else next(iter(later), None)

    def _read_some(
        self, segment: int, offset: int, bound: int, newest: bool, limit: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """What one stretch holds, and the offset behind it."""
        data, at = self._stretch(segment, offset, bound)
        # A place is the segment's, plus where the stretch begins in it.
        base = position(segment, offset - at)
        result = scan(data, limit, at, base)
        if not result.records:
            data, at, base = os.pread(self._segment(segment).fd, bound - offset, offset), 0, position(segment, offset)
            result = scan(data, limit, 0, base)
        if result.records:
            return result.records, offset - at + result.stop
        if not data or not (newest or data.strip(b"\0")):
            return [], bound
        step = min(salvage(data) or len(data), len(data))
        return [(base, Damaged(data[:step]))], offset + step

    def _stretch(self, segment: int, offset: int, bound: int) -> tuple[bytes, int]:
        """Bytes that hold the record at an offset, or its beginning, and where in them it begins."""
        cached, begin, data = self._cached
        if cached != segment or not begin <= offset < begin + len(data) or begin + len(data) > bound:
            begin = offset
            data = os.pread(self._segment(segment).fd, min(_CHUNK, bound - offset), offset)
            self._cached = (segment, begin, data)
        return data, offset - begin

    def read_one(self, place: int, end: int) -> bytes | None:
        """The payload of the record at a position; None when no intact one stands there."""
        segment, offset = split(place)
        if place >= end or offset < HEADER_SIZE:
            return None
        try:
            fd = self._segment(segment).fd
        except FileNotFoundError:
            return None
        head = os.pread(fd, RECORD_SIZE, offset)
        length = int.from_bytes(head[:4], "little")
        if offset + RECORD_SIZE + length > self._bound(segment, end):
            return None
        return record_at(os.pread(fd, RECORD_SIZE + length, offset), 0)

    # -- recovery ----------------------------------------------------------------------------------------------------

    def looks_written(self, end: int) -> bool:
        """Whether something stands at the write position: a writer died, or is of the kind that does not move it."""
        segment, offset = split(end)
        try:
            fd = self._segment(segment).fd
        except FileNotFoundError:
            return True
        return any(os.pread(fd, RECORD_SIZE, offset)) or bool(self._load(self._segment(segment)).next_id)

    def recover(self, recorded: int, *, whole: bool) -> int:
        """Find the write position again: follow the links from the recorded one, and walk. Under the topic's lock.

        A torn record at the end is cleared; a damaged one with intact ones behind it stays, for readers to set aside.

        Args:
            recorded: the write position in the state file.
            whole: walk the recorded segment from its start; False: from the recorded offset.
        """
        segment, offset = split(recorded)
        existing = self.segments()
        if not existing:
            return self.make_first(self._folder, self._clock, self._wanted_size)
        if segment not in existing:
            # What is recorded is gone: everything that is left may hold unread records.
            segment, offset = existing[0], 0
        begin = HEADER_SIZE if whole else max(HEADER_SIZE, offset)
        while True:
            end = self._scan_records(segment, begin)
            following = self._next(segment)
            if following is None:
                break
            if not self._segment(segment).header.next_id:
                self._link(segment, end, following)
            segment, offset, begin = following, 0, HEADER_SIZE
        return position(segment, self._settle_tail(segment, end, offset))

    def _scan_records(self, segment: int, begin: int) -> int:
        """Where the records of a segment end."""
        held = self._segment(segment)
        self._load(held)
        data = os.pread(held.fd, os.fstat(held.fd).st_size, 0)
        at = begin
        while at < len(data):
            result = scan(data, len(data), at)
            at = result.stop
            rest = data[at:]
            if not result.short or not rest.strip(b"\0"):
                break
            step = salvage(rest)
            if step is None or step >= len(rest):
                break
            at += step
        return max(min(at, len(data)), HEADER_SIZE)

    def _settle_tail(self, segment: int, end: int, recorded: int) -> int:
        fd = self._segment(segment).fd
        size = os.fstat(fd).st_size
        tail = os.pread(fd, max(0, size - end), end)
        if not tail.strip(b"\0"):
            return end
        if recorded > end:
            # It was acknowledged, and is damaged: readers set it aside, and nothing overwrites it.
            return min(recorded, size)
        os.ftruncate(fd, end)
        os.ftruncate(fd, size)
        os.fsync(fd)
        return end

    # -- deletion ----------------------------------------------------------------------------------------------------

    def trim(self, oldest: int) -> int:
        """Delete the segments before `oldest`; under the topic's lock. Returns how many there were."""
        gone = [segment for segment in self.segments() if segment < oldest]
        for segment in gone:
            self._forget(segment)
            os.unlink(segment_name(segment), dir_fd=self._folder)
        return len(gone)

    def refresh(self) -> None:
        """Close the descriptors of segments that another process has deleted."""
        existing = set(self.segments())
        for segment in [segment for segment in self._open if segment not in existing]:
            self._forget(segment)


def _new_segment(folder: int, segment: int, size: int, *, durable: bool) -> int:
    """A descriptor of a new segment."""
    name = segment_name(segment)
    fd = open_regular(name, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, size)
        write_all(fd, encode_header(Header(id=segment)), 0)
        if durable:
            os.fsync(fd)
            os.fsync(folder)
    except OSError:
        os.close(fd)
        os.unlink(name, dir_fd=folder)
        raise
    return fd
