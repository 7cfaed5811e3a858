"""Finding messages by their ids where a look can miss what moves meanwhile: what directory backends share."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from qworker.message import StoredMessage

__all__ = ["find_each", "stamp"]

# A message that moves on between two directories, each time behind the back of a look, is not missed more often than this.
_LOOKS = 4
# A change so shortly before a look (ns) may carry the same time as one during it.
_TICK_NS = 2_000_000_000

_Look = Callable[[frozenset[str]], AsyncIterator[StoredMessage]]
_Stamp = tuple[int, ...] | None


def stamp(directories: Iterable[int]) -> _Stamp:
    """The times at which some directories last changed, by their descriptors; None: one of them changes just now.

    Raises:
        OSError: one of them cannot be read.
    """
    times = tuple([os.fstat(directory).st_mtime_ns for directory in directories])
    return None if time.time_ns() - max(times) < _TICK_NS else times


async def find_each(
    ids: Sequence[str], look: _Look, changed: Callable[[], _Stamp] = lambda: None
) -> list[StoredMessage]:
    """Look for messages until all are found, or the rest is not stored.

    Args:
        ids: what is wanted, in any order; an id that comes twice counts once.
        look: gives the messages with some ids that it sees in one pass over all states.
        changed: a `stamp` of all directories: where it stays the same during a look, that look has missed nothing.

    Returns:
        The messages, in the order of `ids`.
    """
    wanted = dict.fromkeys(ids)
    found: dict[str, StoredMessage] = {}
    for _ in range(_LOOKS if wanted else 0):
        before = changed()
        async for stored in look(frozenset(wanted) - found.keys()):
            found[stored.message.id] = stored
        if len(found) == len(wanted) or (before is not None and before == changed()):
            break
    return [found[message_id] for message_id in wanted if message_id in found]
