"""Counting the records that are ahead of a channel."""

from __future__ import annotations

import asyncio

from qworker.kit.segments.log import Log

__all__ = ["AheadCounter"]

# Records that are read in one turn of the loop.
_SLICE = 1000


class AheadCounter:
    """The number of records between two places that only move forward.

    Each record is read when it is added and when it is dropped.
    """

    def __init__(self) -> None:
        self._from = self._to = 0
        self._count = 0

    async def count(self, log: Log, begin: int, end: int) -> int:
        """Count the records from `begin` to `end`."""
        if not self._from <= begin <= self._to:
            self._from, self._to, self._count = begin, begin, 0
        self._count -= (await _count_records(log, self._from, begin))[0]
        self._from = begin
        more, self._to = await _count_records(log, self._to, end)
        self._count += more
        return self._count


async def _count_records(log: Log, place: int, stop: int) -> tuple[int, int]:
    count = 0
    while place < stop:
        found, place = log.read(place, _SLICE, stop)
        if not found:
            break
        count += len(found)
        await asyncio.sleep(0)
    return count, place
