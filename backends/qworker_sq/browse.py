"""Reading a channel without leasing: browse and find. The functions that need a section say so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from qworker.kit.browse import Chosen, Place, at_most, browse_rows, first, place_of, position_of
from qworker.kit.parts import bad_part, in_pages
from qworker.kit.segments.format import HEADER_SIZE, position
from qworker.kit.segments.log import Damaged
from qworker.kit.store_errors import store_errors
from qworker.message import Query, State, StoredMessage
from qworker_sq.channel import Channel
from qworker_sq.lease import make_message
from qworker_sq.names import place_of_id
from qworker_sq.parts import HELD, LogRange
from qworker_sq.store import SqStore

__all__ = ["ahead_delayed", "browse", "browse_ready", "find", "locate"]

# Records that are read in one turn of the loop.
_SLICE = 1000

# The time that orders a message in its state, and its place in the log.
_TimedPlace = tuple[float, int]


async def browse(store: SqStore, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a state, page by page. The channel is not held between two pages."""
    now = store.clock.time()
    async with store.channel_section(queue) as channel:
        channel.ledger.make_due(now)
    with store_errors(f"use the queue {queue}"):
        if query.part is not None:
            found = at_most(query.limit, _browse_part(channel, query.state, query.part, now))
        elif query.state is not State.READY:
            found = _browse_timed(store, channel, query, now)
        else:
            found = (_browse_from_the_end if query.newest else browse_ready)(channel, query, now)
        async for page in found:
            yield page


async def find(store: SqStore, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
    """Return messages by their ids."""
    async with store.channel_section(queue) as channel:
        now = store.clock.time()
        channel.ledger.make_due(now)
        places = [locate(channel, one) for one in dict.fromkeys(ids)]
        found = [_read(channel, place, now) for place in places if place is not None]
        return [stored for stored in found if stored is not None]


async def _browse_timed(
    store: SqStore, channel: Channel, query: Query, now: float
) -> AsyncIterator[list[StoredMessage]]:
    async def choose(after: Place | None, limit: int | None) -> list[_TimedPlace]:
        chosen = Chosen(_place, after, limit, newest=query.newest)
        async with store.channel_section(channel.topic.name):
            chosen.add(_timed(channel, query.state, now))
        return chosen.rows()

    def read(row: _TimedPlace) -> StoredMessage | None:
        return _read_in_state(channel, row[1], query.state, now)

    # Extending a lease changes its expiry.
    identity = _log_place if query.state is State.LEASED else None
    async for page in browse_rows(query, choose, _place, read, identity=identity):
        yield page


def _place(row: _TimedPlace) -> Place:
    return row[0], f"{row[1]:030}"


def _log_place(row: _TimedPlace) -> int:
    return row[1]


def _read_in_state(channel: Channel, place: int, state: State, now: float) -> StoredMessage | None:
    """Return the message at a place; None if it is not in a state."""
    stored = _read(channel, place, now)
    return stored if stored is not None and stored.state is state else None


def _read_ready(channel: Channel, place: int, now: float) -> StoredMessage | None:
    stored = _read_in_state(channel, place, State.READY, now)
    return None if stored is None else msgspec.structs.replace(stored, position=position_of((place, "")))


def _log_place_after(query: Query) -> int | None:
    after = place_of(query.after)
    return None if after is None else int(after[0])


async def browse_ready(channel: Channel, query: Query, now: float) -> AsyncIterator[list[StoredMessage]]:
    """Yield the ready messages that came back, then those ahead in the log: all of them in the log's order."""
    after = _log_place_after(query) or 0
    returned = [place for place in channel.ledger.in_state(State.READY) if place > after]
    ahead = _ready_ahead(channel, now, after)
    found = itertools.chain(
        (_read_ready(channel, place, now) for place in returned),
        (
            StoredMessage(
                message=make_message(channel, place, payload), state=State.READY, position=position_of((place, ""))
            )
            for place, payload in ahead
        ),
    )
    async for page in in_pages(first(query.limit, found)):
        yield page


async def _browse_from_the_end(channel: Channel, query: Query, now: float) -> AsyncIterator[list[StoredMessage]]:
    before, left = _log_place_after(query), query.limit

    async def places_from_the_end() -> AsyncIterator[list[int]]:
        async for places in _ready_from_the_end(channel, now, before):
            yield places
        returned = [place for place in channel.ledger.in_state(State.READY) if before is None or place < before]
        yield returned[::-1]

    async for places in places_from_the_end():
        async for page in in_pages(first(left, (_read_ready(channel, place, now) for place in places))):
            yield page
            left = None if left is None else left - len(page)
        if left == 0:
            return


def _browse_part(channel: Channel, state: State, part: str, now: float) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a part."""
    if part == HELD:
        return _browse_handed_out(channel, state, now)
    if state is not State.READY:
        raise bad_part(part)
    return _browse_range(channel, LogRange.parse(part), now)


async def _browse_handed_out(channel: Channel, state: State, now: float) -> AsyncIterator[list[StoredMessage]]:
    """Yield the records that the ledger has in a state, and those ahead of the cursor that wait for a time."""
    channel.ledger.make_due(now)
    if state is State.READY:
        places = list(channel.ledger.in_state(state))
    else:
        places = [place for _, place in _timed(channel, state, now)]
    async for page in in_pages(_read(channel, place, now) for place in places):
        yield [one for one in page if one.state is state]


async def _browse_range(channel: Channel, log_range: LogRange, now: float) -> AsyncIterator[list[StoredMessage]]:
    """Yield the ready messages of a range that are not handed out."""
    waiting = set(ahead_delayed(channel, now))
    # The log ahead as it is now. Records that are handed out in the meantime may or may not be returned.
    cursor, skipped = channel.ledger.cursor, channel.ledger.skipped
    queue_end = channel.end()
    found = (
        StoredMessage(message=make_message(channel, place, payload), state=State.READY)
        for records in log_range.records(channel.topic.log, queue_end)
        for place, payload in records
        if place >= cursor and place not in waiting and place not in skipped and type(payload) is not Damaged
    )
    async for page in in_pages(found):
        yield page


def ahead_delayed(channel: Channel, now: float) -> list[int]:
    """Return the places that are not handed out and wait for a time, the first due first."""
    channel.topic.infos.file.follow()
    ledger, infos, end = channel.ledger, channel.topic.infos, channel.end()
    for place in [place for place, due in infos.due.items() if due <= now or place < ledger.cursor]:
        del infos.due[place]
    found = [
        (due, place)
        for place, due in infos.due.items()
        if place < end and place not in ledger.skipped and _has_info(channel, place)
    ]
    return [place for _, place in sorted(found)]


def _has_info(channel: Channel, place: int) -> bool:
    payload = channel.topic.log.read_one(place, channel.end())
    return payload is not None and channel.topic.infos.get(place, payload) is not None


def _ready_ahead(channel: Channel, now: float, after: int) -> Iterator[tuple[int, bytes]]:
    """Yield the ready records after a place that are not handed out, in order."""
    waiting = set(ahead_delayed(channel, now))
    log, place = channel.topic.log, channel.ledger.cursor
    if after > place and log.read_one(after, channel.end()) is not None:
        # A record is known to begin there.
        place = after
    while place < channel.end():
        found, place = log.read(place, _SLICE, channel.end())
        if not found:
            return
        for at, payload in found:
            skipped = at <= after or at in channel.ledger.skipped or at in waiting
            if not skipped and not isinstance(payload, Damaged):
                yield at, payload


async def _ready_from_the_end(channel: Channel, now: float, before: int | None) -> AsyncIterator[list[int]]:
    """Yield the places of such records before a place, the last one first.

    A log is read forwards, segment by segment.
    """
    waiting = set(ahead_delayed(channel, now))
    log, end = channel.topic.log, channel.end()
    for segment in reversed(log.segments()):
        place = max(channel.ledger.cursor, position(segment, HEADER_SIZE))
        stop = min(end, position(segment + 1, 0), end if before is None else before)
        places: list[int] = []
        while place < stop:
            found, place = log.read(place, _SLICE, end)
            if not found:
                break
            places += [at for at, payload in found if at < stop and not isinstance(payload, Damaged)]
            await asyncio.sleep(0)
        yield [at for at in reversed(places) if at not in channel.ledger.skipped and at not in waiting]


def _timed(channel: Channel, state: State, now: float) -> list[_TimedPlace]:
    """Return the delayed, leased or failed records, in no order."""
    # Read the ids that other processes have given since the last call.
    channel.topic.infos.file.follow()
    if state is State.FAILED:
        return [(failed.at, place) for place, failed in channel.ledger.failed.items()]
    found = [(entry.at, place) for place, entry in channel.ledger.open.items() if entry.state is state]
    if state is State.DELAYED:
        due = channel.topic.infos.due
        found += [(due[place], place) for place in ahead_delayed(channel, now)]
    return found


def locate(channel: Channel, message_id: str) -> int | None:
    """Return the place of a message, in a section; None if it is not stored."""
    channel.topic.infos.file.follow()
    place = channel.topic.infos.by_id.get(message_id)
    if place is None:
        place = place_of_id(message_id)
    if place is None:
        return None
    ledger = channel.ledger
    if place in ledger.open or place in ledger.failed:
        return place
    if place < ledger.cursor or place in ledger.skipped:
        return None
    payload = channel.topic.log.read_one(place, channel.end())
    if payload is None:
        return None
    return place if make_message(channel, place, payload).id == message_id else None


def _read(channel: Channel, place: int, now: float) -> StoredMessage | None:
    """Read the message at a place; return None if it is gone."""
    ledger = channel.ledger
    payload = channel.read_body(place) if place in ledger.open or place in ledger.failed else None
    if payload is None:
        payload = channel.topic.log.read_one(place, channel.end())
    if payload is None:
        return None
    message = make_message(channel, place, payload)
    failed = ledger.failed.get(place)
    if failed is not None:
        return StoredMessage(message=message, state=State.FAILED, finished_at=failed.at, error=failed.error)
    entry = ledger.open.get(place)
    if entry is None:
        info = channel.topic.infos.get(place, payload)
        if info is not None and info.due > now:
            return StoredMessage(message=message, state=State.DELAYED, due_at=info.due)
        return StoredMessage(message=message, state=State.READY)
    return StoredMessage(
        message=message,
        state=entry.state,
        due_at=entry.at if entry.state is State.DELAYED else None,
        expires_at=entry.at if entry.state is State.LEASED else None,
        holder=channel.name if entry.state is State.LEASED else None,
        error=entry.error,
    )
