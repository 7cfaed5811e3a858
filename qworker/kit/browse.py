"""The parts of `browse` that backends share: the order of a state, positions, parts and limits."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

import msgspec

from qworker.errors import UsageError
from qworker.kit.parts import in_pages
from qworker.message import Query, StoredMessage
from qworker.names import printable

__all__ = [
    "Chosen",
    "Place",
    "at_most",
    "bad_position",
    "browse_rows",
    "browse_share",
    "first",
    "place_of",
    "position_of",
]

Row = TypeVar("Row")

# The sort key of a message in a state: a number (a time or a rank), then a text that separates equal numbers.
Place = tuple[float, str]

_POSITION = re.compile(r"(-?[0-9]{1,40}(?:\.[0-9]{1,20})?(?:e[-+][0-9]{1,3})?):([A-Za-z0-9_.~%+-]{0,800})")
# Texts that `quote` does not change.
_PLAIN = re.compile(r"[A-Za-z0-9_.~-]*")
# At least this many rows are held beyond a limit before they are cut, so that cutting is rare.
_SPARE = 4000
# Passes over a state whose messages change their places in the meantime.
PASSES = 4


async def at_most(limit: int | None, found: AsyncIterator[list[StoredMessage]]) -> AsyncIterator[list[StoredMessage]]:
    """Yield pages up to a limit of messages."""
    async for page in found:
        yield page if limit is None else page[:limit]
        limit = None if limit is None else limit - len(page)
        if limit is not None and limit <= 0:
            return


# -- positions ---------------------------------------------------------------------------------------------------------


def position_of(place: Place) -> str:
    """Return a place as plain text."""
    number, text = place
    if _PLAIN.fullmatch(text) is None:
        text = quote(text, safe="", errors="surrogateescape")
    return f"{number!r}:{text}"


def place_of(position: str | None) -> Place | None:
    """Return the place that `position_of` made into a text, or None for None.

    Raises:
        UsageError: The text is not a position.
    """
    if position is None:
        return None
    found = _POSITION.fullmatch(position)
    number = 0.0 if found is None else int(found[1]) if found[1].isdigit() else float(found[1])
    if found is None or not math.isfinite(number):
        raise bad_position(position)
    return number, unquote(found[2], errors="surrogateescape")


def bad_position(position: str) -> UsageError:
    """Return the error for an `after` that is not the position of a message."""
    shown = printable(position[:60])
    return UsageError(f"{shown!r} is not a valid position: use the `position` of a message of the same queue and state")


# -- choosing ----------------------------------------------------------------------------------------------------------


class Chosen(Generic[Row]):
    """The rows that a query wants. It holds a bounded number of rows, however many are added.

    Args:
        place: Returns the place of a row. No two rows have the same place.
        after: The place after which the query begins. None: the beginning of the order.
        limit: The largest number of rows. None: all of them.
        newest: True if the order is reversed.
    """

    def __init__(self, place: Callable[[Row], Place], after: Place | None, limit: int | None, *, newest: bool) -> None:
        self._place = place
        self._after = after
        self._limit = limit
        self._newest = newest
        self._rows: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        """Add the rows that the query wants, in any order."""
        place, after = self._place, self._after
        if after is None:
            self._rows.extend(rows)
        elif self._newest:
            self._rows.extend([row for row in rows if place(row) < after])
        else:
            self._rows.extend([row for row in rows if place(row) > after])
        if self._limit is not None and len(self._rows) > self._limit + max(self._limit, _SPARE):
            self._rows = self.rows()

    def rows(self) -> list[Row]:
        """Return the chosen rows, in the order of the query."""
        limit = len(self._rows) if self._limit is None else self._limit
        # A heap is faster if only a small share is wanted.
        if limit < len(self._rows) // 10:
            choose = heapq.nlargest if self._newest else heapq.nsmallest
            return choose(limit, self._rows, key=self._place)
        return sorted(self._rows, key=self._place, reverse=self._newest)[:limit]


# Returns rows in the order of a query: those after a place, up to a number of them.
_Choose = Callable[[Place | None, int | None], Awaitable[Sequence[Row]]]


async def browse_rows(
    query: Query,
    choose: _Choose[Row],
    place: Callable[[Row], Place],
    read: Callable[[Row], StoredMessage | None],
    *,
    identity: Callable[[Row], Hashable] | None = None,
) -> AsyncIterator[list[StoredMessage]]:
    """Answer a query from rows that are cheap to list. Only the wanted messages are read.

    Args:
        query: The query.
        choose: Lists the state.
        place: Returns the place of a row.
        read: Returns the message of a row, or None if it is gone.
        identity: Returns what identifies a row's message, for a state in which messages change their places, as an
            extended lease does. The state is then listed again until nothing new is found, and no message is returned
            twice.
    """
    if identity is not None:
        async for page in _browse_moving(query, choose, place, read, identity):
            yield page
        return
    after, left = place_of(query.after), query.limit
    while True:
        rows = await choose(after, left)
        # Before anything else runs: a row may be the message itself, which can move while others are read.
        places = [place(row) for row in rows]
        seen = 0
        async for page in in_pages(first(left, map(_positioned, map(read, rows), places))):
            seen += len(page)
            yield page
        if left is None or len(rows) < left or seen == left:
            return
        # Some of the chosen messages are gone: read the same number of others in their place.
        left -= seen
        after = places[-1]


async def _browse_moving(
    query: Query,
    choose: _Choose[Row],
    place: Callable[[Row], Place],
    read: Callable[[Row], StoredMessage | None],
    identity: Callable[[Row], Hashable],
) -> AsyncIterator[list[StoredMessage]]:
    after, left = place_of(query.after), query.limit
    given: set[Hashable] = set()

    def message(row: Row, where: Place) -> StoredMessage | None:
        stored = _positioned(read(row), where)
        if stored is not None:
            given.add(identity(row))
        return stored

    for _ in range(PASSES):
        # A message that was listed before and could not be read may have another place by now.
        wanted = [(row, place(row)) for row in await choose(after, None) if identity(row) not in given]
        if not wanted:
            return
        seen = 0
        async for page in in_pages(first(left, itertools.starmap(message, wanted))):
            seen += len(page)
            yield page
        if left is not None:
            left -= seen
            if left == 0:
                return


def _positioned(stored: StoredMessage | None, where: Place) -> StoredMessage | None:
    return None if stored is None else msgspec.structs.replace(stored, position=position_of(where))


async def browse_share(
    list_rows: Callable[[], Awaitable[Sequence[Row]]],
    read: Callable[[Row], StoredMessage | None],
    *,
    identity: Callable[[Row], str] | None = None,
) -> AsyncIterator[list[StoredMessage]]:
    """Read every message of a part, in any order.

    Args:
        list_rows: Lists the rows of the part.
        read: Returns the message of a row, or None if it is gone.
        identity: Returns the id of a row's message, for a state in which messages change their places: see
            `browse_rows`.
    """
    given: set[str] = set()
    for _ in range(PASSES if identity else 1):
        rows = await list_rows()
        if identity is not None:
            rows = [row for row in rows if identity(row) not in given]
        if not rows:
            return
        async for page in in_pages(map(read, rows)):
            given.update([stored.message.id for stored in page] if identity else ())
            yield page


def first(limit: int | None, found: Iterable[StoredMessage | None]) -> Iterator[StoredMessage | None]:
    """Yield results until they hold `limit` messages. Nothing more is read."""
    count = 0
    for stored in found:
        yield stored
        count += stored is not None
        if count == limit:
            return
