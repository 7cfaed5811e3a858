"""The state file, bit for bit: 129 entries of 56 bytes; the first is the write position, the others are channels."""

from __future__ import annotations

import os
import struct

import msgspec

from qworker.errors import NotSupported
from qworker.kit.segments.format import position, split

__all__ = [
    "CHANNELS",
    "ENTRY_SIZE",
    "NAME_BYTES",
    "STATE_SIZE",
    "ChannelEntry",
    "StateFile",
    "decode_state",
    "encode_state",
]

# The flag, the length of the name, the name, 3 bytes of padding, the offset, and the segment id.
_ENTRY = struct.Struct("<QB32s3xIQ")
_PLACE = struct.Struct("<IQ")
_PLACE_AT = 44
ENTRY_SIZE = _ENTRY.size
CHANNELS = 128
NAME_BYTES = 32
STATE_SIZE = ENTRY_SIZE * (CHANNELS + 1)


class ChannelEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One entry: the write position (without a name) or a channel."""

    name: bytes
    place: int
    flag: int = 0


def encode_state(write: int, channels: list[ChannelEntry]) -> bytes:
    """Return a complete state file."""
    rows = [_encode(ChannelEntry(name=b"", place=write)), *(_encode(entry) for entry in channels)]
    return b"".join(rows).ljust(STATE_SIZE, b"\0")


def _encode(entry: ChannelEntry) -> bytes:
    segment, offset = split(entry.place)
    return _ENTRY.pack(entry.flag, len(entry.name), entry.name, offset, segment)


def _decode(data: bytes, index: int) -> ChannelEntry:
    flag, length, name, offset, segment = _ENTRY.unpack_from(data, index * ENTRY_SIZE)
    return ChannelEntry(name=name[: min(length, NAME_BYTES)], place=position(segment, offset), flag=flag)


def decode_state(data: bytes) -> tuple[int, dict[int, ChannelEntry]]:
    """Return the write position, and the channels by their index (1 to 128).

    A file that was cut short has fewer channels. Free entries are left out.
    """
    data = data[:STATE_SIZE]
    entries = {index: _decode(data, index) for index in range(len(data) // ENTRY_SIZE)}
    write = entries.pop(0, ChannelEntry(name=b"", place=0))
    return write.place, {index: entry for index, entry in entries.items() if entry.name}


class StateFile:
    """An open state file. Entry 0 changes under the topic's lock, a channel's place under the channel's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self) -> tuple[int, dict[int, ChannelEntry]]:
        """Read the file: see `decode_state`."""
        return decode_state(os.pread(self.fd, STATE_SIZE, 0))

    def place(self, index: int) -> int:
        """Return the position in one entry."""
        data = os.pread(self.fd, _PLACE.size, index * ENTRY_SIZE + _PLACE_AT)
        if len(data) < _PLACE.size:
            return 0
        offset, segment = _PLACE.unpack(data)
        return position(segment, offset)

    def move(self, index: int, place: int) -> None:
        """Write the position of one entry."""
        segment, offset = split(place)
        os.pwrite(self.fd, _PLACE.pack(offset, segment), index * ENTRY_SIZE + _PLACE_AT)

    def find(self, name: bytes) -> int | None:
        """Return the index of a channel."""
        return next((index for index, entry in self.read()[1].items() if entry.name == name), None)

    def add(self, name: bytes, place: int) -> int:
        """Take a free entry for a channel.

        Raises:
            NotSupported: 128 channels exist.
        """
        taken = self.read()[1]
        index = next((index for index in range(1, CHANNELS + 1) if index not in taken), None)
        if index is None:
            raise NotSupported(f"a topic can have at most {CHANNELS} channels: delete one first")
        os.pwrite(self.fd, _encode(ChannelEntry(name=name, place=place)), index * ENTRY_SIZE)
        return index

    def free(self, index: int) -> None:
        """Remove a channel."""
        os.pwrite(self.fd, bytes(ENTRY_SIZE), index * ENTRY_SIZE)
