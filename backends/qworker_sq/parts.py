"""The parts of a channel: one of the records that were handed out, and ranges of equal length of the log ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from qworker.kit.parts import PAGE_MESSAGES, bad_part
from qworker.kit.segments.format import HEADER_SIZE, position, split
from qworker.kit.segments.log import Log
from qworker.message import State
from qworker_sq.channel import Channel

__all__ = ["HELD", "LogRange", "divide", "make_ranges"]

# The part of the records that were handed out. The ledger contains them.
HELD = "held"
# Bytes below which a range is not cut.
_SMALLEST_RANGE = 1 << 20


class LogRange(msgspec.Struct, frozen=True):
    """The records that begin at or after `begin` and before `end`.

    Attributes:
        read_from: A place before them, or at the first of them, where a record is known to begin.
        begin: The first place of the range.
        end: The place after the range.
    """

    read_from: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.read_from} {self.begin} {self.end}"

    @classmethod
    def parse(cls, text: str) -> LogRange:
        """Return the range of a text that `str` made.

        Raises:
            UsageError: The text is not a range.
        """
        numbers = text.split(" ")
        if len(numbers) != 3 or not all(number.isdecimal() and len(number) < 40 for number in numbers):
            raise bad_part(text)
        return cls(*map(int, numbers))

    def records(self, log: Log, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """Yield the place and payload of each, as `Log.read` returns them, up to the write position `end`."""
        place = self.read_from
        while place < self.end:
            found, place = log.read(place, PAGE_MESSAGES, end)
            if not found:
                return
            yield [one for one in found if self.begin <= one[0] < self.end]


def make_ranges(log: Log, begin: int, end: int, wanted: int) -> list[LogRange]:
    """Divide the log between two positions into about `wanted` ranges. A record must begin at the first position."""
    first, last = split(begin)[0], split(end)[0]
    # (place of the first record, place after the last one) in each segment.
    inside: list[tuple[int, int]] = []
    for segment in log.segments():
        if first <= segment <= last:
            start = max(begin, position(segment, HEADER_SIZE))
            stop = end if segment == last else position(segment, log.size_of(segment))
            inside.append((start, max(start, stop)))
    total = sum(stop - start for start, stop in inside)
    if not total:
        return []
    count = min(max(1, wanted), max(1, total // _SMALLEST_RANGE))
    cuts = [_place_at(inside, total * number // count) for number in range(count)]
    ends = [place for _, place in cuts[1:]] + [end]
    return [LogRange(start, place, stop) for (start, place), stop in zip(cuts, ends, strict=True)]


def _place_at(inside: Sequence[tuple[int, int]], offset: int) -> tuple[int, int]:
    """Return a place where a record begins, before an offset into the joined segments, and the place of the offset."""
    for start, stop in inside:
        if offset < stop - start:
            return start, start + offset
        offset -= stop - start
    return inside[-1]


def divide(channel: Channel, state: State, wanted: int) -> list[str]:
    """Return the parts of a state."""
    if state is not State.READY:
        return [HELD]
    ahead = make_ranges(channel.topic.log, channel.ledger.cursor, channel.end(), wanted)
    return [HELD, *map(str, ahead)]
