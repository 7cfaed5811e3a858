"""Finding messages by their ids in directories, where a search can miss messages that move in the meantime."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from qworker.kit.body_slices import finish_reading
from qworker.message import StoredMessage

__all__ = ["find_each", "stamp"]

# A message that moves between two directories just as they are searched is not missed more often than this.
_LOOKS = 4
# A change so shortly before a search (ns) may have the same time as a change during it.
_TICK_NS = 2_000_000_000

_Look = Callable[[frozenset[str]], AsyncIterator[StoredMessage]]
_Stamp = tuple[int, ...] | None


def stamp(directories: Iterable[int]) -> _Stamp:
    """Return the times of the last change of some directories, or None if one has just changed.

    Args:
        directories: The descriptors of the directories.

    Raises:
        OSError: One of them cannot be read.
    """
    times = tuple([os.fstat(directory).st_mtime_ns for directory in directories])
    return None if time.time_ns() - max(times) < _TICK_NS else times


async def find_each(
    ids: Sequence[str], look: _Look, changed: Callable[[], _Stamp] = lambda: None
) -> list[StoredMessage]:
    """Search for messages until all are found, or the rest is known not to be stored.

    Args:
        ids: The wanted ids, in any order. An id that occurs twice counts once.
        look: Yields the messages with some ids that it finds in one pass over all states.
        changed: Returns a `stamp` of all directories. If it stays the same during a search, that search has missed
            nothing.

    Returns:
        The messages, in the order of `ids`.
    """
    wanted = dict.fromkeys(ids)
    found: dict[str, StoredMessage] = {}
    for _ in range(_LOOKS if wanted else 0):
        before = changed()
        async for stored in look(frozenset(wanted) - found.keys()):
            found[stored.message.id] = await finish_reading(stored)
        if len(found) == len(wanted) or (before is not None and before == changed()):
            break
    return [found[message_id] for message_id in wanted if message_id in found]
