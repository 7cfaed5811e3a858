"""A channel read in parts: what it has handed out is one, and what lies ahead in the log is cut into stretches of equal length."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from qworker.kit.parts import PAGE_MESSAGES, bad_part, pages
from qworker.kit.segments.format import HEADER_SIZE, position, split
from qworker.kit.segments.log import Damaged, Log
from qworker.message import State, StoredMessage
from qworker_sq import browse as contents
from qworker_sq.channel import Channel
from qworker_sq.lease import make_message

__all__ = ["HELD", "Stretch", "divide", "read", "stretches"]

# What was handed out: the ledger has it.
HELD = "held"
# Bytes below which a stretch is not cut.
_LEAST = 1 << 20


class Stretch(msgspec.Struct, frozen=True):
    """The records that begin at or behind `begin` and before `end`."""

    # A place before them, or at the first of them, where a record certainly begins.
    walk_from: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.walk_from} {self.begin} {self.end}"

    @classmethod
    def parse(cls, text: str) -> Stretch:
        """The stretch that `str` named.

        Raises:
            UsageError: it is not one of them.
        """
        numbers = text.split(" ")
        if len(numbers) != 3 or not all(number.isdecimal() and len(number) < 40 for number in numbers):
            raise bad_part(text)
        return cls(*map(int, numbers))

    def records(self, log: Log, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """The place and payload of each, as `Log.read` gives them, up to the write position `end`."""
        place = self.walk_from
        while place < self.end:
            found, place = log.read(place, PAGE_MESSAGES, end)
            if not found:
                return
            yield [one for one in found if self.begin <= one[0] < self.end]


def stretches(log: Log, begin: int, end: int, wanted: int) -> list[Stretch]:
    """Cut what lies between two positions, at the first of which a record begins, into about `wanted` stretches."""
    first, last = split(begin)[0], split(end)[0]
    # (place of the first record, place behind the last) in each segment.
    inside: list[tuple[int, int]] = []
    for segment in log.segments():
        if first <= segment <= last:
            start = max(begin, position(segment, HEADER_SIZE))
            stop = end if segment == last else position(segment, log.size_of(segment))
            inside.append((start, max(start, stop)))
    whole = sum(stop - start for start, stop in inside)
    if not whole:
        return []
    count = min(max(1, wanted), max(1, whole // _LEAST))
    cuts = [_place_at(inside, whole * number // count) for number in range(count)]
    ends = [place for _, place in cuts[1:]] + [end]
    return [Stretch(start, place, stop) for (start, place), stop in zip(cuts, ends, strict=True)]


def _place_at(inside: Sequence[tuple[int, int]], offset: int) -> tuple[int, int]:
    """Where in the segments' joined bytes an offset is: a record's certain beginning before it, and the place."""
    for start, stop in inside:
        if offset < stop - start:
            return start, start + offset
        offset -= stop - start
    return inside[-1]


def divide(channel: Channel, state: State, wanted: int) -> list[str]:
    """The parts of a state."""
    if state is not State.READY:
        return [HELD]
    ahead = stretches(channel.topic.log, channel.ledger.cursor, channel.end(), wanted)
    return [HELD, *map(str, ahead)]


def read(channel: Channel, state: State, part: str, now: float) -> AsyncIterator[list[StoredMessage]]:
    """What is in a part."""
    if part == HELD:
        return held(channel, state, now)
    if state is not State.READY:
        raise bad_part(part)
    return ready_in(channel, Stretch.parse(part), now)


async def held(channel: Channel, state: State, now: float) -> AsyncIterator[list[StoredMessage]]:
    """What the ledger has in a state, and what waits for its time ahead of it."""
    channel.ledger.make_due(now)
    if state is State.READY:
        places = list(channel.ledger.in_state(state))
    else:
        places = [place for _, place in contents.timed(channel, state, now)]
    async for page in pages(contents.stored(channel, place, now) for place in places):
        yield [one for one in page if one.state is state]


async def ready_in(channel: Channel, stretch: Stretch, now: float) -> AsyncIterator[list[StoredMessage]]:
    """The ready messages of a stretch that are not handed out."""
    waiting = set(contents.ahead_delayed(channel, now))
    # The log ahead as it is now: what is handed out meanwhile may be given or not.
    cursor, skipped = channel.ledger.cursor, channel.ledger.skipped
    queue_end = channel.end()
    found = (
        StoredMessage(message=make_message(channel, place, payload), state=State.READY)
        for records in stretch.records(channel.topic.log, queue_end)
        for place, payload in records
        if place >= cursor and place not in waiting and place not in skipped and type(payload) is not Damaged
    )
    async for page in pages(found):
        yield page
