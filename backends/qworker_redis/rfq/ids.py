"""rfq's message ids: UUIDs of version 1 as 32 hex digits; they tell when a message was published."""

from __future__ import annotations

import hashlib
import os
import re
import secrets

__all__ = ["derive_id", "is_id", "new_ids", "published_at", "to_ticks"]

_ID = re.compile(r"[0-9a-f]{32}")
# 100 ns intervals between the UUID epoch (1582-10-15) and the Unix epoch.
_EPOCH = 0x01B21DD213814000
# Of these, what is taken for a clock that was set.
_STEP = 10_000_000
# Bits of a random node id that say that it is nobody's network address.
_MULTICAST = 1 << 40


class _Maker:
    """Makes ids that rise within the process, and that no other process or container makes."""

    __slots__ = ("_last", "_tail")

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._last = 0
        self._tail = _tail(secrets.randbits(14), secrets.randbits(48))

    def take(self, count: int, now: float) -> list[str]:
        if to_ticks(now) < self._last - _STEP:
            # The clock was set back: another sequence instead of times that are not.
            self.renew()
        first = max(to_ticks(now), self._last + 1)
        self._last = first + count - 1
        tail = self._tail
        return [_hex(ticks, tail) for ticks in range(first, first + count)]


def to_ticks(seconds: float) -> int:
    """A Unix time as ids tell it."""
    return int(seconds * 10_000_000) + _EPOCH


def _hex(ticks: int, tail: str) -> str:
    return f"{ticks & 0xFFFFFFFF:08x}{(ticks >> 32) & 0xFFFF:04x}{0x1000 | (ticks >> 48) & 0x0FFF:04x}{tail}"


def _tail(sequence: int, node: int) -> str:
    return f"{0x8000 | sequence:04x}{node | _MULTICAST:012x}"


_maker = _Maker()
os.register_at_fork(after_in_child=_maker.renew)


def new_ids(count: int, now: float) -> list[str]:
    """`count` new ids, rising within this process; `now` in Unix seconds."""
    return _maker.take(count, now)


def is_id(text: str) -> bool:
    """Whether `text` is an id as rfq makes them."""
    return _ID.fullmatch(text) is not None


def derive_id(origin: str, ticks: int) -> str:
    """The id of a message that had another one in another store: the same whenever it is asked for.

    Args:
        origin: that id.
        ticks: when it was enqueued; see `ticks_of`.
    """
    digest = int.from_bytes(hashlib.sha256(origin.encode(errors="surrogateescape")).digest()[:8])
    return _hex(ticks, _tail(digest >> 50, digest & 0xFFFFFFFFFFFF))


def published_at(message_id: str) -> float | None:
    """When an id was made, in Unix seconds; None for anything but a UUID of version 1."""
    if not is_id(message_id) or message_id[12] != "1":
        return None
    ticks = int(message_id[13:16] + message_id[8:12] + message_id[:8], 16)
    return (ticks - _EPOCH) / 10_000_000
