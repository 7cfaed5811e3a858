"""The data that the log cannot store: chosen ids, due times, tries, and when records were written.

Each topic has a file for it. A record has an info only if its publisher gave more than a body. The time is recorded
once per second for all records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import msgspec

from qworker.kit.segments.format import split
from qworker_sq.frames import FrameFile

__all__ = ["RecordInfo", "RecordInfos"]

_INFO = 1
_TIME = 2


class RecordInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The data that a publisher gave for one record in addition to its body.

    Attributes:
        crc: The checksum of the payload. After a crash, another record may have the place.
        id: The id that the publisher chose.
        due: When it is due; Unix seconds. 0: at once.
        tries: The number of attempts that failed in another store.
        enqueued_at: Unix seconds.
    """

    crc: int
    id: str | None = None
    due: float = 0.0
    tries: int = 0
    enqueued_at: float | None = None

    def fits(self, payload: bytes) -> bool:
        """Return whether it belongs to this payload."""
        return crc32(payload) == self.crc


class RecordInfos:
    """The infos of one topic.

    Args:
        folder: The topic's side directory.

    Attributes:
        file: The file `notes`, which contains them.
        by_place: The info of each record that has one.
        by_id: The place of each record with a chosen id.
        due: When each record that waits for a time is due, by its place, until it is handed out.
    """

    def __init__(self, folder: int) -> None:
        self.file = FrameFile(folder, "notes", apply=self._apply, restart=self._restart)
        self._restart()

    def _restart(self) -> None:
        self.by_place: dict[int, RecordInfo] = {}
        self.by_id: dict[str, int] = {}
        self.due: dict[int, float] = {}
        self._times: list[tuple[int, float]] = []

    def _apply(self, row: Sequence[Any]) -> None:
        if row[0] == _INFO:
            _, place, crc, given, due, tries, enqueued_at = row
            info = self.by_place[place] = RecordInfo(crc=crc, id=given, due=due, tries=tries, enqueued_at=enqueued_at)
            if info.id is not None:
                self.by_id[info.id] = place
            if info.due:
                self.due[place] = info.due
        elif row[0] == _TIME and (not self._times or row[1] >= self._times[-1][0]):
            self._times.append((row[1], float(row[2])))

    @staticmethod
    def to_row(place: int, info: RecordInfo) -> list[Any]:
        """Return the row of an info."""
        return [_INFO, place, info.crc, info.id, info.due, info.tries, info.enqueued_at]

    def time_row(self, place: int, now: float) -> list[Any] | None:
        """Return a row with the time of a place, or None if a row of the same second comes before it."""
        if self._times and self._times[-1][1] <= now < self._times[-1][1] + 1.0:
            return None
        return [_TIME, place, now]

    def written_at(self, place: int) -> float:
        """Return when a record was written, to a second, or when its segment was created; Unix seconds."""
        index = bisect_right(self._times, (place, float("inf"))) - 1
        made = split(place)[0] / 1e9
        return max(self._times[index][1], made) if index >= 0 else made

    def get(self, place: int, payload: bytes) -> RecordInfo | None:
        """Return the info of a record; None if it has none."""
        info = self.by_place.get(place)
        return info if info is not None and info.fits(payload) else None

    def drop_old(self, oldest: int, keep: set[int]) -> None:
        """Rewrite the file without the data before a position, if that is most of it. Under the topic's lock."""
        old = sum(place < oldest and place not in keep for place in self.by_place)
        old_times = max(0, bisect_right(self._times, (oldest, 0.0)) - 1)
        if old + old_times < 64 or 2 * (old + old_times) < len(self.by_place) + len(self._times):
            return
        rows: list[list[Any]] = [[_TIME, place, at] for place, at in self._times[old_times:]]
        kept = {place: info for place, info in self.by_place.items() if place >= oldest or place in keep}
        rows += [self.to_row(place, info) for place, info in kept.items()]
        self.file.rewrite(rows)
        self._restart()
        for row in rows:
            self._apply(row)
