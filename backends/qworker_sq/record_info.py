"""What the log has no place for, kept beside a topic: chosen ids, due times, tries, and when records were written.

A message has a note only where its publisher said more than a body; times are marked once a second for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import msgspec

from qworker.kit.segments.format import split
from qworker_sq.frames import FrameFile

__all__ = ["Note", "Notes"]

_NOTE = 1
_TIME = 2


class Note(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a publisher said about one record."""

    # Of the payload: a place may be written again after a crash, and the note is then another's.
    crc: int
    id: str | None = None
    # Unix seconds; 0: at once.
    due: float = 0.0
    tries: int = 0
    enqueued_at: float | None = None

    def fits(self, payload: bytes) -> bool:
        """Whether it was made for this payload."""
        return crc32(payload) == self.crc


class Notes:
    """The notes of one topic.

    Args:
        folder: the topic's side directory.
    """

    def __init__(self, folder: int) -> None:
        self.file = FrameFile(folder, "notes", apply=self._apply, restart=self._restart)
        self._restart()

    def _restart(self) -> None:
        self.by_place: dict[int, Note] = {}
        self.by_id: dict[str, int] = {}
        # Of the records that wait for a time, before they are handed out.
        self.due: dict[int, float] = {}
        self._times: list[tuple[int, float]] = []

    def _apply(self, row: Sequence[Any]) -> None:
        if row[0] == _NOTE:
            _, place, crc, given, due, tries, enqueued_at = row
            note = self.by_place[place] = Note(crc=crc, id=given, due=due, tries=tries, enqueued_at=enqueued_at)
            if note.id is not None:
                self.by_id[note.id] = place
            if note.due:
                self.due[place] = note.due
        elif row[0] == _TIME and (not self._times or row[1] >= self._times[-1][0]):
            self._times.append((row[1], float(row[2])))

    @staticmethod
    def row(place: int, note: Note) -> list[Any]:
        """The row that says a note."""
        return [_NOTE, place, note.crc, note.id, note.due, note.tries, note.enqueued_at]

    def time_row(self, place: int, now: float) -> list[Any] | None:
        """The row that marks when a place was written; None when a mark of the same second stands before it."""
        if self._times and self._times[-1][1] <= now < self._times[-1][1] + 1.0:
            return None
        return [_TIME, place, now]

    def written_at(self, place: int) -> float:
        """When a record was written, to a second; where nobody marked it, when its segment was made. Unix seconds."""
        index = bisect_right(self._times, (place, float("inf"))) - 1
        made = split(place)[0] / 1e9
        return max(self._times[index][1], made) if index >= 0 else made

    def get(self, place: int, payload: bytes) -> Note | None:
        """The note of a record."""
        note = self.by_place.get(place)
        return note if note is not None and note.fits(payload) else None

    def forget(self, oldest: int, keep: set[int]) -> None:
        """Rewrite the file without what is older than a position, where that is most of it; under the topic's lock."""
        old = sum(place < oldest and place not in keep for place in self.by_place)
        old_times = max(0, bisect_right(self._times, (oldest, 0.0)) - 1)
        if old + old_times < 64 or 2 * (old + old_times) < len(self.by_place) + len(self._times):
            return
        rows: list[list[Any]] = [[_TIME, place, at] for place, at in self._times[old_times:]]
        notes = {place: note for place, note in self.by_place.items() if place >= oldest or place in keep}
        rows += [self.row(place, note) for place, note in notes.items()]
        self.file.rewrite(rows)
        self._restart()
        for row in rows:
            self._apply(row)
