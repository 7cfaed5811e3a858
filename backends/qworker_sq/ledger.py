"""The state of a channel: a pure fold over the rows of its journal.

The log is handed out up to `cursor`. A record before it that is not in `open` is finished, so the ledger's size depends
on the records in progress and not on the backlog. The channel's position in the state file is the oldest open record,
or the cursor.

Every row is applied in the same way by the process that wrote it and by all processes that follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from qworker.message import State

__all__ = ["FailedRecord", "HandedOut", "Ledger", "RowKind"]

_EXPIRED = "the lease expired"
_OWNER_DIED = "its worker died"


class RowKind(IntEnum):
    """The kind of a row is its first field. The comments list the fields that follow."""

    LEASE = 1  # expires, first token, cursor, [place]: tokens count up from the first
    ACK = 2  # [place]
    RETRY = 3  # place, due, error: tries + 1
    FAIL = 4  # place, at, tries, error, cursor: the body is kept in fail/
    RELEASE = 5  # place, due: tries unchanged; due 0: ready
    EXTEND = 6  # expires, [place]
    EXPIRE = 7  # [place]: ready again, tries + 1
    REQUEUE = 8  # [place]: from failed to ready, tries 0
    REMOVE = 9  # [place]: open, failed, or not yet handed out
    SKIP = 10  # cursor: everything before it that is not open is finished
    OWNER = 11  # another process owns the channel now: leased records are ready again, tries + 1
    ASIDE = 12  # cursor, [[place, due, tries]]: handed out as delayed
    PAUSE = 13  # whether the channel is paused
    SNAPSHOT = 14  # cursor, token, paused, [open], [failed], [skipped]: everything


class HandedOut(msgspec.Struct, eq=False, array_like=True):
    """A record that was handed out and is not finished.

    Attributes:
        state: Its state.
        at: When it is due (delayed) or when its lease expires (leased); Unix seconds.
        tries: The number of failed attempts.
        token: The fencing token of its last lease.
        error: Why it failed last.
        kept: Whether it failed before and was requeued: its body is in fail/, and it does not hold the position.
    """

    state: State = State.READY
    at: float = 0.0
    tries: int = 0
    token: int = 0
    error: str | None = None
    kept: bool = False


class FailedRecord(msgspec.Struct, eq=False, array_like=True):
    """A record that will not run again."""

    at: float
    tries: int
    error: str | None = None


class Ledger:
    """The fold of one channel."""

    def __init__(self) -> None:
        self._folds: dict[int, Callable[..., None]] = {
            RowKind.LEASE: self._lease,
            RowKind.ACK: self._ack,
            RowKind.RETRY: self._retry,
            RowKind.FAIL: self._fail,
            RowKind.RELEASE: self._release,
            RowKind.EXTEND: self._extend,
            RowKind.EXPIRE: self._expire,
            RowKind.REQUEUE: self._requeue,
            RowKind.REMOVE: self._remove,
            RowKind.SKIP: self._advance,
            RowKind.OWNER: self._owner,
            RowKind.ASIDE: self._aside,
            RowKind.PAUSE: self._pause,
            RowKind.SNAPSHOT: self._restore,
        }
        self.reset()

    def reset(self) -> None:
        """Go back to the state of an empty journal."""
        self.cursor = 0
        self.token = 0
        self.paused = False
        self.open: dict[int, HandedOut] = {}
        self.failed: dict[int, FailedRecord] = {}
        self.skipped: set[int] = set()
        # Heaps with stale rows: ready places; (at, place) of delayed and of leased ones; places that hold the position.
        self._ready: list[int] = []
        self._delayed: list[tuple[float, int]] = []
        self._leased: list[tuple[float, int]] = []
        self._holding: list[int] = []

    # -- the fold ----------------------------------------------------------------------------------------------------

    def apply(self, row: Sequence[Any]) -> None:
        """Apply one row. Rows that this release does not know, or that do not fit, change nothing."""
        fold = self._folds.get(row[0]) if row else None
        if fold is not None:
            fold(*row[1:])

    def _lease(self, expires: float, token: int, cursor: int, places: list[int]) -> None:
        # A row that does not fit fails here, before it has changed anything.
        expires, token, cursor, places = expires + 0, token + 0, cursor + 0, [place + 0 for place in places]
        for place in places:
            entry = self._entry(place)
            entry.state, entry.at, entry.token = State.LEASED, expires, token
            heapq.heappush(self._leased, (expires, place))
            token += 1
        self.token = max(self.token, token - 1)
        self._advance(cursor)

    def _entry(self, place: int) -> HandedOut:
        entry = self.open.get(place)
        if entry is None:
            entry = self.open[place] = HandedOut()
            heapq.heappush(self._holding, place)
        return entry

    def _advance(self, cursor: int) -> None:
        if cursor > self.cursor:
            self.cursor = cursor
            if self.skipped:
                self.skipped = {place for place in self.skipped if place >= cursor}

    def _ack(self, places: list[int]) -> None:
        for place in places:
            self.open.pop(place, None)

    def _retry(self, place: int, due: float, error: str | None) -> None:
        entry = self.open.get(place)
        if entry is not None:
            entry.tries += 1
            entry.error = error
            self._wait(place, entry, due)

    def _release(self, place: int, due: float) -> None:
        entry = self.open.get(place)
        if entry is not None:
            self._wait(place, entry, due)

    def _wait(self, place: int, entry: HandedOut, due: float) -> None:
        entry.at = due
        if due:
            entry.state = State.DELAYED
            heapq.heappush(self._delayed, (due, place))
        else:
            entry.state = State.READY
            heapq.heappush(self._ready, place)

    def _fail(self, place: int, at: float, tries: int, error: str | None, cursor: int) -> None:
        self.open.pop(place, None)
        self.failed[place] = FailedRecord(at, tries, error)
        self._advance(cursor)

    def _extend(self, expires: float, places: list[int]) -> None:
        for place in places:
            entry = self.open.get(place)
            if entry is not None:
                entry.at = expires
                heapq.heappush(self._leased, (expires, place))

    def _expire(self, places: list[int], error: str = _EXPIRED) -> None:
        for place in places:
            self._retry(place, 0.0, error)

    def _requeue(self, places: list[int]) -> None:
        for place in places:
            if self.failed.pop(place, None) is not None:
                entry = self.open[place] = HandedOut(kept=True)
                self._wait(place, entry, 0.0)

    def _remove(self, places: list[int]) -> None:
        for place in places:
            if self.open.pop(place, None) is None and self.failed.pop(place, None) is None and place >= self.cursor:
                self.skipped.add(place)

    def _owner(self) -> None:
        self._expire([place for place, entry in self.open.items() if entry.state is State.LEASED], _OWNER_DIED)

    def _aside(self, cursor: int, rows: list[list[Any]]) -> None:
        for place, due, tries in rows:
            entry = self._entry(place)
            entry.tries = tries
            self._wait(place, entry, due)
        self._advance(cursor)

    def _pause(self, paused: bool) -> None:
        self.paused = paused

    def _restore(
        self,
        cursor: int,
        token: int,
        paused: bool,
        entries: list[list[Any]],
        failed: list[list[Any]],
        skipped: list[int],
    ) -> None:
        self.reset()
        self.cursor, self.token, self.paused, self.skipped = cursor, token, paused, set(skipped)
        for place, row in entries:
            entry = self.open[place] = msgspec.convert(row, HandedOut)
            if not entry.kept:
                heapq.heappush(self._holding, place)
            if entry.state is State.LEASED:
                heapq.heappush(self._leased, (entry.at, place))
            else:
                self._wait(place, entry, entry.at if entry.state is State.DELAYED else 0.0)
        self.failed = {place: msgspec.convert(row, FailedRecord) for place, row in failed}

    def snapshot_row(self) -> list[Any]:
        """Return a row with the complete state."""
        entries = [[place, entry] for place, entry in self.open.items()]
        failed = [[place, entry] for place, entry in self.failed.items()]
        return [RowKind.SNAPSHOT, self.cursor, self.token, self.paused, entries, failed, sorted(self.skipped)]

    # -- reading -----------------------------------------------------------------------------------------------------

    def position(self) -> int:
        """Return the channel's position: every record before it is finished."""
        while self._holding:
            entry = self.open.get(self._holding[0])
            if entry is not None and not entry.kept:
                return self._holding[0]
            heapq.heappop(self._holding)
        return self.cursor

    def foreign_progress(self, place: int) -> None:
        """Finish the records before a place, to which another program has moved the channel's position."""
        if place > self.position():
            for done in [done for done, entry in self.open.items() if done < place and not entry.kept]:
                del self.open[done]
            self._advance(place)

    def make_due(self, now: float) -> int:
        """Make due records ready and return their number.

        No row is written, because every process comes to the same result.
        """
        count = 0
        while self._delayed and self._delayed[0][0] <= now:
            at, place = heapq.heappop(self._delayed)
            entry = self.open.get(place)
            if entry is not None and entry.state is State.DELAYED and entry.at == at:
                self._wait(place, entry, 0.0)
                count += 1
        return count

    def expired(self, now: float) -> list[int]:
        """Return the places of the expired leases."""
        found: dict[int, None] = {}
        while self._leased and self._leased[0][0] <= now:
            at, place = self._leased[0]
            entry = self.open.get(place)
            if entry is not None and entry.state is State.LEASED and entry.at == at:
                found[place] = None
            heapq.heappop(self._leased)
        for place in found:
            # They stay in the list until a row says that they are expired, because writing that row may fail.
            heapq.heappush(self._leased, (self.open[place].at, place))
        return list(found)

    def next_ready(self, limit: int) -> list[int]:
        """Return the first open and ready places, in the log's order. They stay ready until a row is applied."""
        found: list[int] = []
        while self._ready and len(found) < limit:
            place = heapq.heappop(self._ready)
            entry = self.open.get(place)
            if entry is not None and entry.state is State.READY and (not found or found[-1] != place):
                found.append(place)
        for place in found:
            heapq.heappush(self._ready, place)
        return found

    def next_due(self) -> float | None:
        """Return when the first delayed record is due; None if none is delayed."""
        while self._delayed:
            at, place = self._delayed[0]
            entry = self.open.get(place)
            if entry is not None and entry.state is State.DELAYED and entry.at == at:
                return at
            heapq.heappop(self._delayed)
        return None

    def in_state(self, state: State) -> Iterable[int]:
        """Return the open places in a state, in the order of `browse`."""
        found = [
            (entry.at if state is not State.READY else 0.0, place)
            for place, entry in self.open.items()
            if entry.state is state
        ]
        return [place for _, place in sorted(found)]
