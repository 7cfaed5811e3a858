"""Following a topic by its positions: what Spark's streams do with the channel that the URL names."""

from __future__ import annotations

from collections.abc import AsyncIterator

from qworker.kit.parts import PAGE_MESSAGES, pages
from qworker.kit.segments.format import HEADER_SIZE, position
from qworker.kit.segments.log import Damaged
from qworker.message import State, StoredMessage
from qworker.url import BackendURL
from qworker_sq.backend import SqBackend
from qworker_sq.channel import Channel
from qworker_sq.lease import make_message, set_damage_aside
from qworker_sq.ledger import Row
from qworker_sq.parts import Stretch, stretches
from qworker_sq.topic import place_of_id, position_id

__all__ = ["SqFollower"]


class SqFollower:
    """One queue's log, read in order; see `qworker.backend.offers.Follower`.

    Positions are written as message ids are: `SEGMENT-OFFSET`. The log stays as long as the channel stands before it.
    """

    def __init__(self, url: BackendURL, queue: str) -> None:
        self._backend = SqBackend.from_url(url)
        self._queue = queue

    async def open(self) -> None:
        """Open the topic, and make it and the channel where they are absent."""
        await self._backend.create(self._queue)

    async def aclose(self) -> None:
        """Close the topic."""
        await self._backend.aclose()

    async def _channel(self) -> Channel:
        async with self._backend.channel(self._queue) as channel:
            return channel

    async def begin(self, where: str) -> str:
        """Where the channel stands, the oldest record that is kept, or the end of the log."""
        channel = await self._channel()
        if where == "latest":
            return position_id(channel.end())
        if where == "earliest":
            return position_id(position(channel.topic.log.segments()[0], HEADER_SIZE))
        return position_id(channel.ledger.position())

    async def end(self) -> str:
        """The write position."""
        return position_id((await self._channel()).end())

    async def ahead(self, start: str, limit: int, end: str) -> str:
        """The position behind the next `limit` records."""
        channel = await self._channel()
        place, stop = _place(start), _place(end)
        while place < stop and limit > 0:
            found, place = channel.topic.log.read(place, min(limit, PAGE_MESSAGES), channel.end())
            if not found:
                return end
            limit -= len(found)
        return position_id(min(place, stop))

    async def divide(self, start: str, end: str, wanted: int) -> list[str]:
        """Stretches of the log."""
        channel = await self._channel()
        return [str(one) for one in stretches(channel.topic.log, _place(start), _place(end), wanted)]

    async def read(self, part: str) -> AsyncIterator[list[StoredMessage]]:
        """The records of a stretch, whatever has become of them for the channel; a damaged one goes to its failed messages."""
        channel = await self._channel()
        found = (
            self._look(channel, place, payload)
            for records in Stretch.parse(part).records(channel.topic.log, channel.end())
            for place, payload in records
            if type(payload) is not Damaged
        )
        async for page in pages(found):
            yield page

    def _look(self, channel: Channel, place: int, payload: bytes) -> StoredMessage:
        note = channel.topic.notes.get(place, payload)
        due = 0.0 if note is None else note.due
        return StoredMessage(message=make_message(channel, place, payload, note), state=State.READY, due_at=due or None)

    async def commit(self, end: str) -> None:
        """Move the channel: what lies before it is finished, and what is damaged there is kept with its failed messages."""
        place = _place(end)
        async with self._backend.channel(self._queue) as channel:
            if place <= channel.ledger.cursor:
                return
            self._keep_damage(channel, place)
            channel.append([[Row.SKIP, min(place, channel.end())]])
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
                    set_damage_aside(channel, at, payload, now)


def _place(text: str) -> int:
    place = place_of_id(text)
    if place is None:
        raise ValueError(f"not a position of a log: {text!r}")
    return place
