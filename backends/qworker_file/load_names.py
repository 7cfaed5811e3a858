"""The names that the staged messages of a sealed load get. All processes give the same names.

<row>.<due, ms>_<tries>[_<task>]
-> _<timestamp>_<entropy>_0_~<load>:<step>:<partition>:<row>_<tries>[_<task>]

The delimiter that follows the due time is that of the item, so it has the priority.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import msgspec

from qworker.bulk.contract import Manifest, message_id
from qworker_file.names import DELIMITERS, MAX_OWN, byte_length, stem_for

__all__ = ["ItemNames", "NameOf"]

# Maps a staged name to its due time in milliseconds and its item; None if no bulk write gave this name.
NameOf = Callable[[str], "tuple[int, str] | None"]

_ROW = 9
_TAIL = re.compile(rf"\.([0-9]{{1,18}})([{re.escape(DELIMITERS)}][0-9].*)", re.DOTALL)
# Tails of names that are cached.
_KINDS = 200


class _Tail(msgspec.Struct, frozen=True, gc=False):
    """What follows the row in a staged name: `.<due, ms>_<tries>[_<task>]`."""

    due_ms: int
    # What follows the row in the item, the same without the task, and how many digits of a row leave room for the task.
    whole: str
    short: str
    room: int


class ItemNames:
    """The items of one sealed load.

    Args:
        load: The load's name.
        manifest: Its seal.
        local_time: Whether timestamps are in this host's local time.
    """

    def __init__(self, load: str, manifest: Manifest, *, local_time: bool) -> None:
        self._load = load
        self._manifest = manifest
        self._local = local_time
        # The first nanosecond of each partition. They follow one another, so that the queue has the order of the rows.
        self._starts: list[int] = []
        start = int(manifest.sealed_at * 1e9)
        for partition in manifest.partitions:
            self._starts.append(start)
            start += partition.count

    def of_partition(self, number: int) -> NameOf:
        """Return a function for one partition. It is called once for each lease."""
        start = self._starts[number]
        first = message_id(self._load, self._manifest.step, self._manifest.partitions[number].partition, 0)
        # The fields of a stem, from the pid up to the row.
        given = stem_for(first, "0_0_0").split("_", 2)[2][:-1]
        known_second, known_head = -1, ""
        tails: dict[str, _Tail] = {}

        def name(staged: str) -> tuple[int, str] | None:
            nonlocal known_second, known_head
            row, tail = staged[:_ROW], staged[_ROW:]
            known = tails.get(tail)
            if known is None:
                known = _parse_tail(tail, byte_length(given))
                if known is None:
                    return None
                if len(tails) < _KINDS:
                    tails[tail] = known
            if not (row.isascii() and row.isdigit()):
                return None
            count = int(row)
            second, ns = divmod(start + count, 1_000_000_000)
            if second != known_second:
                moment = time.localtime(second) if self._local else time.gmtime(second)
                known_second, known_head = second, f"_{time.strftime('%Y%m%d%H%M%S', moment)}_"
            # The task's name is only a label: the envelope contains all of it.
            rest = known.whole if known.room >= _ROW or len(str(count)) <= known.room else known.short
            stem = f"{known_head}{ns:09d}_{given}{count}"
            # No given id has an underscore in a stem.
            return known.due_ms, (stem if rest[0] == "_" else stem.replace("_", rest[0])) + rest

        return name


def _parse_tail(tail: str, given: int) -> _Tail | None:
    match = _TAIL.fullmatch(tail)
    if match is None:
        return None
    whole = match[2]
    # `_<14 digits>_<9 digits>_`, the given id without its row, and the rest.
    room = MAX_OWN - 26 - given - byte_length(whole)
    delimiter = whole[0]
    return _Tail(int(match[1]), whole, delimiter + whole[1:].partition(delimiter)[0], room)
