"""A topic's segments: appending, starting new ones, reading from a position, recovery, and deletion of read ones.

One `Log` belongs to one backend instance. Each method says what it may change, and when. The topic's lock means that
there is one writer at a time. Readers need no lock: they stop at the write position of the state file, which moves only
after the records before it are synced.
"""

from __future__ import annotations

import os

import msgspec

from qworker.clock import Clock
from qworker.kit.files import write_all
from qworker.kit.opening import open_own, open_regular
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
# Buffers of one pwritev; the limit of the kernel is 1024.
_VECTOR = 1000


class Damaged(bytes):
    """The bytes in the log in the place of a record that are not what was written."""


class _Open(msgspec.Struct, eq=False):
    fd: int
    header: Header


class Log:
    """The segments of a topic.

    Args:
        folder: The topic's directory.
        state: Its state file.
        clock: Gives new segments their ids.
        segment_size: Bytes of new segments. None: the size of the newest segment.
        durable: True if new segments are on the disk before anything points to them.
        read_only: True if nothing is written, so that the right to read is enough.
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
        self._read_only = read_only
        self._open: dict[int, _Open] = {}
        # (segment, offset, bytes): the stretch that was read last. Bytes that readers may see never change.
        self._cached: tuple[int, int, bytes] = (0, 0, b"")
        # Files with appended records that no commit has covered, by segment.
        self.unsynced: set[int] = set()

    def close(self) -> None:
        """Close the descriptors."""
        for held in self._open.values():
            os.close(held.fd)
        self._open.clear()

    # -- segments ----------------------------------------------------------------------------------------------------

    @staticmethod
    def listed(folder: int) -> list[int]:
        """Return the ids of the segments in a directory, oldest first."""
        names = (name.removesuffix(".q") for name in os.listdir(folder) if name.endswith(".q"))
        return sorted(int(name) for name in names if name.isascii() and name.isdigit() and int(name) < 1 << 64)

    def segments(self) -> list[int]:
        """Return the ids of this topic's segments, oldest first."""
        return self.listed(self._folder)

    def descriptor(self, segment: int) -> int:
        """Return an open descriptor of a segment. It is closed with the log."""
        return self._segment(segment).fd

    def _segment(self, segment: int) -> _Open:
        held = self._open.get(segment)
        if held is None:
            name = segment_name(segment)
            # A segment is written in place, so it must not be another file that was given its name.
            if self._read_only:
                fd = open_regular(name, self._folder, os.O_RDONLY)
            else:
                fd = open_own(name, self._folder, os.O_RDWR)
            held = self._open[segment] = _Open(fd, Header(id=segment))
            self._load(held)
        return held

    def _load(self, held: _Open) -> Header:
        # The name of the file counts, because a header may be damaged.
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
        """Create the first segment of a new topic, under the topic's lock. Return the position of its first record."""
        segment = int(clock.time() * 1e9)
        os.close(_new_segment(folder, segment, size or DEFAULT_SEGMENT, durable=durable))
        return position(segment, HEADER_SIZE)

    def size_of(self, segment: int) -> int:
        """Return the size of a segment's file in bytes."""
        return os.fstat(self._segment(segment).fd).st_size

    # -- writing -----------------------------------------------------------------------------------------------------

    def room(self, at: int) -> int:
        """Return the bytes of the largest payload that a new segment can hold.

        Args:
            at: A position in the newest segment.
        """
        return (self._wanted_size or self.size_of(split(at)[0])) - HEADER_SIZE - RECORD_SIZE

    def plan(self, lengths: list[int], at: int) -> tuple[list[int], int]:
        """Plan where records will be written from the position `at` on, under the topic's lock.

        New segments are created when they are needed. If a crash leaves an empty one, the next recovery finds it.

        Returns:
            The position of each record, and the position after the last one.

        Raises:
            OSError: Call `undo`.
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
        """Write planned records, under the topic's lock.

        No reader sees them before the write position in the state file moves past them.

        Raises:
            OSError: Call `undo`.
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
                # The rest is written as one piece: a short write is rare, and ends in the error that explains it.
                write_all(fd, b"".join(part)[written:], offset + written)
            offset += whole

    def _link(self, segment: int, end: int, new: int) -> None:
        held = self._segment(segment)
        self.unsynced.add(segment)
        held.header = msgspec.structs.replace(self._load(held), size=end, next_id=new)
        write_all(held.fd, encode_header(held.header), 0)

    def undo(self, at: int) -> None:
        """Undo a failed append completely, under the topic's lock. No process that walks the log finds any of it."""
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
        """Continue in a new segment, because a sync of the one at `at` failed. Under the topic's lock.

        The failed file is not synced again: a later success would not mean that the lost pages were written. If a power
        failure loses the link in its header, the order of the files' names still shows the next segment.
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
        """Read up to `limit` records from `place` on, but none at or after the write position `end`.

        A damaged record is returned as `Damaged`, once, and reading continues after it.

        Returns:
            The place and payload of each record, and the position after the last one.
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
        """Return the offset at which readers of a segment stop at the latest, or 0 if the segment is gone.

        An old segment ends with its file, not at the size in its header: zeros end it, and a damaged header hides
        nothing.
        """
        last, last_offset = split(end)
        try:
            size = os.fstat(self._segment(segment).fd).st_size
        except FileNotFoundError:
            return 0
        return min(last_offset, size) if segment == last else size

    def _next(self, segment: int) -> int | None:
        """Return the next segment: by the link, or by name if the link is lost or the segment is gone."""
        held = self._open.get(segment)
        linked = self._load(held).next_id if held is not None else 0
        later = [other for other in self.segments() if other > segment]
        return linked if linked in later else next(iter(later), None)

    def _read_some(
        self, segment: int, offset: int, bound: int, newest: bool, limit: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Return the records of one stretch, and the offset after it."""
        data, at = self._stretch(segment, offset, bound)
        # A place is a position in the segment: add the offset at which the stretch begins.
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
        """Return bytes that hold the record at an offset, or its beginning, and the index at which it begins."""
        cached, begin, data = self._cached
        if cached != segment or not begin <= offset < begin + len(data) or begin + len(data) > bound:
            begin = offset
            data = os.pread(self._segment(segment).fd, min(_CHUNK, bound - offset), offset)
            self._cached = (segment, begin, data)
        return data, offset - begin

    def read_one(self, place: int, end: int) -> bytes | None:
        """Return the payload of the record at a position, or None if there is no intact one."""
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
        """Return whether something is written at the write position.

        In that case a writer died, or is of the kind that does not move the write position.
        """
        segment, offset = split(end)
        try:
            fd = self._segment(segment).fd
        except FileNotFoundError:
            return True
        return any(os.pread(fd, RECORD_SIZE, offset)) or bool(self._load(self._segment(segment)).next_id)

    def recover(self, recorded: int, *, whole: bool) -> int:
        """Find the write position again, under the topic's lock: follow the links from the recorded one, and walk.

        A torn record at the end is cleared. A damaged record with intact ones after it stays, and readers move it to
        failed.

        Args:
            recorded: The write position in the state file.
            whole: Whether to walk the recorded segment from its start. False: from the recorded offset.
        """
        segment, offset = split(recorded)
        existing = self.segments()
        if not existing:
            return self.make_first(self._folder, self._clock, self._wanted_size)
        if segment not in existing:
            # The recorded segment is gone: all the other segments may hold unread records.
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
        """Return where the records of a segment end."""
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
            # It was acknowledged, and is damaged: readers move it to failed, and nothing overwrites it.
            return min(recorded, size)
        os.ftruncate(fd, end)
        os.ftruncate(fd, size)
        os.fsync(fd)
        return end

    # -- deletion ----------------------------------------------------------------------------------------------------

    def trim(self, oldest: int) -> int:
        """Delete the segments before `oldest`, under the topic's lock. Return their number."""
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
    """Create a segment and return a descriptor of it."""
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
