"""The message ids of rfq: UUIDs of version 1 as 32 hex digits, with the time of publishing."""

from __future__ import annotations

import hashlib
import os
import re
import secrets

__all__ = ["derive_id", "is_id", "new_ids", "published_at", "to_ticks"]

_ID = re.compile(r"[0-9a-f]{32}")
# 100 ns intervals between the UUID epoch (1582-10-15) and the Unix epoch.
_EPOCH = 0x01B21DD213814000
# A step back of this many intervals means that the clock was set.
_STEP = 10_000_000
# The bit of a random node id that says that it is not a network address.
_MULTICAST = 1 << 40


class _RfqIdMaker:
    """Makes ids that rise within the process and that no other process or container makes."""

    __slots__ = ("_last", "_tail")

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._last = 0
        self._tail = _tail(secrets.randbits(14), secrets.randbits(48))

    def take(self, count: int, now: float) -> list[str]:
        if to_ticks(now) < self._last - _STEP:
            # The clock was set back: use another sequence instead of wrong times.
            self.renew()
        first = max(to_ticks(now), self._last + 1)
        self._last = first + count - 1
        tail = self._tail
        return [_hex(ticks, tail) for ticks in range(first, first + count)]


def to_ticks(seconds: float) -> int:
    """Convert a Unix time to the time of ids."""
    return int(seconds * 10_000_000) + _EPOCH


def _hex(ticks: int, tail: str) -> str:
    return f"{ticks & 0xFFFFFFFF:08x}{(ticks >> 32) & 0xFFFF:04x}{0x1000 | (ticks >> 48) & 0x0FFF:04x}{tail}"


def _tail(sequence: int, node: int) -> str:
    return f"{0x8000 | sequence:04x}{node | _MULTICAST:012x}"


_maker = _RfqIdMaker()
os.register_at_fork(after_in_child=_maker.renew)


def new_ids(count: int, now: float) -> list[str]:
    """Return `count` new ids, which rise within this process. `now` is in Unix seconds."""
    return _maker.take(count, now)


def is_id(text: str) -> bool:
    """Return whether `text` is an id in the form of rfq."""
    return _ID.fullmatch(text) is not None


def derive_id(origin: str, ticks: int) -> str:
    """Return the id of a message that had another id in another store. It is always the same.

    Args:
        origin: The other id.
        ticks: When the message was enqueued; see `to_ticks`.
    """
    digest = int.from_bytes(hashlib.sha256(origin.encode(errors="surrogateescape")).digest()[:8])
    return _hex(ticks, _tail(digest >> 50, digest & 0xFFFFFFFFFFFF))


def published_at(message_id: str) -> float | None:
    """Return when an id was made, in Unix seconds, or None if it is not a UUID of version 1."""
    if not is_id(message_id) or message_id[12] != "1":
        return None
    ticks = int(message_id[13:16] + message_id[8:12] + message_id[:8], 16)
    return (ticks - _EPOCH) / 10_000_000
