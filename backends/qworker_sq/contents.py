"""What people do with a channel: count, look, remove, requeue. Each function runs in a section of the channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from qworker.kit.segments.format import HEADER_SIZE, position
from qworker.kit.segments.log import Damaged
from qworker.message import Selection, State, StoredMessage
from qworker_sq.channel import Channel
from qworker_sq.consume import make_message
from qworker_sq.ledger import Row
from qworker_sq.topic import place_of_id

__all__ = [
    "Ahead",
    "ahead_delayed",
    "locate",
    "ready_ahead",
    "ready_from_the_end",
    "remove",
    "remove_state",
    "requeue",
    "stored",
    "timed",
]

# Records that are walked in one loop turn.
_SLICE = 1000


class Ahead:
    """How many records stand before a channel, counted once: each is walked when it comes, and when it goes."""

    def __init__(self) -> None:
        self._from = self._to = 0
        self._count = 0

    async def count(self, channel: Channel) -> int:
        """Records from the cursor to the write position, whatever is to become of them."""
        cursor, end = channel.ledger.cursor, channel.end()
        if not self._from <= cursor <= self._to:
            self._from, self._to, self._count = cursor, cursor, 0
        self._count -= (await self._walk(channel, self._from, cursor))[0]
        self._from = cursor
        more, self._to = await self._walk(channel, self._to, end)
        self._count += more
        return self._count

    async def _walk(self, channel: Channel, place: int, end: int) -> tuple[int, int]:
        count = 0
        while place < end:
            found, place = channel.topic.log.read(place, _SLICE, end)
            if not found:
                break
            count += len(found)
            await asyncio.sleep(0)
        return count, place


def ahead_delayed(channel: Channel, now: float) -> list[int]:
    """Places that are not handed out and wait for a time, the first due first."""
    channel.topic.notes.file.follow()
    ledger, notes, end = channel.ledger, channel.topic.notes, channel.end()
    for place in [place for place, due in notes.due.items() if due <= now or place < ledger.cursor]:
        del notes.due[place]
    found = [
        (due, place)
        for place, due in notes.due.items()
        if place < end and place not in ledger.skipped and _fits(channel, place)
    ]
    return [place for _, place in sorted(found)]


def _fits(channel: Channel, place: int) -> bool:
    payload = channel.topic.log.read_one(place, channel.end())
    return payload is not None and channel.topic.notes.get(place, payload) is not None


def ready_ahead(channel: Channel, now: float, after: int = 0) -> Iterator[tuple[int, bytes]]:
    """The ready records that are not handed out and stand behind a place, in order. The channel need not be held."""
    waiting = set(ahead_delayed(channel, now))
    log, place = channel.topic.log, channel.ledger.cursor
    if after > place and log.read_one(after, channel.end()) is not None:
        # A record certainly begins there.
        place = after
    while place < channel.end():
        found, place = log.read(place, _SLICE, channel.end())
        if not found:
            return
        for at, payload in found:
            skipped = at <= after or at in channel.ledger.skipped or at in waiting
            if not skipped and not isinstance(payload, Damaged):
                yield at, payload


async def ready_from_the_end(channel: Channel, now: float, before: int | None) -> AsyncIterator[list[int]]:
    """The places of the same records, the last first, and only of those before a place: a log is read forwards, segment by segment."""
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


def timed(channel: Channel, state: State, now: float) -> list[tuple[float, int]]:
    """What is delayed, leased or failed: the time that orders it, and the place."""
    # The ids that others have given since the last look are there.
    channel.topic.notes.file.follow()
    if state is State.FAILED:
        return [(failed.at, place) for place, failed in channel.ledger.failed.items()]
    found = [(entry.at, place) for place, entry in channel.ledger.open.items() if entry.state is state]
    if state is State.DELAYED:
        due = channel.topic.notes.due
        found += [(due[place], place) for place in ahead_delayed(channel, now)]
    return found


def locate(channel: Channel, message_id: str) -> int | None:
    """The place of a message that is stored, in whatever state; None when it is finished or never was."""
    channel.topic.notes.file.follow()
    place = channel.topic.notes.by_id.get(message_id)
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


def stored(channel: Channel, place: int, now: float) -> StoredMessage | None:
    """A look at the message at a place."""
    ledger = channel.ledger
    payload = channel.body(place) if place in ledger.open or place in ledger.failed else None
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
        note = channel.topic.notes.get(place, payload)
        if note is not None and note.due > now:
            return StoredMessage(message=message, state=State.DELAYED, due_at=note.due)
        return StoredMessage(message=message, state=State.READY)
    return StoredMessage(
        message=message,
        state=entry.state,
        due_at=entry.at if entry.state is State.DELAYED else None,
        expires_at=entry.at if entry.state is State.LEASED else None,
        holder=channel.name if entry.state is State.LEASED else None,
        error=entry.error,
    )


def remove(channel: Channel, selection: Selection) -> int:
    """Delete, for this channel, messages that are selected by their ids or must be unchanged."""
    return _remove_places(channel, _places(channel, selection))


def _places(channel: Channel, selection: Selection) -> list[int]:
    """Where the selected messages are."""
    places = [place for place in (locate(channel, one) for one in selection.ids or ()) if place is not None]
    failed = channel.ledger.failed
    for one in selection.unchanged or ():
        place = locate(channel, one.id) if one.state is State.FAILED else None
        if place is not None and place in failed and one.has_finished_at(failed[place].at):
            places.append(place)
    # Each once.
    return list(dict.fromkeys(places))


def _remove_places(channel: Channel, places: list[int]) -> int:
    """Delete, for this channel, what is at some places."""
    ledger = channel.ledger
    bodies = [place for place in places if place in ledger.failed or (place in ledger.open and ledger.open[place].kept)]
    if places:
        channel.append([[Row.REMOVE, places]])
        channel.drop_bodies(bodies)
    return len(places)


def requeue(channel: Channel, selection: Selection) -> int:
    """Make failed messages ready."""
    failed = channel.ledger.failed
    chosen = failed if selection.state is not None else _places(channel, selection)
    places = sorted(place for place in chosen if place in failed)
    if places:
        channel.append([[Row.REQUEUE, places]])
    return len(places)


def remove_state(channel: Channel, state: State, now: float, ahead: int) -> int:
    """Delete what is in a state, for this channel; the caller has counted the ready messages ahead of the cursor."""
    ledger = channel.ledger
    if state is State.FAILED:
        return _remove_places(channel, list(ledger.failed))
    waiting = ahead_delayed(channel, now)
    if state is State.DELAYED:
        return _remove_places(channel, [*ledger.in_state(state), *waiting])
    count = _remove_places(channel, list(ledger.in_state(state)))
    if state is not State.READY:
        return count
    rows: list[list[Any]] = []
    if waiting:
        notes = channel.topic.notes.by_place
        rows.append([Row.ASIDE, 0, [[place, notes[place].due, notes[place].tries] for place in waiting]])
    channel.append([*rows, [Row.SKIP, channel.end()]])
    return count + ahead
