"""Publishes whose outcome is unknown. Before one of their ids is published again, the earlier call is ended.

The network may deliver a request after its caller has given up. Without this, a message that was published again,
leased and acked in the meantime would be stored once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["UncertainPublishes"]

# The ids that are remembered, and the milliseconds for which the server keeps the end of a call.
_MOST = 10_000
_KEPT_MS = 3_600_000
# The part of a key and the sequence number of a call, and the number of a message in it.
_Place = tuple[str, str, int]
_Answer = list[int | str]


class UncertainPublishes:
    """The uncertain publishes of one backend.

    Args:
        store: The store of the backend.

    Attributes:
        places: For each queue and id: the call, and the number of the message in it.
    """

    def __init__(self, store: RedisStore) -> None:
        self._pool = store.pool
        self._key = store.scripts.key
        self.places: dict[tuple[str, str], _Place] = {}

    def add(self, queue: str, key: str, sequence: str, ids: Iterable[str]) -> None:
        """Remember a call with these ids, each once, whose outcome is unknown."""
        for number, message_id in enumerate(dict.fromkeys(ids), start=1):
            self.places[queue, message_id] = key, sequence, number
        while len(self.places) > _MOST:
            del self.places[next(iter(self.places))]

    async def end(self, queue: str, ids: Iterable[str]) -> dict[str, str]:
        """End the earlier calls with these ids: they store nothing from now on.

        Returns:
            The ids that have been stored by them, each with the id that is stored instead of it: mostly the same.
        """
        stored: dict[str, str] = {}
        found = {message_id: place for message_id in ids if (place := self.places.get((queue, message_id)))}
        answers = {place[:2]: await self._end_call(queue, *place[:2]) for place in found.values()}
        for message_id, (key, sequence, number) in found.items():
            answer = answers[key, sequence]
            if answer is not None:
                others = dict(zip(answer[1::2], answer[2::2], strict=True))
                stored[message_id] = str(others.get(number, message_id))
            self.places.pop((queue, message_id), None)
        return stored

    async def _end_call(self, queue: str, key: str, sequence: str) -> _Answer | None:
        """End a call. Return its answer if it was carried out."""
        slot, mark = queue_slot(queue), self._key(queue, key)
        kept = await self._pool.command(slot, "GET", mark)
        answer = _answer(cast("bytes | None", kept), sequence)
        if answer is None:
            # The call finds a later one there. The key has no other calls any more.
            later = str(int(sequence) + 1)
            kept = await self._pool.command(slot, "SET", mark, later, "PX", _KEPT_MS, "GET")
            answer = _answer(cast("bytes | None", kept), sequence)
        return answer


def _answer(kept: bytes | None, sequence: str) -> _Answer | None:
    """Return the answer of a call that the server keeps, in the forms of the scripts."""
    if kept is None:
        return None
    if kept.isdigit():
        return [0] if kept.decode() == sequence else None
    last, answer = msgspec.msgpack.decode(kept, type=tuple[str, _Answer])
    return answer if last == sequence else None
