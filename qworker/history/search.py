"""Search a history backwards: the newest events of all logs that pass a filter, page by page, in a limited time."""

from __future__ import annotations

import base64
import math
import zlib
from collections import deque

import msgspec

from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import UsageError
from qworker.history.event import Event
from qworker.history.query import EventFilter
from qworker.history.store import HistoryStore

__all__ = ["FoundEvents", "search_back"]

# Records of one log that are read at once.
_RECORDS = 64
# Bytes of a decoded cursor.
_MOST_CURSOR = 1 << 20


class FoundEvents(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a search.

    Attributes:
        events: The events, the newest first.
        searched_to: Unix seconds to which all logs were searched. None: nothing is left to search, or a log was not
            searched yet.
        cursor: Where the next page begins. None: nothing is left to search.
    """

    events: list[Event]
    searched_to: float | None = None
    cursor: str | None = None


async def search_back(
    history: HistoryStore,
    wanted: EventFilter,
    *,
    limit: int,
    cursor: str | None = None,
    seconds: float,
    clock: Clock = SYSTEM_CLOCK,
) -> FoundEvents:
    """Return the newest events that pass a filter, or the next ones.

    Workers record most events of a message when it has finished. The order is that of the records. So an `enqueued`
    event can be on an earlier page than younger events of other messages.

    Args:
        history: The history.
        wanted: The filter.
        limit: The largest number of events.
        cursor: Where an earlier search with the same filter has ended. None: start with the newest event.
        seconds: The time after which the search ends, even if it has found less.
        clock: The clock.

    Raises:
        UsageError: The cursor is not valid.
        BackendError: The history cannot be read.
    """
    deadline = clock.monotonic() + seconds
    tails = await _open_tails(history, wanted, cursor)
    found: list[Event] = []
    reads = 0
    while tails and len(found) < limit:
        # Every log was read back to this moment. What is newer is complete.
        newest = max(tails, key=lambda tail: tail.reached)
        head = max(tails, key=lambda tail: tail.head)
        if head.has_more and head.head >= newest.reached:
            found.append(head.pop())
        elif newest.is_read or (reads and clock.monotonic() >= deadline):
            break
        else:
            await newest.read(history, wanted)
            reads += 1
    places = {tail.log: place for tail in tails if (place := tail.place()) is not None}
    reached = max((tail.reached for tail in tails if not tail.is_read), default=math.inf)
    return FoundEvents(
        events=sorted(found, key=lambda event: -event.at),
        searched_to=reached if math.isfinite(reached) else None,
        cursor=_encode(places) if places else None,
    )


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where the search of one log continues.

    Attributes:
        before: The position before which it reads.
        taken: How many events before the position were returned.
        reached: Unix seconds to which it has read. None: it has not begun.
    """

    before: str
    taken: int = 0
    reached: float | None = None


class _Chunk(msgspec.Struct):
    """The events that were read at once, each with the time of its record."""

    place: _Place
    events: deque[tuple[float, Event]]


class _Tail:
    """One log that is read backwards.

    Attributes:
        log: Its name.
        reached: Unix seconds of the oldest record that was read. Minus infinity: all were.
    """

    def __init__(self, log: str, place: _Place) -> None:
        self.log = log
        self.reached = math.inf if place.reached is None else place.reached
        self._next: _Place | None = place
        self._chunks: deque[_Chunk] = deque()

    @property
    def is_read(self) -> bool:
        """Whether all records were read."""
        return self._next is None

    @property
    def has_more(self) -> bool:
        """Whether an event was read and not returned."""
        return bool(self._chunks)

    @property
    def head(self) -> float:
        """The time of the record of the next event. Minus infinity: there is none."""
        return self._chunks[0].events[0][0] if self._chunks else -math.inf

    def pop(self) -> Event:
        """Return the next event."""
        chunk = self._chunks[0]
        _, event = chunk.events.popleft()
        chunk.place = msgspec.structs.replace(chunk.place, taken=chunk.place.taken + 1)
        if not chunk.events:
            self._chunks.popleft()
        return event

    def place(self) -> _Place | None:
        """Return where the search continues. None: nothing is left."""
        return self._chunks[0].place if self._chunks else self._next

    async def read(self, history: HistoryStore, wanted: EventFilter) -> None:
        """Read some records before those that were read."""
        place = self._next
        assert place is not None
        batches, following = await history.read_back(self.log, place.before, _RECORDS, wanted.needles())
        events: deque[tuple[float, Event]] = deque()
        for batch in batches:
            self.reached = min(self.reached, batch.last_at)
            events.extend((self.reached, event) for event in reversed(batch.events()) if wanted.has(event))
        for _ in range(min(place.taken, len(events))):
            events.popleft()
        if events:
            self._chunks.append(_Chunk(place, events))
        is_too_old = wanted.since is not None and self.reached < wanted.since
        self._next = None if following is None or is_too_old else _Place(following, 0, self.reached)
        if self._next is None:
            self.reached = -math.inf


async def _open_tails(history: HistoryStore, wanted: EventFilter, cursor: str | None) -> list[_Tail]:
    if cursor is not None:
        return [_Tail(log, place) for log, place in _decode(cursor).items()]
    tails: list[_Tail] = []
    for log in await (history.logs() if wanted.queue is None else history.logs_of([wanted.queue])):
        position = await history.last_position(log)
        if position is not None:
            tails.append(_Tail(log, _Place(position, 0, await history.last_written(log))))
    return tails


_places = msgspec.json.Decoder(dict[str, _Place]).decode


def _encode(places: dict[str, _Place]) -> str:
    return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(places))).decode().rstrip("=")


def _decode(cursor: str) -> dict[str, _Place]:
    try:
        packed = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return _places(zlib.decompressobj().decompress(packed, _MOST_CURSOR))
    except (ValueError, zlib.error, msgspec.DecodeError) as error:
        raise UsageError("the cursor is not one of this search: start the search again") from error
