"""Following a topic by its positions, as the channel that the URL names. Spark's streams use it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from qworker.clock import SYSTEM_CLOCK
from qworker.kit.directory.opener import Opener
from qworker.kit.parts import PAGE_MESSAGES, in_pages
from qworker.kit.segments.format import HEADER_SIZE, position
from qworker.kit.segments.log import Damaged
from qworker.message import State, StoredMessage
from qworker.names import check_existing_queue
from qworker.url import BackendURL
from qworker_sq.channel import Channel
from qworker_sq.lease import make_message, move_damaged_to_failed
from qworker_sq.ledger import RowKind
from qworker_sq.names import place_of_id, position_id
from qworker_sq.options import SqOptions
from qworker_sq.parts import LogRange, make_ranges
from qworker_sq.store import SqStore

__all__ = ["SqFollower"]


class SqFollower:
    """The log of one queue, read in order, as a `qworker.backend.offers.Follower`.

    Positions have the form of message ids: `SEGMENT-OFFSET`. The log stays as long as the channel is before it.
    """

    def __init__(self, url: BackendURL, queue: str) -> None:
        options = SqOptions.from_url(url)
        self._stores = Opener(url.directory, lambda: SqStore(url.directory, options, SYSTEM_CLOCK))
        self._queue = queue

    async def open(self) -> None:
        """Open the topic and the channel, which are created if they do not exist."""
        await self._stores.open().get_or_create(check_existing_queue(self._queue))

    async def aclose(self) -> None:
        """Close the topic."""
        await self._stores.aclose()

    async def _channel(self) -> Channel:
        async with self._stores.open().channel_section(self._queue) as channel:
            return channel

    async def begin(self, where: str) -> str:
        """Return the channel's position, the oldest record that is kept, or the end of the log."""
        channel = await self._channel()
        if where == "latest":
            return position_id(channel.end())
        if where == "earliest":
            return position_id(position(channel.topic.log.segments()[0], HEADER_SIZE))
        return position_id(channel.ledger.position())

    async def end(self) -> str:
        """Return the write position."""
        return position_id((await self._channel()).end())

    async def kept(self, start: str) -> str:
        """Return a position, or that of the oldest record if records after it are gone."""
        channel = await self._channel()
        place, oldest = _place(start), position(channel.topic.log.segments()[0], HEADER_SIZE)
        # What the channel has not passed is kept, also if it stands at the end of a segment that is gone.
        return start if place >= min(oldest, channel.ledger.position()) else position_id(oldest)

    async def ahead(self, start: str, limit: int, end: str) -> str:
        """Return the position after the next `limit` records."""
        channel = await self._channel()
        place, stop = _place(start), _place(end)
        while place < stop and limit > 0:
            found, place = channel.topic.log.read(place, min(limit, PAGE_MESSAGES), channel.end())
            if not found:
                return end
            limit -= len(found)
        return position_id(min(place, stop))

    async def divide(self, start: str, end: str, wanted: int) -> list[str]:
        """Divide the log into ranges."""
        channel = await self._channel()
        return [str(one) for one in make_ranges(channel.topic.log, _place(start), _place(end), wanted)]

    async def read(self, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Yield the records of a range, whatever their state in the channel.

        Damaged ones are left out: see `commit`.
        """
        channel = await self._channel()
        found = (
            self._read_one(channel, place, payload)
            for records in LogRange.parse(part).records(channel.topic.log, channel.end())
            for place, payload in records
            if type(payload) is not Damaged
        )
        async for page in in_pages(found):
            yield page

    def _read_one(self, channel: Channel, place: int, payload: bytes) -> StoredMessage:
        info = channel.topic.infos.get(place, payload)
        due = 0.0 if info is None else info.due
        return StoredMessage(message=make_message(channel, place, payload, info), state=State.READY, due_at=due or None)

    async def commit(self, end: str) -> None:
        """Move the channel: records before the position are finished. A damaged record is kept as a failed message."""
        place = _place(end)
        async with self._stores.open().channel_section(self._queue) as channel:
            if place <= channel.ledger.cursor:
                return
            self._keep_damage(channel, place)
            channel.append([[RowKind.SKIP, min(place, channel.end())]])
        await channel.commit()

    def _keep_damage(self, channel: Channel, until: int) -> None:
        now = channel.topic.clock.time()
        place = channel.ledger.cursor
        while place < until:
            found, place = channel.topic.log.read(place, PAGE_MESSAGES, channel.end())
            if not found:
                return
            for at, payload in found:
                if at < until and type(payload) is Damaged:
                    move_damaged_to_failed(channel, at, payload, now)


def _place(text: str) -> int:
    place = place_of_id(text)
    if place is None:
        raise ValueError(f"not a position of a log: {text!r}")
    return place
