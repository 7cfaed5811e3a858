"""Segments, bit for bit: the 32-byte header, the records after it, and the search for records after a damaged one.

A position in a log is one integer, `segment id << 32 | offset`, so that comparing and hashing positions costs nothing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

import msgspec

__all__ = [
    "HEADER_SIZE",
    "RECORD_SIZE",
    "Header",
    "Scan",
    "decode_header",
    "encode_header",
    "frame",
    "position",
    "record_at",
    "salvage",
    "scan",
    "segment_name",
    "split",
]

# version, flag, size, 4 bytes of padding, id, next id.
_HEADER = struct.Struct("<IIIxxxxQQ")
HEADER_SIZE = _HEADER.size
# length, crc32 of the payload.
_RECORD = struct.Struct("<II")
RECORD_SIZE = _RECORD.size
_OFFSET_BITS = 32
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


class Header(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The first 32 bytes of a segment."""

    id: int
    version: int = 0
    flag: int = 0
    # The end offset of the data; 0 while the segment is the newest.
    size: int = 0
    # The id of the next segment; 0 while this is the newest.
    next_id: int = 0


class Scan(NamedTuple):
    """The contents of a stretch of a segment.

    Attributes:
        records: The place and the payload of each record, in order.
        stop: Where the scan ended, in the stretch.
        short: True if the limit was not reached, and there is no intact, complete record at `stop`.
    """

    records: list[tuple[int, bytes]]
    stop: int
    short: bool


def encode_header(header: Header) -> bytes:
    """Return the 32 bytes of a header."""
    return _HEADER.pack(header.version, header.flag, header.size, header.id, header.next_id)


def decode_header(data: bytes) -> Header | None:
    """Return the header in the first bytes of a segment, or None if there are too few bytes."""
    if len(data) < HEADER_SIZE:
        return None
    version, flag, size, own_id, next_id = _HEADER.unpack_from(data)
    return Header(id=own_id, version=version, flag=flag, size=size, next_id=next_id)


def segment_name(segment: int) -> str:
    """Return the file name of a segment."""
    return f"{segment}.q"


def position(segment: int, offset: int) -> int:
    """Return the integer for a place in the log."""
    return segment << _OFFSET_BITS | offset


def split(place: int) -> tuple[int, int]:
    """Return the segment id and the offset of a position."""
    return place >> _OFFSET_BITS, place & _OFFSET_MASK


def frame(payload: bytes) -> bytes:
    """Return the length and the crc that come before a payload."""
    return _RECORD.pack(len(payload), crc32(payload))


def record_at(data: bytes, offset: int) -> bytes | None:
    """Return the payload of the record at `offset`, or None if there is no intact, complete record."""
    if offset + RECORD_SIZE > len(data):
        return None
    length, crc = _RECORD.unpack_from(data, offset)
    stop = offset + RECORD_SIZE + length
    if length == 0 or stop > len(data):
        return None
    payload = data[offset + RECORD_SIZE : stop]
    return payload if crc32(payload) == crc else None


def scan(data: bytes, limit: int, at: int = 0, base: int = 0) -> Scan:
    """Read up to `limit` records of a stretch, from `at` on, where one begins. `base` is added to the places."""
    records: list[tuple[int, bytes]] = []
    end, unpack = len(data), _RECORD.unpack_from
    while len(records) < limit:
        begin = at + RECORD_SIZE
        if begin > end:
            return Scan(records, at, short=at < end)
        length, crc = unpack(data, at)
        stop = begin + length
        if length == 0 or stop > end:
            return Scan(records, at, short=True)
        payload = data[begin:stop]
        if crc32(payload) != crc:
            return Scan(records, at, short=True)
        records.append((base + at, payload))
        at = stop
    return Scan(records, at, short=False)


def salvage(data: bytes) -> int | None:
    """Find the next intact record after the damaged record at the start of `data`.

    `data` reaches to the end of what was written; zeros may follow. A payload can itself contain bytes that look like a
    record, so the first match is not trusted. The assumptions are tried in this order: one bit of the length is wrong
    (the payload's crc proves it); the length is right; and only then a search for places from which complete records
    follow one another to the end.

    Returns:
        An offset. It is `len(data)` or more if nothing follows the damage, and None if nothing intact can be found.
    """
    end = len(data.rstrip(b"\0"))
    if len(data) >= RECORD_SIZE:
        length: int
        length, crc = _RECORD.unpack_from(data)
        proved = _length_with_one_bit_wrong(data, length, crc)
        if proved is not None:
            return RECORD_SIZE + proved
        stop = RECORD_SIZE + length
        if length > 0 and (end <= stop <= len(data) or record_at(data, stop) is not None):
            return stop if stop < end else max(stop, len(data))
    return _search(data, end)


def _length_with_one_bit_wrong(data: bytes, length: int, crc: int) -> int | None:
    for bit in range(32):
        guess = length ^ (1 << bit)
        if 0 < guess <= len(data) - RECORD_SIZE and crc32(data[RECORD_SIZE : RECORD_SIZE + guess]) == crc:
            return guess
    return None


def _search(data: bytes, end: int) -> int | None:
    """Return the first place from which intact records reach the end, or else the first intact record."""
    dead: set[int] = set()
    first: int | None = None
    # No segment has a record with 16 MiB of payload and more after it, so the length's highest byte is 0. A byte search
    # in C then skips nearly every place.
    top = data.find(b"\0", 4)
    while top != -1 and top - 3 < end:
        at = top - 3
        if at not in dead and record_at(data, at) is not None:
            if _reaches_end(data, at, end, dead):
                return at
            first = at if first is None else first
        top = data.find(b"\0", top + 1)
    return first


def _reaches_end(data: bytes, at: int, end: int, dead: set[int]) -> bool:
    walked: list[int] = []
    while at < end:
        payload = None if at in dead else record_at(data, at)
        if payload is None:
            dead.update(walked)
            return False
        walked.append(at)
        at += RECORD_SIZE + len(payload)
    return True
